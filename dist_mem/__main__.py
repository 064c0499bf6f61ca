"""The command line: `dist-mem COMMAND`, or `python -m dist_mem COMMAND`.

    dist-mem init my_project
    dist-mem data build sample --out data/sample
    dist-mem train configs/demo.yaml memory/none.yaml train.steps=100
    dist-mem evaluate runs/demo --split test

Each command is a file of cli/commands/, with its arguments and an example; cli/parser.py finds them.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn, TextIO, cast

from dist_mem.cli.parser import parse
from dist_mem.cli.standard_streams import watch_standard_streams
from dist_mem.config.environment_values import HidingStream
from dist_mem.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, RunError, StoppedError
from dist_mem.runtime.compilers import use_node_caches, use_some_home
from dist_mem.runtime.environment import drop_empty, keep_working_directory_out
from dist_mem.runtime.extras import EXTRA_OF, not_installed
from dist_mem.runtime.ranks import is_first_on_node
from dist_mem.runtime.terminal import PlainStream, colour_first_word


def _is_reported_elsewhere(options: argparse.Namespace) -> bool:
    """Return whether another rank prints the same error. One rank per node prints, as files may differ by node."""
    if options.command not in ("train", "evaluate", "inspect", "dialogue", "recompute") or getattr(
        options, "check", False
    ):
        return False
    return not is_first_on_node()


def _may_be_lone(error: RunError, options: argparse.Namespace) -> bool:
    """Return whether a rank may be the only one with an error; the ranks of a training agree on all of theirs."""
    return not error.is_agreed and options.command != "train"


def _report(error: object) -> None:
    print(colour_first_word(str(error), sys.stderr), file=sys.stderr)


@contextmanager
def _safe_output(command: str) -> Iterator[None]:
    """Let all output hide values of the environment, and contain no character that could steer a terminal.

    Programs read the standard output of some commands, so it is as written except on a terminal.
    """
    if isinstance(sys.stderr, HidingStream):  # by `entry`
        yield
        return
    before = sys.stdout, sys.stderr
    sys.stderr = cast(TextIO, HidingStream(cast(TextIO, PlainStream(sys.stderr))))
    if command not in ("generate", "config", "launch"):
        sys.stdout = cast(TextIO, HidingStream(cast(TextIO, PlainStream(sys.stdout))))
    elif sys.stdout.isatty():
        sys.stdout = cast(TextIO, PlainStream(sys.stdout))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with _safe_output(given[0] if given else ""):
        return _run(given)


def _run(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    drop_empty()
    try:
        use_some_home()
        use_node_caches()
        return options.function(options)
    except RunError as error:
        is_reported = _is_reported_elsewhere(options)
        if is_reported:
            time.sleep(2.0)  # torchrun ends all ranks as soon as one has ended: the one that prints may be slower
        if not is_reported or _may_be_lone(error, options):  # then no other rank has ended meanwhile
            _report(error if isinstance(error, StoppedError) else f"error: {error}")
        return error.exit_code
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        _report(f"error: {error.filename}: {error.strerror}; give a shorter path")
        return EXIT_USAGE
    except ModuleNotFoundError as error:
        library = next((each for each in EXTRA_OF if f"{error.name}.".startswith(f"{each}.")), None)
        if library is None or _is_reported_elsewhere(options):
            raise
        _report(f"error: {not_installed(library)}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        return EXIT_INTERRUPTED


def entry() -> NoReturn:
    """Run `main`, print an unexpected error, flush all output, and end this process.

    `sys.exit` is not used: when the interpreter tears down gloo's threads, sometimes (seen after barrier and
    destroy_process_group, in a warm run of two ranks) one of them aborts a process that has succeeded, or hides the
    exit code of one that has not.
    """
    keep_working_directory_out()
    output = watch_standard_streams()
    output.raises = sys.argv[1:2] == ["generate"]  # its output is its result: generation/continue_prompts.py ends it
    with _safe_output("".join(sys.argv[1:2])):
        try:
            code = main()
        except SystemExit as ended:  # argparse has already printed its message
            code = int(ended.code or 0)
        except Exception:
            sys.excepthook(*sys.exc_info())
            code = EXIT_FAILED
        with suppress(BrokenPipeError):  # raised because of `raises`
            sys.stdout.flush()
        if code == 0 and sys.argv[1:2] != ["train"]:  # launchers restart a training that has failed
            if output.error is not None:
                _report(f"error: standard output cannot be written: {output.error}; part of it is lost")
                code = EXIT_FAILED
            elif not output.is_read and not output.raises:
                code = 128 + signal.SIGPIPE  # as shells report a process that this signal ended
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
