"""The parser of the command line: every command of `dist_mem/cli/commands/`, in groups."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import fields
from types import ModuleType

from dist_mem.cli import commands
from dist_mem.cli.arguments import keys_of, unknown_command, unknown_option
from dist_mem.cli.help import HelpFormatter, Parser
from dist_mem.version import __version__

Parsers = dict[str, ArgumentParser]  # of the commands, by name
GROUPS = ("start", "train", "use a trained model", "check")  # in the order of the help


def command_modules() -> dict[str, ModuleType]:
    """Return name -> module of every command, in the order of the help."""
    names = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    found = {name.replace("_", "-"): importlib.import_module(f"{commands.__name__}.{name}") for name in names}
    order = {name: (GROUPS.index(module.PLACE[0]), module.PLACE[1]) for name, module in found.items()}
    return {name: found[name] for name in sorted(found, key=lambda name: order[name])}


def build_parser() -> tuple[ArgumentParser, Parsers]:
    """Return the parser of the whole command line, and the parser of each command."""
    parser = Parser("dist-mem", "dist-mem COMMAND ...", formatter_class=HelpFormatter)
    parser.add_argument("--version", action="version", version=f"dist-mem {__version__}")
    added = parser.add_subparsers(dest="command", required=True, prog="dist-mem", help=argparse.SUPPRESS)
    lines, group = ["Train memory-augmented transformers on long documents."], ""
    for name, module in command_modules().items():
        summary = (module.__doc__ or "").partition("\n")[0]
        example = f"example: dist-mem {name} {module.EXAMPLE}"
        command = added.add_parser(
            name, description=summary, epilog=example, allow_abbrev=False, formatter_class=HelpFormatter
        )
        command.set_defaults(function=module.run)
        module.add_arguments(command)
        lines += [f"\n{module.PLACE[0]}:"] if module.PLACE[0] != group else []
        lines.append(f"  {name:<14}{summary.rstrip('.')}")
        group = module.PLACE[0]
    parser.description = "\n".join(lines)
    parser.epilog = "Show the arguments of a command, and an example: dist-mem COMMAND --help"
    return parser, dict(added.choices)


def parse(arguments: Sequence[str] | None) -> Namespace:
    """Parse the command line; overrides may also follow options, which argparse's `*` does not allow."""
    parser, parsers = build_parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or (given[0] not in parsers and not given[0].startswith("-")):
        parser.error(
            unknown_command(given[0], list(parsers)) if given else "give a command; `dist-mem --help` lists them"
        )
    if given[0].startswith("-") and given[0] not in parser._option_string_actions:
        parser.error(f"give the command before {given[0]}, as in: dist-mem train {command_modules()['train'].EXAMPLE}")
    options, rest = parser.parse_known_args(given)
    several = "overrides" if hasattr(options, "overrides") else "config"
    takes_keys = hasattr(options, several)
    unknown = [text for text in rest if text.startswith("-") or not takes_keys]
    if unknown and unknown[0].startswith("-"):
        known = list(parsers[options.command]._option_string_actions)
        keys = keys_of(options.command, _memory_options()) if takes_keys else []
        parsers[options.command].error(unknown_option(unknown[0], given, options=known, keys=keys))
    if unknown:
        parsers[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        setattr(options, several, [*getattr(options, several), *rest])
    return options


def _memory_options() -> set[str]:
    from dist_mem.memory import describe_memories  # imports torch

    return {field.name for _, options in describe_memories().values() for field in fields(options)}
