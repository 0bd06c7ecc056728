"""How much there is to read: lines of code (no blanks, comments, docstrings) of every file, and lengths of functions.

    python -m benchmarks.size --json size.json

Product code is everything but tests/ and benchmarks/: 4,000 lines and functions of 10 lines (median) are the aim.
"""
import ast
import io
import statistics
import sys
import tokenize

from benchmarks.arguments import new_parser
from benchmarks.report import ROOT, finish
from configs.console import exit_code

NOT_PRODUCT = ("benchmarks", "tests")
MOST_LINES, MEDIAN_FUNCTION = 4000, 10
SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source):
    """Numbers of the lines that hold code."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def function_lengths(source):
    """{name: lines of code} of all functions, the lines of inner ones included."""
    lines = code_lines(source)
    return {node.name: sum(node.lineno <= n <= node.end_lineno for n in lines)
            for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}


def measure(root=ROOT):
    """{folder: {file: (lines of code, [lengths of its functions])}}; the scripts are the folder `scripts`."""
    sizes = {}
    for path in sorted([*root.glob("*.py"), *root.glob("*/*.py")]):
        folder = "scripts" if path.parent == root else path.parent.name
        source = path.read_text()
        sizes.setdefault(folder, {})[path.name] = len(code_lines(source)), list(function_lengths(source).values())
    return sizes


def summarise(files):
    """(lines of code, number of functions, median and longest of them) of [(lines, lengths)]."""
    lengths = [n for _, one in files for n in one]
    return (sum(lines for lines, _ in files), len(lengths), statistics.median(lengths or [0]), max(lengths, default=0))


def main():
    parser = new_parser(__doc__, "size.json")
    options, sizes, rows = parser.parse_args(), measure(), {}
    for folder, files in sizes.items():
        rows.update({f"{folder}/{name}": summarise([one]) for name, one in files.items()})
        rows[f"{folder}, all"] = summarise(files.values())
    product = [one for folder, files in sizes.items() if folder not in NOT_PRODUCT for one in files.values()]
    rows["product, all"] = summarise(product)
    print(f"{'':32s}{'lines':>7s}{'functions':>10s}{'median':>8s}{'longest':>8s}")
    for name, (lines, functions, median, longest) in rows.items():
        print(f"{name:32s}{lines:7d}{functions:10d}{median:8g}{longest:8d}" + ("\n" if name.endswith("all") else ""))
    lines, _, median, _ = rows["product, all"]
    print(f"aims: product code {lines} of {MOST_LINES} lines ({lines - MOST_LINES:+d}), "
          f"median function {median:g} of {MEDIAN_FUNCTION} lines")
    finish(options.json, rows=rows)


if __name__ == "__main__":
    sys.exit(exit_code(main, ()))
