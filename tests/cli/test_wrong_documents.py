"""No YAML document ends a command in a traceback or holds it up, and what is refused is refused with its file.

A study is read as a whole before its rows are looked up; --rows of an unknown one ends there, at once.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.errors import EXIT_DONE, EXIT_USAGE
from tests.support.wrong_documents import changed, shipped

SMALL = ["model.num_layers=1", "model.d_model=16", "model.num_heads=2", "model.d_inner=16", "train.threads=1"]
OF_A_RUN = [["config"], ["train", "--check", *SMALL], ["launch", "--dry-run", "launch.gpus_per_node=0", *SMALL]]
OF_A_STUDY = [["sweep", "--rows", "nosuchrow"], ["arena", "--rows", "nosuchrow"], ["reproduce", "--rows", "nosuchrow"]]
NUM_EACH = 3
# The first names the folder that is not there, the second what no file sets.
WITHOUT_FILE = ("model.pretrained", "neither is given")


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
