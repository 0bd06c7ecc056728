"""Damaged configurations: (command line, words of which the refusal must name one), see benchmarks/fuzz_inputs.py."""
import numpy as np

from configs import Config
from configs.options import leaves

SETTINGS = list(leaves(Config()))


def yaml_of(key, text):
    """A YAML document that sets one dotted key to a text of YAML."""
    *sections, last = key.split(".")
    lines = [*(f"{'  ' * i}{name}:" for i, name in enumerate(sections)), f"{'  ' * len(sections)}{last}: {text}"]
    return "\n".join(lines) + "\n"


def wrong_value(rng):
    """A value that no setting of its type takes."""
    key, value, meta = SETTINGS[rng.integers(len(SETTINGS))]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    wrong = ["[[1]]", "{a: 1}", "~", "!!binary aGVsbG8=", "2024-02-02", '"a\\0b"', '"\\ud800"']
    digits = "9" * (30 if isinstance(value, int) else 400)
    wrong += [".nan", ".inf", "-.inf", "true", "text", digits] if number else []
    wrong += ["-1", "-1e30"] if number and meta.get("low", -1) >= 0 else []
    return yaml_of(key, wrong[rng.integers(len(wrong))]).encode(), [key]


def unknown_key(rng):
    key, _, _ = SETTINGS[rng.integers(len(SETTINGS))]
    letters = list(key)
    at = len(key) - 1 - rng.integers(len(key.split(".")[-1]))
    letters.insert(at, "q")
    return yaml_of("".join(letters), "1").encode(), ["".join(letters)]


def whole_document(rng):
    """Documents that are wrong as a whole."""
    documents = [
        b"phase1: {epochs: 3, lr: [1", b"phase1: {epochs: 3}\nphase1: {epochs: 4}\n", b"run: {name: a, name: b}\n",
        b"run: {name: \xff\xfe}\n", b"\x89PNG\r\n\x1a\n\0\0\0", "run: {name: é}".encode("utf-16"), b"- run\n- env\n",
        b"run: {seed: 2024-13-45}\n", b"run: {seed: !!int x}\n", b"run: {seed: !!timestamp x}\n", b"[" * 3000,
        b"run: {seed: !!float x}\n", b"run: &a {seed: *a}\n", b"run: {? [a, b] : 1}\n", b"run: {<<: 5}\n",
        b"run: {name: !!python/object/apply:os.system ['touch executed']}\n", b"\trun: {}\n", b"run: *nobody\n",
        b"base: mine.yaml\n", b"base: [a]\n", b"base: gone.yaml\n", b"base: 'a\\0b'\n", b'base: "a\\0b"\n',
        b"base: .\n",
        ("base: " + "x" * 5000 + "\n").encode(), b"!!set {run}\n", b"~: 1\n", b"1: 2\n", b"run: {1: 2}\n",
        b"run: text\n",
        b"run: {seed: " + b"7" * 5000 + b"}\n", bytes(rng.integers(0, 256, 300, dtype=np.uint8)), b"run: {name: ''}\n",
        b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
            b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(8)) + b"run: *i\n"]
    return documents[rng.integers(len(documents))], ["mine.yaml"]


def configuration(folder, rng):
    content, words = [wrong_value, unknown_key, whole_document, whole_document][rng.integers(4)](rng)
    (folder / "mine.yaml").write_bytes(content)
    return ["data.preprocess", "--config", "mine.yaml"], words
