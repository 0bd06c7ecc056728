"""One HTML file about a run that needs no network: scores, learning curves, settings, versions.

    python -m runtime.report runs/quick
"""
import html
import json
import sys
from pathlib import Path

from runtime.checkpoint import versions
from runtime.metrics import VOCABULARY, read_metrics

STYLE = """:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:auto;padding:1rem}
table{border-collapse:collapse;display:block;overflow-x:auto}
td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #8884;white-space:nowrap}
td:first-child,th:first-child{text-align:left}
svg{width:100%;max-width:28rem;height:auto}
figure{display:inline-block;margin:.5rem;width:26rem;max-width:95%;vertical-align:top}
pre{overflow-x:auto;font-size:.8rem}figcaption{font-size:.85rem}"""
SCORES = ("s_total", "s_efficiency", "s_stability", "ocr_change", "arrived", "sigma_v", "abs_a", "c_int", "collisions",
          "teleports", "min_ttc", "hard_brakes", "shield_clips", "shield_emergencies")
COLOURS = ("#2a7de1", "#e1752a", "#2aa45c")
CURVES = {1: (("rmse_position", "rmse_position_cv"), ("rmse_speed", "rmse_speed_cv"), ("loss_held_out",)),
          2: (("return",), ("c_int",)),
          3: (("c_int", "limit"), ("multiplier",), ("reward",))}


def build_report(folder):
    """Write report.html into a run folder; returns its path. Parts whose files are missing are left out."""
    folder, parts = Path(folder), []
    if (folder / "evaluation.json").exists():
        parts += score_section(json.loads((folder / "evaluation.json").read_text()))
    if (folder / "metrics.jsonl").exists():
        parts += curve_sections(read_metrics(folder / "metrics.jsonl"))
    if (folder / "state.json").exists():
        state = json.loads((folder / "state.json").read_text())
        parts += ["<h2>Steps</h2>", grid(["step", "status", "seconds"], [
            [name, s["status"], f"{s['seconds']:.0f}"] for name, s in state["steps"].items() if "seconds" in s]),
            f"<p>Command: <code>{html.escape(state['command'])}</code></p>"]
    parts += ["<h2>Versions</h2>", grid(["package", "version"], list(versions().items()))]
    if (folder / "config.yaml").exists():
        parts += ["<h2>Configuration</h2>", f"<pre>{html.escape((folder / 'config.yaml').read_text())}</pre>"]
    page = (f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
            f"<title>{html.escape(folder.name)}</title><style>{STYLE}</style><h1>{html.escape(folder.name)}</h1>"
            + "\n".join(parts) + "</html>")
    (folder / "report.html").write_text(page)
    return folder / "report.html"


def score_section(result):
    """The score table: mean +- 95 % interval by controller."""
    names = list(result["summary"])
    rows = [[key, *(cell(result["summary"][n].get(key)) for n in names)] for key in SCORES]
    return [f"<h2>Scores</h2><p>{html.escape(result['scenario'])}, {len(result['seeds'])} held-out seeds paired with "
            f"the same traffic without control, SUMO {result['sumo_version']}; mean ± 95 % interval.</p>",
            grid(["", *names], rows)]


def cell(value):
    """Mean and interval of one metric as text."""
    if not value or value["mean"] is None:
        return "–"
    return f"{value['mean']:.3g}" + ("" if value["ci95"] is None else f" ± {value['ci95']:.2g}")


def grid(head, rows):
    """An HTML table."""
    def line(tag, cells):
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in cells) + "</tr>"
    return "<table>" + line("th", head) + "".join(line("td", r) for r in rows) + "</table>"


def curve_sections(rows):
    """HTML of the learning curves, one section per phase."""
    parts = []
    for phase, groups in CURVES.items():
        mine = [r for r in rows if r["phase"] == phase]
        mine = [r for r in mine if r.get("stage") == mine[-1].get("stage")]  # a stage has its own loss
        if mine:
            parts.append(f"<h2>Phase {phase}</h2>" + "".join(curve(mine, names) for names in groups))
    return parts


def curve(rows, names, width=420, height=180, left=58):
    """A line chart of some metrics over epochs as inline SVG."""
    series = {n: [(r["epoch"], r[n]) for r in rows if r.get(n) is not None] for n in names}
    points = [p for line in series.values() for p in line]
    if not points:
        return ""
    (x0, x1), (y0, y1) = ((min(v), max(v)) for v in zip(*points))
    right, low = max(x1, x0 + 1), height - 24
    top = y1 if y1 > y0 else y0 + 1

    def place(x, y):
        across, up = (x - x0) / (right - x0), (y - y0) / (top - y0)
        return f"{left + across * (width - left - 8):.1f},{low - up * (low - 12):.1f}"

    def text(x, y, what):
        return f"<text x={x} y={y} font-size=11 fill=currentColor>{what}</text>"

    body = "".join(f"<polyline fill=none stroke={c} stroke-width=2 points='{' '.join(place(*p) for p in line)}'/>"
                   for c, line in zip(COLOURS, series.values()))
    body += text(2, 16, f"{top:.3g}") + text(2, low, f"{y0:.3g}") + text(left, height - 6, f"epoch {x0} to {x1}")
    body += f"<path d='M{left} 8V{low}H{width - 8}' fill=none stroke=currentColor opacity=.4 />"
    caption = ", ".join(f"<span style='color:{c}'>{n}</span> ({html.escape(VOCABULARY[n])})"
                        for c, n in zip(COLOURS, series))
    return f"<figure><svg viewBox='0 0 {width} {height}'>{body}</svg><figcaption>{caption}</figcaption></figure>"


def main():
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        print("usage: python -m runtime.report RUN_FOLDER (an existing folder)", file=sys.stderr)
        return 2
    print(f"report: {build_report(sys.argv[1])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
