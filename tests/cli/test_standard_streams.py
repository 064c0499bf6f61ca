"""A command whose output nobody reads, as behind `| head`, or no disk takes: its files are all there."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest
import torch

from dist_mem.block import model_spec
from dist_mem.cli.standard_streams import LOST_LINES
from dist_mem.model import MemoryLM
from dist_mem.runtime.network_interface import free_port
from tests.support.faults import small_disk
from tests.support.limits import limit
from tests.support.messages import said
from tests.support.ranks import launcher_environment
from tests.support.scored_library import TOKENIZER, make_config, save_weights

UNREAD = 128 + signal.SIGPIPE  # as shells tell it


@pytest.fixture
def run_dir(library: Path, tmp_path: Path) -> Path:
    """A run, saved at step 3."""
    config = make_config(data={"path": str(library)})
    torch.manual_seed(0)
    save_weights(tmp_path / "run", MemoryLM(model_spec(config, TOKENIZER.vocab_size)).eval(), config, step=3)
    return tmp_path / "run"


def ask(arguments: list[object], *, unread: tuple[str, ...] = ("stdout",), unbuffered: bool = False) -> tuple[int, str]:
    """Exit code and standard error of a command whose `unread` streams end in a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    streams = {name: writer if name in unread else subprocess.PIPE for name in ("stdout", "stderr")}
    environment = {**os.environ, **launcher_environment(0, 1, free_port())}
    done = subprocess.run(
        [sys.executable, "-m", "dist_mem", *map(str, arguments)],
        **streams,
        env={**environment, "PYTHONUNBUFFERED": "1" if unbuffered else ""},
        timeout=limit(120),
    )
    os.close(writer)
    return done.returncode, (done.stderr or b"").decode()


@pytest.mark.parametrize(
    ("unread", "unbuffered"), [(("stdout",), False), (("stdout",), True), (("stdout", "stderr"), False)]
)
def test_an_evaluation_that_nobody_reads_writes_its_report(
    run_dir: Path, unread: tuple[str, ...], unbuffered: bool
) -> None:
    code, reported = ask(["evaluate", run_dir, "--split", "test"], unread=unread, unbuffered=unbuffered)
    assert code == UNREAD, reported
    assert "error" not in reported and "Traceback" not in reported and "Broken pipe" not in reported
    report = json.loads((run_dir / "evaluations" / "test-step-00000003.json").read_text(encoding="utf-8"))
    assert report["step"] == 3


def test_an_error_that_nobody_reads_has_its_code(tmp_path: Path) -> None:
    assert ask(["evaluate", tmp_path / "absent"], unread=("stderr",))[0] == 2


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
from dist_mem.cli.standard_streams import watch_standard_streams
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
from pathlib import Path
from dist_mem import __main__
from dist_mem.cli import standard_streams
from dist_mem.cli.commands import compare, train
def run(options):
    standard_streams.note_lost_lines(Path("run"))
    print("before there is a folder", flush=True)
    Path("run").mkdir()
    for step in range(2000):
        print("step", step, "\\udce9", flush=True)
        print("step", step, file=sys.stderr)
    Path("run/done").touch()
    return 0
train.run = compare.run = run
sys.argv = ["dist-mem", sys.argv[1], "a.yaml"]
__main__.entry()
"""


@contextmanager
def full_device(folder: Path) -> Iterator[int]:
    with Path("/dev/full").open("wb") as file:
        yield file.fileno()


@contextmanager
def full_disk(folder: Path) -> Iterator[int]:
    with small_disk(folder / "disk", "size=8k") as disk, (disk / "log").open("wb") as file:
        yield file.fileno()


@contextmanager
def closed_terminal(folder: Path) -> Iterator[int]:
    master, terminal = os.openpty()
    os.close(master)
    yield terminal
    os.close(terminal)


@contextmanager
def slow_reader(folder: Path) -> Iterator[int]:
    """A pipe that does not block its writer, as other programs may leave it, and that is full."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        os.write(writer, bytes(1 << 20))
        os.write(writer, bytes(1 << 20))
    yield writer
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("broken", [full_device, full_disk, closed_terminal, slow_reader])
def test_no_line_that_cannot_be_written_ends_a_training(
    tmp_path: Path, broken: Callable[[Path], AbstractContextManager[int]]
) -> None:
    with broken(tmp_path) as output:
        done = subprocess.run([sys.executable, "-c", TRAINED, "train"], cwd=tmp_path, stdout=output, stderr=output)
    assert done.returncode == 0 and (tmp_path / "run" / "done").exists()
    noted = (tmp_path / "run" / LOST_LINES).read_text(encoding="utf-8")
    assert sorted(re.findall(r"lost lines for (<\w+>): \[Errno", noted)) == ["<stderr>", "<stdout>"], noted
    for line in noted.splitlines():
        said(line, "lost lines for")


def test_a_command_whose_result_no_disk_takes_is_1(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", TRAINED, "compare"]
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1 and (tmp_path / "run" / "done").exists()
    assert done.stderr.splitlines()[-1].startswith(b"error: standard output cannot be written: [Errno 28]")


def test_a_training_that_nobody_reads_ends_with_its_own_code(tmp_path: Path) -> None:
    """A launcher takes any other for a failure: torchrun --max-restarts would start anew what is done."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", TRAINED, "train"]
    assert subprocess.run(command, stdout=writer, stderr=subprocess.DEVNULL, cwd=tmp_path).returncode == 0
    os.close(writer)
