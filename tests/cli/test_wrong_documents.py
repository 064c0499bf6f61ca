"""No YAML document ends a command in a traceback or holds it up, and what is refused is refused with its file.

A study is read as a whole before its rows are looked up; --rows of an unknown one ends there, at once.
"""

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_mem.__main__ import main
from dist_mem.errors import EXIT_DONE, EXIT_USAGE
from tests.support.damaged_json import VALUES, places
from tests.support.paths import ROOT

SMALL = ["model.num_layers=1", "model.d_model=16", "model.num_heads=2", "model.d_inner=16", "train.threads=1"]
OF_A_RUN = [["config"], ["train", "--check", *SMALL], ["launch", "--dry-run", "launch.gpus_per_node=0", *SMALL]]
OF_A_STUDY = [["sweep", "--rows", "nosuchrow"], ["arena", "--rows", "nosuchrow"], ["reproduce", "--rows", "nosuchrow"]]
NUM_EACH = 3
# The first names the folder that is not there, the second what no file sets.
WITHOUT_FILE = ("model.pretrained", "neither is given")
ODD = [
    *(*VALUES, [1], {"a": 1}, {"a": {"b": {"c": [1, {"d": None}]}}}, [[[[]]]], -(10**400), 0.1, "2024-01-01", ".."),
    *("???", "${nowhere}", "${oc.env:DIST_MEM_NEVER_SET}", "${", "$HOME/x", "a\0b", "x" * 20_000),
]
TEXTS: tuple[Callable[[str, random.Random], str], ...] = (
    lambda text, draw: text[: draw.randrange(len(text))],
    lambda text, draw: text.replace(": ", ":\t", 1 + draw.randrange(3)),
    lambda text, draw: text.replace("\n", "\n\t", 1),
    lambda text, draw: "[" * 2_000 + text,
    lambda text, draw: f"- 1\n{text}",
    lambda text, draw: f"{text}\n---\n{text}",
    lambda text, draw: f"a: &a [*a]\n{text}",
    lambda text, draw: f"a: &a [1]\nb: &b [{'*a,' * 9}]\nc: &c [{'*b,' * 9}]\nd: &d [{'*c,' * 9}]\n{text}",
    lambda text, draw: f"{text}\n<<: {{zz: 1}}",
    lambda text, draw: f"{text}\n{text}",
    lambda text, draw: "5",
    lambda text, draw: text.replace(
        ": ", f": !!{draw.choice(['python/object:os.system', 'binary', 'int', 'set'])} ", 1
    ),
    lambda text, draw: "".join(
        chr(draw.choice([0, 7, 9, 0x85, 0x2028, 0xFEFF, 0x1F600])) if draw.random() < 0.01 else letter
        for letter in text
    ),
    lambda text, draw: "? [a, b]\n: c\n" + text,
)


def shipped() -> list[Path]:
    """Return every YAML file that comes with dist_mem."""
    return sorted(path for folder in ("configs", "launch", "examples") for path in (ROOT / folder).rglob("*.yaml"))


def changed(path: Path, draw: random.Random) -> bytes:
    """Return a document with one to three values replaced, removed or renamed, or with its text spoilt."""
    text = path.read_text(encoding="utf-8")
    if draw.random() < 0.3:
        return draw.choice(TEXTS)(text, draw).encode("utf-8", "surrogatepass")
    tree = copy.deepcopy(yaml.safe_load(text)) or {}
    for _ in range(draw.randint(1, 3)):
        if found := places(tree):
            change(*draw.choice(found), draw)
    return yaml.safe_dump(tree, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")


def change(block: Any, name: Any, draw: random.Random) -> None:
    what = draw.random()
    if what < 0.7:
        block[name] = copy.deepcopy(draw.choice(ODD))
    elif what < 0.85 and isinstance(block, dict):
        block[f"{name}x"] = block.pop(name)
    else:
        block.pop(name)


def answer(command: list[str], path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return exit code and error of a command in this process."""
    try:
        code = main([command[0], str(path), *command[1:]])
    except SystemExit as left:  # argparse
        code = int(left.code or 0)
    return code, capsys.readouterr().err


@pytest.mark.parametrize("seed", range(40))
def test_no_document_ends_in_a_traceback(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(seed)
    for number in range(NUM_EACH):
        origin = draw.choice(shipped())
        path = tmp_path / f"wrong-{number}.yaml"
        path.write_bytes(changed(origin, draw))
        is_study = origin.parent.name in ("tables", "sweeps", "arena")
        command = draw.choice(OF_A_STUDY if is_study != (draw.random() < 0.1) else OF_A_RUN)
        code, error = answer(command, path, capsys)
        assert code in (EXIT_DONE, EXIT_USAGE), (command, origin, path.read_bytes(), error)
        assert "Traceback" not in error
        lines = re.findall(r"^error: (.*)", error, re.MULTILINE)
        assert (code == EXIT_USAGE) == bool(lines), error
        assert all(any(name in line for name in (path.stem, "command line", *WITHOUT_FILE)) for line in lines), error
