"""`dist-mem` and Python files in milliseconds: a call runs in a process forked from one that has imported everything.

A call has its own process, folder, environment, arguments, streams and exit code, as a user's does, and gets SIGINT and
SIGTERM. `running_server` starts the process that is forked; `write_programs` writes the programs that call it.
"""

import importlib
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from tests.support.limits import wait_until
from tests.support.paths import ROOT

_IMPORTED = [
    "dist_mem.__main__",
    "dist_mem.training.run",
    "dist_mem.evaluation.compare",
    "dist_mem.evaluation.evaluate",
    "dist_mem.evaluation.export",
    "dist_mem.generation.continue_prompts",
    "dist_mem.studies.run_study",
    "deepspeed.runtime.superoffload",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "torch._dynamo",
    "mlflow",  # after deepspeed, whose autotuner would import it
]
_FILE = "WARM_FILE"  # environment variable: the Python file to run in place of `dist-mem`
_NO_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a fork would lose them
_CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"+"], [0, 1, 2])
    request = {{"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
    server.sendall(json.dumps(request).encode() + b"\\n")
    answers = server.makefile()
    child = int(answers.readline() or 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(child, number))
    code = int(answers.readline() or 1)
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextmanager
def running_server(folder: Path) -> Iterator[Path]:
    """Run a server that has imported everything; yield its address."""
    address = folder / "warm"
    with (folder / "warm.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_programs", str(address)],
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=folder,
            env={**os.environ, **_NO_THREADS, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        )
    try:
        wait_until(lambda: address.exists() or server.poll() is not None, "the server of programs", seconds=120)
        assert server.poll() is None, (folder / "warm.log").read_text(encoding="utf-8")
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def write_programs(folder: Path, address: Path) -> None:
    """Write `dist-mem`, and a `python` that runs it for `-m dist_mem`, runs files, and is the real Python otherwise."""
    client = folder / "dist-mem"
    client.write_text(_CLIENT.format(python=sys.executable, address=str(address)), encoding="utf-8")
    warm, real = shlex.quote(str(client)), shlex.quote(sys.executable)
    python = folder / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'if [ "$1 $2" = "-m dist_mem" ]; then shift 2; exec {warm} "$@"; fi\n'
        f'case "$1" in *.py) {_FILE}="$1" exec {warm} "$@" ;; esac\n'
        f'exec {real} "$@"\n',
        encoding="utf-8",
    )
    for program in (client, python):
        program.chmod(0o755)


def _serve(address: str) -> None:
    """Fork a process for each call, as long as the parent lives."""
    parent = os.getppid()
    from dist_mem.runtime.distributed import choose_accelerator

    choose_accelerator()
    for name in _IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the processes of `_attend` are not waited for
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen(16)
        listener.settimeout(1.0)
        Path(f"{address}.new").rename(address)
        while os.getppid() == parent:  # the parent may be killed without ending this process
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            if os.fork() == 0:
                listener.close()
                _attend(connection)
            connection.close()


def _attend(connection: socket.socket) -> NoReturn:
    """Run one call in a child process; reply with its number, then its exit code, which is negative for a signal."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as lines:
        request = json.loads(lines.readline())
    child = os.fork()
    if child == 0:
        connection.close()
        _run(request["arguments"], request["folder"], request["environment"], streams)
    connection.sendall(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _run(arguments: Sequence[str], folder: str, environment: dict[str, str], streams: Sequence[int]) -> NoReturn:
    for stream, given in enumerate(streams):
        os.dup2(given, stream)
        os.close(given)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["dist-mem", *arguments]
    sys.executable = str(Path(environment["WARM_PROGRAMS"]) / "python")  # for commands that run other commands
    if file := os.environ.pop(_FILE, ""):
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(file).resolve().parent))
        runpy.run_path(file, run_name="__main__")
        sys.exit()
    from dist_mem.__main__ import entry

    entry()


if __name__ == "__main__":
    _serve(sys.argv[1])
