"""The command line: `dist-mem COMMAND`, or `python -m dist_mem COMMAND`.

    dist-mem train configs/demo.yaml memory/none.yaml train.steps=100
    dist-mem train configs/demo.yaml --check --world 8
    dist-mem launch configs/pg19_small.yaml launch/sites/generic.yaml --nodes 4
    dist-mem status runs/pg19_small
    dist-mem logs runs/pg19_small --follow
    dist-mem cancel runs/pg19_small
    dist-mem doctor configs/demo.yaml
    dist-mem evaluate runs/demo --split test
    dist-mem export runs/demo --out models/demo
    dist-mem checkpoints verify runs/demo
    dist-mem compare runs/none runs/demo
    dist-mem generate runs/demo --prompt-file book.txt --tokens 500
    dist-mem inspect runs/infinite --split test
    dist-mem track sync runs/demo
    dist-mem prepare verify data/sample
    dist-mem check-memory examples/averages.py:Averages
    dist-mem config configs/demo.yaml

The functions of the commands are in cli/commands.py and cli/launch.py.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO, cast

from dist_mem.cli import commands as run
from dist_mem.cli import launch as launch
from dist_mem.cli.arguments import (
    CONFIG_HELP,
    count,
    keys_of,
    names,
    samples,
    seed,
    seeds,
    split,
    step,
    unknown_command,
    unknown_option,
)
from dist_mem.cli.broken_pipe import watch_standard_streams
from dist_mem.config.environment_values import HidingStream
from dist_mem.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, UnfitError, UnusableError
from dist_mem.runtime.environment import is_first_on_node, use_node_caches


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="dist-mem", description="Train transformers that remember whole books.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    launch.add_commands(partial(_add, commands))
    _add_doctor(commands)
    _add_evaluate(commands)
    _add_export(commands)
    _add_checkpoints(commands)
    _add_compare(commands)
    _add_generate(commands)
    _add_reproduce(commands)
    _add_dialogue(commands)
    _add_inspect(commands)
    _add_prepare(commands)
    _add_track(commands)
    _add_check_memory(commands)
    _add_config(commands)
    return parser


def _add(
    commands: argparse._SubParsersAction, function: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    summary = function.__doc__ or ""
    name = function.__name__.replace("_", "-")
    added = commands.add_parser(name, help=summary.rstrip("."), description=summary, allow_abbrev=False)
    added.set_defaults(function=function)
    return added


_ALLOW_HELP = "a key, or block of keys, that may be another than in the checkpoint, as optimizer.betas; repeatable"


def _add_train(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, run.train)
    added.add_argument("config", nargs="*", help=CONFIG_HELP)
    added.add_argument("--allow", action="append", default=[], metavar="KEY", help=_ALLOW_HELP)
    added.add_argument("--check", action="store_true", help="only check the configuration and say what it amounts to")
    added.add_argument("--world", type=count, default=1, help="ranks to assume in --check (default: 1)")


_STEP_HELP = "step of the checkpoint (default: the newest that verifies)"


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, run.doctor)
    added.add_argument("config", nargs="*", help=f"{CONFIG_HELP}; none: look at machines and network only")
    added.add_argument("--drill", action="store_true", help="break a small job in every way, and say what it survived")


def _add_evaluate(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, run.evaluate)
    added.add_argument("run", type=Path, help="a run directory, one checkpoint in it, or an export")
    added.add_argument("overrides", nargs="*", help="key=value overrides, of eval.* and data.path")
    added.add_argument("--split", type=split, help="default: eval.split")
    added.add_argument("--without-memory", action="store_true", help="empty the memory at every segment: what it gains")
    added.add_argument("--sweep", metavar="LENGTH", help="a table over lengths: mem_len=64,128,... or seg_len=...")
    added.add_argument(
        "--also", type=Path, action="append", default=[], metavar="RUN", help="another run in that table; repeatable"
    )
    added.add_argument("--checkpoint", type=step, help=_STEP_HELP)


def _add_export(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, run.export)
    added.add_argument("run", type=Path, help="a run directory, one checkpoint in it, or CONFIG.yaml, untrained")
    added.add_argument("overrides", nargs="*", help="data.path=FOLDER where the data, and their tokenizer, have moved")
    added.add_argument("--out", type=Path, required=True, help="the directory to make")
    added.add_argument("--checkpoint", type=step, help=_STEP_HELP)
    added.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of the weights (default: fp32)")
    layouts = ["dist_mem", "transformers"]
    added.add_argument(
        "--format", choices=layouts, default=layouts[0], help="transformers: of a GPT-2, for that library"
    )


def _add_checkpoints(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, run.checkpoints)
    added.add_argument("action", choices=["list", "verify", "show"])
    added.add_argument("path", type=Path, help="a run directory, or one checkpoint in it")


def _add_compare(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, run.compare)
    added.add_argument("runs", nargs="+", type=Path, help="run directories, or reports of evaluations")
    added.add_argument("--split", type=split, help="default: test, else validation")
    added.add_argument("--plot", type=Path, help="also draw recall perplexity by distance into this file")


def _add_generate(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, run.generate)
    added.add_argument("run", nargs="?", help="a run directory, one checkpoint in it, or an export")
    added.add_argument("overrides", nargs="*", help="key=value overrides, as `dist-mem evaluate` takes them")
    added.add_argument("--compare", nargs="+", default=[], metavar="RUN", help="instead: runs to continue one prompt")
    prompt = added.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="may be empty: a document from its beginning")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8, of any length")
    added.add_argument("--tokens", type=count, default=256, help="to write (default: 256)")
    added.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest token (default: 1.0)")
    added.add_argument("--top-k", type=count, help="draw from the K likeliest tokens (default: all)")
    added.add_argument("--top-p", type=float, default=0.95, help="draw from the nucleus of this mass (default: 0.95)")
    added.add_argument("--seed", type=seed, default=0, help="the same seed writes the same text (default: 0)")
    added.add_argument("--samples", type=samples, default=1, help="texts, of one batch (default: 1)")
    added.add_argument("--checkpoint", type=step, help=_STEP_HELP)
    added.add_argument("--out", type=Path, help="also write a file: .json or .md with all figures, else the text alone")


def _add_reproduce(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, run.reproduce)
    added.add_argument("table", nargs="?", help="as lamemo.table1, or the path of a .yaml file (default: list them)")
    added.add_argument("overrides", nargs="*", help="key=value overrides, for every training")
    added.add_argument("--check", action="store_true", help="print the resolved settings of every row, and do no more")
    added.add_argument("--scale", default="tiny", help="tiny, small or paper (default: tiny)")
    added.add_argument("--out", type=Path, help="folder of all it makes (default: runs/reproduce/TABLE.SCALE)")
    added.add_argument("--rows", type=names, default=[], help="only these, as transformer_xl,lamemo")
    added.add_argument("--seeds", type=seeds, default=[], help="as 0,1,2 (default: those of the scale)")
    added.add_argument("--ranks", type=count, default=1, help="processes of a training (default: 1)")


def _add_dialogue(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, run.dialogue)
    added.add_argument("run", type=Path, help="a run directory, one checkpoint in it, or an export")
    added.add_argument("overrides", nargs="*", help="key=value overrides, of eval.* and data.path")
    added.add_argument("--split", type=split, help="default: eval.split")
    added.add_argument("--checkpoint", type=step, help=_STEP_HELP)
    added.add_argument("--limit", type=count, metavar="N", help="only the first N conversations (default: all)")
    added.add_argument("--turns", type=count, metavar="N", help="N replies a conversation, spread (default: all)")
    added.add_argument("--tokens", type=count, default=50, help="of a reply, at most (default: 50)")
    added.add_argument("--top-p", type=float, default=0.9, help="nucleus that tokens are drawn from (default: 0.9)")
    added.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest (default: 1)")
    added.add_argument("--seed", type=seed, default=0, help="of the draws (default: 0)")
    added.add_argument("--wordnet", type=Path, metavar="FOLDER", help="of METEOR (default: /usr/share/wordnet)")


def _add_inspect(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, run.inspect)
    added.add_argument("run", type=Path, help="a run directory, one checkpoint in it, or an export")
    added.add_argument("overrides", nargs="*", help="key=value overrides, of eval.* and data.path")
    added.add_argument("--split", type=split, help="default: eval.split")
    added.add_argument("--checkpoint", type=step, help=_STEP_HELP)
    added.add_argument("--limit", type=count, default=100, metavar="N", help="the first N documents (default: 100)")


def _add_prepare(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, run.prepare)
    added.add_argument("action", choices=["verify"])
    added.add_argument("data", help="a data directory, or its URL, whose tars are fetched into the cache")
    added.add_argument("--cache", help="as data.cache")
    added.add_argument("--allow-pipe", action="store_true", help="as data.allow_pipe: run the command of a pipe: URL")
    added.add_argument(
        "--split",
        type=split,
        action="append",
        default=[],
        help="only this one (default: all; at a URL train, validation, test)",
    )


def _add_track(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, run.track)
    added.add_argument("action", choices=["sync"])
    added.add_argument("runs", nargs="+", help="run directories, your YAML, overrides of tracking.*")


def _add_check_memory(commands: argparse._SubParsersAction) -> None:
    _add(commands, run.check_memory).add_argument("kind", help="PATH.py:CLASS, or the name of a memory")


def _add_config(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, run.config)
    added.add_argument("config", nargs="*", help=f"{CONFIG_HELP}; none: every key there is")
    added.add_argument("--markdown", action="store_true", help="every key there is, as docs/reference/config.md")
    added.add_argument(
        "--snapshot", type=Path, metavar="FOLDER", help="copy the code and the files of this configuration there"
    )
    added.add_argument("--get", metavar="KEY", help="only the value of this key, as run_dir, resolved")


def _commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command, by name."""
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next(actions).choices


def _memory_options() -> set[str]:
    from dist_mem.memory import described_memories  # imports torch

    return {field.name for _, options in described_memories().values() for field in fields(options)}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; overrides may also follow options, which argparse's `*` does not allow."""
    parser = build_parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = _commands_of(parser)
    if not given or (given[0] not in commands and not given[0].startswith("-")):
        parser.error(unknown_command(given[0], list(commands)) if given else f"give a command: {', '.join(commands)}")
    options, rest = parser.parse_known_args(given)
    several = "overrides" if hasattr(options, "overrides") else "config"
    takes_keys = hasattr(options, several)
    unknown = [text for text in rest if text.startswith("-") or not takes_keys]
    if unknown and unknown[0].startswith("-"):
        known = list(commands[options.command]._option_string_actions)
        keys = keys_of(options.command, _memory_options()) if takes_keys else []
        commands[options.command].error(unknown_option(unknown[0], given, options=known, keys=keys))
    if unknown:
        commands[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        setattr(options, several, [*getattr(options, several), *rest])
    return options


def _is_reported_elsewhere(options: argparse.Namespace) -> bool:
    """Return whether another rank prints the same error. One rank per node prints, as files may differ by node."""
    if options.command not in ("train", "evaluate") or getattr(options, "check", False):
        return False
    return not is_first_on_node()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    options = parse(arguments)
    use_node_caches()
    try:
        return options.function(options)
    except (UnusableError, UnfitError) as error:
        if _is_reported_elsewhere(options):
            time.sleep(2.0)  # torchrun ends all ranks as soon as one has ended: the one that prints may be slower
        else:
            print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UnusableError) else EXIT_FAILED
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"error: {error.filename}: {error.strerror}; give a shorter path", file=sys.stderr)
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
    output = watch_standard_streams()
    output.tells = sys.argv[1:2] == ["generate"]  # its output is its work: generation/command.py ends it
    sys.stderr = cast(TextIO, HidingStream(sys.stderr))
    if sys.argv[1:2] not in (["generate"], ["config"], ["launch"]):  # programs read the output of these
        sys.stdout = cast(TextIO, HidingStream(sys.stdout))
    try:
        code = main()
    except SystemExit as ended:  # argparse has already printed its message
        code = int(ended.code or 0)
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = EXIT_FAILED
    with suppress(BrokenPipeError):  # raised because of `tells`
        sys.stdout.flush()
    sys.stderr.flush()
    if code == 0 and not output.is_read and not output.tells and sys.argv[1:2] != ["train"]:
        # As shells report a process that this signal ended. Not for a training: launchers restart what has failed.
        code = 128 + signal.SIGPIPE
    os._exit(code)


if __name__ == "__main__":
    entry()
