"""The command line: `dist-mem COMMAND`, or `python -m dist_mem COMMAND`.

    dist-mem train configs/demo.yaml memory/none.yaml train.steps=100
    dist-mem train configs/demo.yaml --check --world 8
    dist-mem evaluate runs/demo --split test
    dist-mem export runs/demo --out models/demo
    dist-mem checkpoints verify runs/demo
    dist-mem compare runs/none runs/demo
    dist-mem track sync runs/demo
    dist-mem prepare verify data/sample
    dist-mem check-memory examples/averages.py:Averages
    dist-mem config configs/demo.yaml

Every command imports what it needs when it runs, so that help and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dist_mem.config import Config, load_config, to_yaml
from dist_mem.config_help import schema_as_yaml
from dist_mem.environment import is_first_on_node
from dist_mem.errors import EXIT_FAILED, EXIT_USAGE, UnusableError
from dist_mem.resume_rules import check_allowed


def load_checked(arguments: Sequence[str]) -> Config:
    """`load_config` with the memory block checked too, which takes torch, and so comes last."""

    def memory_options(block: Any) -> tuple[str, Any]:
        from dist_mem.memory import memory_options as check

        return check(block)

    return load_config(arguments, memory_options=memory_options)


def train(options: argparse.Namespace) -> int:
    """Start a run, or resume it."""
    config = load_checked(options.config)
    check_allowed(options.allow)
    if options.check:
        from dist_mem import plan

        print(plan.report(config, world_size=options.world))
        return 0
    from dist_mem.distributed import choose_accelerator

    choose_accelerator()
    from dist_mem.train import run

    return run(config, allowed=options.allow)


def evaluate(options: argparse.Namespace) -> int:
    """Score a checkpoint on whole documents."""
    from dist_mem.distributed import choose_accelerator

    choose_accelerator()
    from dist_mem.evaluate import run

    return run(options.run, split=options.split, checkpoint=options.checkpoint, overrides=options.overrides)


def export(options: argparse.Namespace) -> int:
    """Make a directory of the weights of a checkpoint and all that loading them takes."""
    from dist_mem.distributed import choose_accelerator

    choose_accelerator()
    from dist_mem.export import run

    return run(
        options.run,
        out=options.out,
        checkpoint=options.checkpoint,
        precision=options.precision,
        overrides=options.overrides,
    )


def checkpoints(options: argparse.Namespace) -> int:
    """List the checkpoints of a run, verify them, or show one."""
    from dist_mem.checkpoints import run

    return run(options.action, options.path)


def compare(options: argparse.Namespace) -> int:
    """Show the evaluations of several runs side by side."""
    from dist_mem.compare import run

    return run(options.runs, split=options.split, picture=options.plot)


def prepare(options: argparse.Namespace) -> int:
    """Check built data: every tar, every document, the tokenizer."""
    from dist_mem.data.remote import show
    from dist_mem.data.verify import verify_dataset

    problems = verify_dataset(options.data, cache=options.cache, splits=options.split)
    for problem in problems:
        document = f"document {problem.document}" if problem.document else ""
        print(": ".join(part for part in (problem.where, document, problem.message) if part), file=sys.stderr)
    plural = "" if len(problems) == 1 else "s"
    print(f"{show(options.data)}: {f'{len(problems)} problem{plural}' if problems else 'all is well'}")
    return EXIT_FAILED if problems else 0


def track(options: argparse.Namespace) -> int:
    """Send MLflow what it could not take while a run was going on."""
    from dist_mem.sync import run

    overrides = [text for text in options.runs if text.startswith("tracking.")]
    return run([Path(text) for text in options.runs if text not in overrides], overrides)


def check_memory(options: argparse.Namespace) -> int:
    """Put a memory through every rule of the contract."""
    from dist_mem.contract.check import run

    return run(options.kind)


def config(options: argparse.Namespace) -> int:
    """Print a configuration as it would be run, or every key with its default and its meaning."""
    if options.markdown:
        from dist_mem.config_page import config_page
        from dist_mem.memory import described_memories

        print(config_page(described_memories()), end="")
        return 0
    print(to_yaml(load_checked(options.config)) if options.config else schema_as_yaml(), end="")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="dist-mem", description="Train transformers that remember whole books.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_evaluate(commands)
    _add_export(commands)
    _add_checkpoints(commands)
    _add_compare(commands)
    _add_prepare(commands)
    _add_track(commands)
    _add_check_memory(commands)
    _add_config(commands)
    return parser


_CONFIG_HELP = "YAML files, merged left to right, and key=value overrides"


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
    added = _add(commands, train)
    added.add_argument("config", nargs="*", help=_CONFIG_HELP)
    added.add_argument("--allow", action="append", default=[], metavar="KEY", help=_ALLOW_HELP)
    added.add_argument("--check", action="store_true", help="only check the configuration and say what it amounts to")
    added.add_argument("--world", type=_count, default=1, help="ranks to assume in --check (default: 1)")


_STEP_HELP = "step of the checkpoint (default: the newest that verifies)"


def _add_evaluate(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, evaluate)
    added.add_argument("run", type=Path, help="a run directory, one checkpoint in it, or an export")
    added.add_argument("overrides", nargs="*", help="key=value overrides, of eval.* and data.path")
    added.add_argument("--split", help="default: eval.split")
    added.add_argument("--checkpoint", type=_count, help=_STEP_HELP)


def _add_export(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, export)
    added.add_argument("run", type=Path, help="a run directory, or one checkpoint in it")
    added.add_argument("overrides", nargs="*", help="data.path=FOLDER where the data, and their tokenizer, have moved")
    added.add_argument("--out", type=Path, required=True, help="the directory to make")
    added.add_argument("--checkpoint", type=_count, help=_STEP_HELP)
    added.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of the weights (default: fp32)")


def _add_checkpoints(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, checkpoints)
    added.add_argument("action", choices=["list", "verify", "show"])
    added.add_argument("path", type=Path, help="a run directory, or one checkpoint in it")


def _add_compare(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, compare)
    added.add_argument("runs", nargs="+", type=Path, help="run directories, or reports of evaluations")
    added.add_argument("--split", help="default: test, else validation")
    added.add_argument("--plot", type=Path, help="also draw recall perplexity by distance into this file")


def _add_prepare(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, prepare)
    added.add_argument("action", choices=["verify"])
    added.add_argument("data", help="a data directory, or its URL, whose tars are fetched into the cache")
    added.add_argument("--cache", help="as data.cache")
    added.add_argument(
        "--split", action="append", default=[], help="only this one (default: all; at a URL train, validation, test)"
    )


def _add_track(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, track)
    added.add_argument("action", choices=["sync"])
    added.add_argument("runs", nargs="+", help="run directories, and overrides of tracking.uri and tracking.experiment")


def _add_check_memory(commands: argparse._SubParsersAction) -> None:
    _add(commands, check_memory).add_argument("kind", help="PATH.py:CLASS, or the name of a memory")


def _add_config(commands: argparse._SubParsersAction) -> None:
    added = _add(commands, config)
    added.add_argument("config", nargs="*", help=f"{_CONFIG_HELP}; none: every key there is")
    added.add_argument("--markdown", action="store_true", help="every key there is, as docs/config.md")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse, with overrides allowed after options too, which argparse's `*` does not see."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    several = "overrides" if hasattr(options, "overrides") else "config"
    unknown = [text for text in rest if text.startswith("-") or not hasattr(options, several)]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        setattr(options, several, [*getattr(options, several), *rest])
    return options


def _is_told_elsewhere(options: argparse.Namespace) -> bool:
    """Whether another rank prints the same error; each node tells its own, for its files may differ."""
    if options.command not in ("train", "evaluate") or getattr(options, "check", False):
        return False
    return not is_first_on_node()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = parse(arguments)
    try:
        return options.function(options)
    except UnusableError as error:
        if _is_told_elsewhere(options):
            time.sleep(2.0)  # torchrun ends all ranks as soon as one has ended: the one that tells may be slower
        else:
            print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


def entry() -> NoReturn:
    """`main`, then the end of this process, with everything it has said on its way, an unexpected error too.

    Not by `sys.exit`: when the interpreter tears down gloo's threads, now and then (seen after barrier and
    destroy_process_group, in a warm run of two ranks) one of them aborts a process that has succeeded, or hides the
    exit code of one that has not.
    """
    try:
        code = main()
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = EXIT_FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    entry()
