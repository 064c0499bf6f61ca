"""A command whose output nobody reads any more, as behind `| head`: it ends quietly, and its files are all there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dist_mem.model import MemoryLM
from dist_mem.runtime.network_interface import free_port
from tests.support.limits import limit
from tests.support.ranks import launcher_environment
from tests.support.scored_library import TOKENIZER, make_config, save_weights

UNREAD = 128 + signal.SIGPIPE  # as shells tell it


@pytest.fixture
def run_dir(library: Path, tmp_path: Path) -> Path:
    """A run, saved at step 3."""
    config = make_config(data={"path": str(library)})
    torch.manual_seed(0)
    save_weights(tmp_path / "run", MemoryLM(config, TOKENIZER.vocab_size).eval(), config, step=3)
    return tmp_path / "run"


def ask(arguments: list[object], *, unread: tuple[str, ...] = ("stdout",), unbuffered: bool = False) -> tuple[int, str]:
    """Exit code and standard error of a command whose `unread` streams end in a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    streams = {name: writer if name in unread else subprocess.PIPE for name in ("stdout", "stderr")}
    environment = {**os.environ, **launcher_environment(0, 1, free_port()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "dist_mem", *map(str, arguments)],
        **streams,
        env={**environment, "PYTHONUNBUFFERED": "1" if unbuffered else ""},
        timeout=limit(120),
    )
    os.close(writer)
    return done.returncode, (done.stderr or b"").decode()


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", [False, True])
def test_an_evaluation_that_nobody_reads_writes_its_report(run_dir: Path, unbuffered: bool) -> None:
    code, reported = ask(["evaluate", run_dir, "--split", "test"], unbuffered=unbuffered)
    assert code == UNREAD, reported
    assert "error" not in reported and "Traceback" not in reported and "Broken pipe" not in reported
    report = json.loads((run_dir / "evaluations" / "test-step-00000003.json").read_text(encoding="utf-8"))
    assert report["step"] == 3


@pytest.mark.slow
def test_neither_do_errors_that_nobody_reads_stop_it(run_dir: Path) -> None:
    code, _ = ask(["evaluate", run_dir, "--split", "test"], unread=("stdout", "stderr"))
    assert code == UNREAD
    assert (run_dir / "evaluations" / "test-step-00000003.json").exists()
    assert ask(["evaluate", run_dir / "absent"], unread=("stderr",))[0] == 2


def test_a_sweep_that_nobody_reads_measures_every_row(run_dir: Path) -> None:
    """It says each row at once, and so meets the closed pipe long before its end."""
    code, reported = ask(["evaluate", run_dir, "--split", "test", "--sweep", "mem_len=4,8"])
    assert code == UNREAD, reported
    assert "error" not in reported and "Traceback" not in reported
    assert len((run_dir / "evaluations" / "sweep-test-mem_len.csv").read_text(encoding="utf-8").splitlines()) == 3


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], UNREAD), (["generate", "--help"], 0), (["config"], UNREAD)]
)
def test_what_prints_only_ends_quietly(arguments: list[object], code: int, unbuffered: bool) -> None:
    assert ask(arguments, unbuffered=unbuffered) == (code, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_without_standard_streams_it_is_as_if_nobody_read(closed: str) -> None:
    done = subprocess.run(["bash", "-c", f"{sys.executable} -m dist_mem config {closed}"], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


INHERITED = """
import os
from dist_mem.cli.broken_pipe import watch_standard_streams
watch_standard_streams()
os._exit(os.get_inheritable(1) and os.get_inheritable(2))
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_child_processes_have_standard_streams_too(closed: str) -> None:
    """Else the first file that they open gets the number of their output."""
    done = subprocess.run(["bash", "-c", f"{sys.executable} -c '{INHERITED}' {closed}"])
    assert done.returncode == 1


TRAINED = """
import sys
from dist_mem import __main__
from dist_mem.cli import commands
def train(options):
    print("done")
    return 0
commands.train = train
sys.argv = ["dist-mem", "train", "a.yaml"]
__main__.entry()
"""


def test_a_training_that_nobody_reads_ends_with_its_own_code() -> None:
    """A launcher takes any other for a failure: torchrun --max-restarts would start anew what is done."""
    reader, writer = os.pipe()
    os.close(reader)
    assert subprocess.run([sys.executable, "-c", TRAINED], stdout=writer).returncode == 0
    os.close(writer)
