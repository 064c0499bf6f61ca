"""The parser of the command line: every command with its arguments, in groups."""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from dist_mem.cli import commands as run
from dist_mem.cli import (
    datasets,
    drawing,
    estimating,
    harness,
    inspecting,
    jobs,
    memory_files,
    reporting,
    starting,
    steps,
    studies,
)
from dist_mem.cli.arguments import (
    MODEL,
    add_allow,
    add_checkpoint,
    add_memory,
    count,
    keys_of,
    output_file,
    output_folder,
    place,
    seed,
    split,
    unknown_command,
    unknown_option,
)
from dist_mem.cli.help import EXAMPLES, HelpFormatter, Parser
from dist_mem.version import __version__

Command = Callable[[Namespace], int]
Parsers = dict[str, ArgumentParser]  # of the commands, by name

_CONFIG = "YAML files, merged left to right, and key=value overrides"


def build_parser() -> tuple[ArgumentParser, Parsers]:
    """Return the parser of the whole command line, and the parser of each command."""
    groups: dict[str, dict[Command, Callable[[ArgumentParser], None]]] = {
        "start": {starting.init: starting.add_init_arguments, datasets.data: datasets.add_arguments},
        "train": {
            run.train: _add_train,
            jobs.launch: jobs.add_launch_arguments,
            jobs.status: jobs.add_status_arguments,
            jobs.logs: jobs.add_logs_arguments,
            jobs.cancel: jobs.add_cancel_arguments,
            run.checkpoints: _add_checkpoints,
            run.track: _add_track,
            steps.batch: _add_batch,
            steps.recompute: _add_step,
        },
        "use a trained model": {
            run.evaluate: _add_evaluate,
            run.compare: _add_compare,
            harness.lm_eval: harness.add_arguments,
            run.inspect: _add_inspect,
            drawing.figure: drawing.add_arguments,
            reporting.report: reporting.add_arguments,
            run.generate: _add_generate,
            memory_files.read: memory_files.add_read_arguments,
            memory_files.memory: memory_files.add_memory_arguments,
            run.dialogue: _add_dialogue,
            run.export: _add_export,
            studies.reproduce: studies.add_reproduce_arguments,
            studies.sweep: studies.add_sweep_arguments,
            studies.arena: studies.add_arena_arguments,
        },
        "check": {
            run.config: _add_config,
            estimating.estimate: estimating.add_arguments,
            run.doctor: _add_doctor,
            run.check_memory: _add_check_memory,
        },
    }
    parser = Parser("dist-mem", "dist-mem COMMAND ...", formatter_class=HelpFormatter)
    parser.add_argument("--version", action="version", version=f"dist-mem {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, prog="dist-mem", help=argparse.SUPPRESS)
    lines = ["Train memory-augmented transformers on long documents."]
    for title, group in groups.items():
        lines.append(f"\n{title}:")
        for function, add_arguments in group.items():
            name, summary = function.__name__.replace("_", "-"), function.__doc__ or ""
            example = f"example: dist-mem {name} {EXAMPLES[name]}"
            added = commands.add_parser(
                name, description=summary, epilog=example, allow_abbrev=False, formatter_class=HelpFormatter
            )
            added.set_defaults(function=function)
            add_arguments(added)
            lines.append(f"  {name:<14}{summary.rstrip('.')}")
    parser.description = "\n".join(lines)
    parser.epilog = "Show the arguments of a command, and an example: dist-mem COMMAND --help"
    return parser, dict(commands.choices)


def parse(arguments: Sequence[str] | None) -> Namespace:
    """Parse the command line; overrides may also follow options, which argparse's `*` does not allow."""
    parser, commands = build_parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0] not in commands and not given[0].startswith("-")):
        parser.error(
            unknown_command(given[0], list(commands)) if given else "give a command; `dist-mem --help` lists them"
        )
    if given[0].startswith("-") and given[0] not in parser._option_string_actions:
        parser.error(f"give the command before {given[0]}, as in: dist-mem train {EXAMPLES['train']}")
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


def _memory_options() -> set[str]:
    from dist_mem.memory import described_memories  # imports torch

    return {field.name for _, options in described_memories().values() for field in fields(options)}


def _add_train(added: ArgumentParser) -> None:
    added.add_argument("config", nargs="*", default=[], help=_CONFIG)
    add_allow(
        added, "key, or block of keys, that may differ from the checkpoint, for example optimizer.betas; repeatable"
    )
    added.add_argument("--check", action="store_true", help="check the configuration, print what it means, and exit")
    added.add_argument("--world", type=count, default=1, metavar="N", help="number of ranks for --check (default: 1)")


def _add_doctor(added: ArgumentParser) -> None:
    added.add_argument("config", nargs="*", default=[], help=f"{_CONFIG} (default: check only machines and network)")


def _add_model(added: ArgumentParser, *, overrides: str = "key=value overrides of eval.* and data.path") -> None:
    """Add the arguments of commands that read one split with one trained model."""
    added.add_argument("run", type=Path, help=MODEL)
    added.add_argument("overrides", nargs="*", default=[], help=overrides)
    added.add_argument("--split", type=split, metavar="NAME", help="split to read (default: eval.split)")
    add_checkpoint(added)


def _add_evaluate(added: ArgumentParser) -> None:
    _add_model(added)
    added.add_argument("--without-memory", action="store_true", help="empty the memory at every segment")
    add_memory(added, "every document continues")
    added.add_argument("--sweep", metavar="KEY=LENGTHS", help="several lengths: mem_len=64,128,... or seg_len=...")
    also = "another run for --sweep; repeatable"
    added.add_argument("--also", type=Path, action="append", default=[], metavar="RUN", help=also)


def _add_export(added: ArgumentParser) -> None:
    added.add_argument(
        "run", type=Path, help="a run directory, a checkpoint in it, or CONFIG.yaml for an untrained one"
    )
    added.add_argument(
        "overrides",
        nargs="*",
        default=[],
        help="data.path=FOLDER if the data and their tokenizer have moved, tracking.uri=URL",
    )
    add_checkpoint(added)
    added.add_argument("--out", type=output_folder, required=True, metavar="FOLDER", help="directory to write")
    added.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the weights (default: fp32)"
    )
    added.add_argument(
        "--format",
        choices=["dist_mem", "transformers"],
        default="dist_mem",
        help="transformers: for that library too (default: dist_mem)",
    )
    added.add_argument("--mlflow", action="store_true", help="log the export to the run's MLflow run, as a model")
    added.add_argument("--register", metavar="NAME", help="with --mlflow: register it as a new version of this model")
    added.add_argument("--alias", metavar="ALIAS", help="with --register: let this alias name the version")


def _add_checkpoints(added: ArgumentParser) -> None:
    added.add_argument("action", choices=["list", "verify", "show"])
    added.add_argument("path", type=Path, help="a run directory, or one checkpoint in it")


def _add_compare(added: ArgumentParser) -> None:
    added.add_argument("runs", nargs="+", type=Path, help="run directories, or reports of evaluations")
    added.add_argument("--split", type=split, metavar="NAME", help="split to compare (default: test, else validation)")
    added.add_argument(
        "--plot", type=output_file, metavar="FILE", help="draw recall perplexity by distance into this file"
    )


def _add_sampling(added: ArgumentParser, *, tokens: int, top_p: float) -> None:
    """Add the arguments of commands that generate text."""
    added.add_argument(
        "--tokens", type=count, default=tokens, metavar="N", help="tokens to generate, at most (default: %(default)s)"
    )
    added.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest token (default: 1.0)")
    added.add_argument(
        "--top-p", type=float, default=top_p, metavar="P", help="mass of the nucleus (default: %(default)s)"
    )
    added.add_argument("--seed", type=seed, default=0, help="the same seed generates the same text (default: 0)")


def _add_generate(added: ArgumentParser) -> None:
    added.add_argument("run", nargs="?", type=place, help=MODEL)
    added.add_argument("overrides", nargs="*", default=[], help="key=value overrides, as for `dist-mem evaluate`")
    added.add_argument(
        "--compare", nargs="+", type=place, default=[], metavar="RUN", help="compare these runs on the same prompt"
    )
    help_text = "the model that comes with dist_mem; without a prompt, on the first half of a book of its kind"
    added.add_argument("--example", action="store_true", help=help_text)
    prompt = added.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue; empty: begin a document")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="UTF-8 file to continue, of any length")
    add_memory(added, "the prompt continues")
    _add_sampling(added, tokens=256, top_p=0.95)
    added.add_argument("--top-k", type=count, metavar="K", help="draw from the K likeliest tokens (default: all)")
    added.add_argument(
        "--samples", type=partial(count, most=10_000), default=1, metavar="N", help="texts in one batch (default: 1)"
    )
    add_checkpoint(added)
    added.add_argument(
        "--out", type=output_file, metavar="FILE", help="also write the text to FILE; .json and .md: with all figures"
    )


def _add_dialogue(added: ArgumentParser) -> None:
    _add_model(added)
    add_memory(added, "every conversation continues")
    added.add_argument("--limit", type=count, metavar="N", help="read the first N conversations (default: all)")
    added.add_argument("--turns", type=count, metavar="N", help="replies per conversation, spread (default: all)")
    _add_sampling(added, tokens=50, top_p=0.9)
    added.add_argument("--wordnet", type=Path, metavar="FOLDER", help="for METEOR (default: /usr/share/wordnet)")


def _add_inspect(added: ArgumentParser) -> None:
    _add_model(added, overrides="another run to compare with, and key=value overrides of eval.* and data.path")
    inspecting.add_arguments(added)


def _add_step(added: ArgumentParser) -> None:
    """Add the arguments of commands about one step of a run."""
    added.add_argument("run", type=Path, help="a run directory")
    added.add_argument("overrides", nargs="*", default=[], help="data.path=FOLDER if the data have moved")
    added.add_argument("--step", type=count, required=True, metavar="S", help="as in metrics.jsonl")


def _add_batch(added: ArgumentParser) -> None:
    _add_step(added)
    added.add_argument("--rank", type=partial(count, least=0), metavar="R", help="only its lanes (default: all ranks)")
    added.add_argument("--full", action="store_true", help="print whole segments (default: beginning and end)")


def _add_track(added: ArgumentParser) -> None:
    added.add_argument("action", choices=["sync"])
    added.add_argument(
        "runs", nargs="+", type=place, help="run directories, your own YAML files, overrides of tracking.*"
    )


def _add_check_memory(added: ArgumentParser) -> None:
    added.add_argument("kind", type=place, help="PATH.py:CLASS, or the name of a memory")


def _add_config(added: ArgumentParser) -> None:
    added.add_argument("config", nargs="*", default=[], help=f"{_CONFIG} (default: print every key)")
    added.add_argument("--markdown", action="store_true", help="print every key as docs/reference/config.md")
    added.add_argument(
        "--snapshot", type=output_folder, metavar="FOLDER", help="copy the code and this configuration to FOLDER"
    )
    add_allow(added, "as for `dist-mem train`, whose arguments a job script gives to this command; it has no effect")
    added.add_argument("--get", metavar="KEY", help="print only the resolved value of this key, for example run_dir")
