"""Read a YAML or JSON file: the one way in, for configurations, studies, sites and what a run has saved.

A document holds keys and values, and is small: the text of somebody else's run folder must not fill this machine's
memory. So its bytes, its parts and its depth have limits, and an alias counts as all that it repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dist_mem.config.check import ConfigError, Problem, format_value, join
from dist_mem.config.interpolations import InterpolationError, check_grammar
from dist_mem.config.values import parse, parse_json, untyped_values, yaml_error
from dist_mem.errors import RunError, run_error
from dist_mem.runtime.environment import as_submitted
from dist_mem.runtime.files import read_at_most

MAX_BYTES = 1 << 20
# Raised by YAML, JSON and interpolations. ValueError: invalid UTF-8.
UNREADABLE = (yaml.YAMLError, InterpolationError, ValueError, RecursionError)


class YamlDocument(NamedTuple):
    """The content of a file."""

    tree: dict[str, Any]  # scalars without quotes are `Letters`
    lines: Mapping[str, int]  # full key -> its line; none of JSON
    path: Path

    def inside(self, block: str) -> YamlDocument:
        """Return the document as the content of a block."""
        return YamlDocument({block: self.tree}, {join(block, key): line for key, line in self.lines.items()}, self.path)

    def place(self, key: str) -> str:
        """Return the file, with the line of a key."""
        return place_of(key, str(self.path), self.lines)

    def place_problems(self) -> AbstractContextManager[None]:
        """Give the problems of the block their place in this document."""
        return place_problems(self.place)


def place_of(key: str, where: str, lines: Mapping[str, int]) -> str:
    """Return the file, and the line of the key or of the nearest one around it, as `demo.yaml:12`."""
    while key and key not in lines:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return f"{where}:{lines[key]}" if key else where


@contextmanager
def place_problems(place: Callable[[str], str]) -> Iterator[None]:
    """Give the problems of the block that have no place the one of their key."""
    try:
        yield
    except ConfigError as error:
        found = [problem._replace(where=problem.where or place(problem.key)) for problem in error.problems]
        raise ConfigError(found) from None


def read_document(path: Path) -> YamlDocument:
    """Read a file, of JSON by its suffix, else of YAML.

    Raises:
        ConfigError: it is no YAML or JSON, is too large, or holds something else than keys and values.
        RunError: it cannot be read.
    """
    form = "JSON" if path.suffix == ".json" else "YAML"
    try:
        content = read_at_most(as_submitted(path), MAX_BYTES, is_regular=True)
        tree, lines = parse(content) if form == "YAML" else (parse_json(content), {})
        if tree is not None and not isinstance(tree, dict):
            holds = "a list" if isinstance(tree, list) else format_value(tree)
            raise ConfigError([Problem("", f"must hold keys and values, but holds {holds}", str(path))])
        check_grammar(untyped_values(tree or {}))
    except RunError:
        raise
    except OSError as error:
        raise run_error(error, f"{path} cannot be read: {error.strerror}") from error
    except UNREADABLE as error:
        raise ConfigError([Problem("", f"cannot be read as {form}: {yaml_error(error)}", str(path))]) from error
    return YamlDocument(tree or {}, lines, path)
