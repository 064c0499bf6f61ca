"""One builder a file: `dist-mem data build NAME` finds NAME.py; there is no list to edit.

A builder defines

    add_arguments(parser)   its options (builder.py has those of all)
    build(options)          which gives documents to `build_dataset` (builder.py), or to `build_tasks` (task_text.py)

Its docstring is the help of the command, at most 100 columns wide: a line, examples, what else users must know.
"""

from __future__ import annotations

import pkgutil
from argparse import ArgumentParser, Namespace
from importlib import import_module
from importlib.resources import files
from typing import Protocol, cast


class Builder(Protocol):
    """A module of this folder."""

    __doc__: str | None

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the options."""

    def build(self, options: Namespace) -> None:
        """Build the data directories that the options describe.

        Raises:
            ValueError, OSError, UnfitError: the user's input is wrong, or the machine failed.
        """


def builder_names() -> list[str]:
    """Return the names of all builders, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def builder_summaries() -> dict[str, str]:
    """Return the first line of every builder's docstring, without loading the builder."""
    firsts = {name: files(__name__).joinpath(f"{name}.py").read_text(encoding="utf-8") for name in builder_names()}
    return {name: text.partition("\n")[0].strip('"') for name, text in firsts.items()}


def load_builder(name: str) -> Builder:
    """Return a builder of `builder_names`."""
    return cast(Builder, import_module(f"{__name__}.{name}"))
