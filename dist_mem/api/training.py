"""Train from Python: the same processes as `dist-mem train`, on this machine."""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dist_mem.config import Config, load_config, to_yaml
from dist_mem.config.blocks import as_tree
from dist_mem.config.interpolations import as_plain
from dist_mem.config.values import dump
from dist_mem.errors import (
    EXIT_DIVERGED,
    EXIT_DONE,
    EXIT_REQUEUE,
    EXIT_USAGE,
    DivergedError,
    RunError,
    StoppedError,
    UnfitError,
    UnusableError,
)
from dist_mem.memory import memory_options
from dist_mem.runtime.children import launcher, start

_ERRORS = {EXIT_USAGE: UnusableError, EXIT_DIVERGED: DivergedError, EXIT_REQUEUE: StoppedError}
_TAIL = 200  # lines of output in which the error of a failed training is looked for


def train(config: Path | str | Mapping[str, Any] | Config, *overrides: str, ranks: int | None = None) -> Path:
    """Start or resume a run, print its output, and return the run directory when it has ended.

    The training runs in processes of its own, with real ranks of DeepSpeed. Ctrl-C (in a notebook: interrupt) stops it
    with everything saved; the same call resumes it.

    Args:
        config: a YAML file, or the configuration itself: a mapping, or what `load_config` returns.
        overrides: further YAML files and `key=value`, as on the command line.
        ranks: processes; None: one per GPU, or one on CPUs.

    Raises:
        TypeError: an argument is of a wrong type.
        UnusableError: the configuration or the data are invalid (exit code 2); the message names what to change.
        DivergedError: the loss, a memory or a gradient is not finite (exit code 3).
        StoppedError: a signal ended it, with everything saved (exit code 85).
        UnfitError: it failed for another reason.

    >>> run = dist_mem.train("run.yaml", "train.steps=9", "name=nine", "run_dir=runs/nine")  # doctest: +ELLIPSIS
    starting runs/nine: ...
    >>> run
    PosixPath('runs/nine')
    """
    for override in overrides:
        if not isinstance(override, str):
            raise TypeError(f"an override is {override!r}, but must be a str: a file, or 'KEY=VALUE'")
    if ranks is None:
        ranks = max(1, torch.cuda.device_count())
    if not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks is {ranks!r}, but must be an int of at least 1")
    with ExitStack() as stack:
        if not isinstance(config, str | Path):
            folder = stack.enter_context(TemporaryDirectory(prefix="dist_mem-"))
            written = Path(folder) / "config.yaml"
            text = to_yaml(config) if isinstance(config, Config) else dump(as_tree(as_plain(config)))
            written.write_text(text, encoding="utf-8")
            config = written
        arguments = [str(config), *overrides]
        run_dir = Path(load_config(arguments, memory_options=memory_options).run_dir)
        _run([*launcher(ranks), "train", *arguments])
    return run_dir


def _run(command: Sequence[str]) -> None:
    """Run a training and print its output. Raises the error of its exit code."""
    tail: deque[str] = deque(maxlen=_TAIL)
    with start(command, subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            for output in process.stdout:  # printed by this process: a notebook does not show that of another one
                line = output.decode(errors="replace")
                tail.append(line.rstrip("\n"))
                with suppress(OSError):  # as in the command, a line that cannot be written ends no training
                    print(line, end="", flush=True)
        except BaseException:
            process.terminate()  # as a scheduler does: the run saves, and ends
            process.communicate()
            raise
    if process.returncode != EXIT_DONE:
        raise _error(process.returncode, tail)


def _error(code: int, tail: Sequence[str]) -> RunError:
    """Return the error that a training has printed, or the end of its output."""
    errors = [line.removeprefix("error: ") for line in tail if line.startswith("error: ")]
    message = errors[-1] if errors else (tail[-1] if tail else "no output")
    return _ERRORS.get(code, UnfitError)(f"training ended with exit code {code}: {message}")
