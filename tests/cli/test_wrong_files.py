"""Whatever stands in the place of a file that somebody else has made: a command refuses it, and waits for nothing.

The files are found by walking a data directory, a run, an export and a memory file; which command reads which file is
found by watching what it opens.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from _pytest.mark import ParameterSet

from dist_mem.runtime.network_interface import free_port
from tests.runtime.test_terminal import steering
from tests.support.faults import CONTENTS, PLACES, Damage
from tests.support.ranks import launcher_environment
from tests.support.whole_folders import COMMANDS, Answer, Folders, make_folders, opened_by, run_command

pytestmark = [pytest.mark.usefixtures("single_process"), pytest.mark.timeout(3600)]
# What a SHA-256 covers: it is used as it was written, or not at all.
HASHED = re.compile(r"data/(?!.*\.tar)|export/(?!README)|run/checkpoints/|text\.mem")
VARYING = re.compile(r"\d+\.\d+ s\b|[\d,.]+ tokens/s|\d:\d\d:\d\d|\S*/(whole|copy)\S*|.*(entries sent|MLflow has).*")
SLOW = ("figure", "track", "report", "inspect")  # commands that take seconds


class Whole(NamedTuple):
    """Whole folders, and what the commands do with them."""

    folders: Folders
    uri: str
    answers: dict[str, Answer]
    readers: dict[Path, list[str]]  # file -> the commands that open it


@pytest.fixture(scope="module")
def whole(
    library: Path, tmp_path_factory: pytest.TempPathFactory, sqlite_uri: str, request: pytest.FixtureRequest
) -> Iterator[Whole]:
    """The folders; without programs on the PATH, so that no Slurm of this machine is asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/nonexistent")
        for name, value in launcher_environment(0, 1, free_port()).items():
            patch.setenv(name, value)
        root = tmp_path_factory.mktemp("whole")
        folders = make_folders(root, library)
        answers, readers = {}, {path: [] for path in folders.files()}
        for command in COMMANDS:
            answers[command], opened = opened_by(copied(folders, root / "copy"), command, sqlite_uri)
            for path in opened & readers.keys():
                readers[path].append(command)
        yield Whole(folders, sqlite_uri, answers, readers)


def copied(folders: Folders, to: Path) -> Folders:
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    for name in ("run", "data", "export"):
        shutil.copytree(folders.root / name, to / name, symlinks=True)
    shutil.copy(folders.root / "text.mem", to / "text.mem")
    return Folders(to)


def faults(whole: Whole, path: Path, damage: Damage, command: str, seed: int) -> Iterator[str]:
    """Damage a file of a copy, run a command, and yield what is wrong with its answer."""
    copy, choose = copied(whole.folders, whole.folders.root / "copy"), random.Random(f"{path} {seed}")
    damage(copy.root / path, choose)
    answer = run_command(copy.arguments(command, whole.uri))
    text, allowed = answer.printed + answer.error, {0, 2}
    if command.startswith(("data verify", "checkpoints")):
        allowed.add(1)  # "something is damaged"
    if answer.code not in allowed or "Traceback" in text:
        yield f"code {answer.code}: {text[-300:]}"
    elif answer.code and path.name not in text and not ALONE.search(text):
        yield f"code {answer.code} does not name the file: {text[-300:]}"
    elif steering(text):
        yield f"steers a terminal: {text[-300:]!r}"
    elif answer.code == 0 and damage in PLACES and not may_be_left(path, damage, command) and path.name not in text:
        yield "is used or left out without a word"
    elif answer.code == 0 and HASHED.match(str(path)) and path.name not in text:
        before = whole.answers[command].printed
        if VARYING.sub("", answer.printed) != VARYING.sub("", before):
            yield f"another result without a word: {answer.printed[-300:]}"


ALONE = re.compile(r"no Slurm|no squeue|no job and no log")  # true, whatever a line of the file says


def may_be_left(path: Path, damage: Damage, command: str) -> bool:
    """Whether a command may leave a file out that only makes its answer nicer, or that is a link to a regular file."""
    return damage.__name__ == "as_link_out" or command.startswith("checkpoints") or path.name == "report.txt"


def tried(whole: Whole, damages: list[Damage], *, share: float, seeds: range) -> Iterator[tuple[str, list[str]]]:
    """Try a share of all places, damages and commands, and yield each with what is wrong."""
    choose = random.Random(f"{share}")
    for path, commands in whole.readers.items():
        for damage in damages:
            for command in commands:
                if choose.random() > (share / 5 if share < 1 and command.startswith(SLOW) else share):
                    continue
                for seed in seeds:
                    found = list(faults(whole, path, damage, command, seed))
                    yield f"{path}, {damage.__name__}, {command}, seed {seed}", found


def test_whole_folders_are_read_by_every_command_and_every_file_by_one(whole: Whole) -> None:
    codes = {command: answer.code for command, answer in whole.answers.items()}
    assert {name for name, code in codes.items() if code} == {"cancel RUN"}, whole.answers
    unread = {path.name for path, commands in whole.readers.items() if not commands}
    read_by_a_start = {"starts.jsonl", "cancelled"}  # tests/training/test_run_files.py; by a cancel with Slurm
    assert {name for name in unread if not name.endswith(".csv")} <= read_by_a_start


QUICK: list[ParameterSet] = [
    pytest.param(0.12, id="some", marks=pytest.mark.core),
    pytest.param(1.0, id="all", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("share", QUICK)
def test_no_pipe_folder_device_or_link_is_read_or_waited_for(whole: Whole, share: float) -> None:
    wrong = {name: found for name, found in tried(whole, PLACES, share=share, seeds=range(1)) if found}
    assert wrong == {}


@pytest.mark.parametrize(
    ("share", "seeds"), [pytest.param(0.05, 1, id="some"), pytest.param(1.0, 6, id="all", marks=pytest.mark.nightly)]
)
def test_no_damage_is_a_traceback_a_hang_or_used_without_a_word(whole: Whole, share: float, seeds: int) -> None:
    wrong = {name: found for name, found in tried(whole, CONTENTS, share=share, seeds=range(seeds)) if found}
    assert wrong == {}
