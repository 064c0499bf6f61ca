"""Checks of configuration trees: unknown keys, wrong types, and what was probably meant.

A tree is what YAML gives: dicts, lists, scalars. A schema is a dataclass, or a nested dict of types where there is no
dataclass of ours (DeepSpeed's keys). Every check yields all the problems it finds, so that a user mends them in one go.
No key is known by name here.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from dist_mem.errors import UnusableError

_SURE = 0.75  # similarity from which a key of the same block is taken for the one that was meant
_MAYBE = 0.5  # two letters swapped in a name of two
_SHOWN = 15  # keys listed in a message
_SHOWN_LETTERS = 120  # of a value in a message
_SHOWN_BITS = 256  # of a number written out
_NUMBERS = range(-(2**63), 2**63)  # that tensors, arrays and MLflow hold
_TYPE_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", list: "a list"}
_MANY_TYPE_WORDS = {int: "integers", float: "numbers", bool: "true or false", str: "texts"}


class Problem(NamedTuple):
    """One thing that is wrong in a configuration."""

    key: str  # full dotted key, "optimizer.groups[0].lr"; empty when a whole file is wrong
    text: str  # what is wrong with it, the value, and what to do
    where: str = ""  # the file, or "command line"

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, _beginning(self.key), self.text) if part)


class ConfigError(UnusableError):
    """The configuration is wrong; the message has one line for each problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return ConfigError, (self.problems,)  # from rank 0 to the others


def stop_on(problems: Iterator[Problem] | Sequence[Problem]) -> None:
    """Raise `ConfigError` if there is any problem."""
    found = list(problems)
    if found:
        raise ConfigError(found)


def located(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """The problem with the place that set its key, or a part of it, or the block it stands in.

    Args:
        origins: full key of every leaf that was given -> file or command line.
    """
    key = "" if problem.where else problem.key
    while key:
        inside = (f"{key}.", f"{key}[")
        places = [where for name, where in origins.items() if name == key or name.startswith(inside)]
        if places:
            return problem._replace(where=places[-1])
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return problem


def shown(value: Any) -> str:
    """A value for a message: of what is very long only the beginning."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"a number of about {round(value.bit_length() * math.log10(2)):,} digits"  # Python writes no longer ones
    return _beginning(repr(value))


def _beginning(text: str) -> str:
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}... ({len(text):,} characters)"


def is_interpolation(value: Any) -> bool:
    """Whether OmegaConf computes the value, as `${name}` or `${oc.env:HOME}`; its type is known only once resolved."""
    return isinstance(value, str) and "${" in value


def join(key: str, name: Any) -> str:
    """Dotted key of `name` inside the block `key`."""
    return f"{key}.{name}" if key else str(name)


def flatten(tree: Any, key: str = "") -> dict[str, Any]:
    """Leaves of a tree by full key: {"optimizer.groups[0].lr": 0.1, ...}; an empty block or list is a leaf."""
    if isinstance(tree, Mapping) and tree:
        parts = [flatten(child, join(key, name)) for name, child in tree.items()]
    elif isinstance(tree, list) and tree:
        parts = [flatten(child, f"{key}[{index}]") for index, child in enumerate(tree)]
    else:
        return {key: tree}
    return {name: leaf for part in parts for name, leaf in part.items()}


def fields_of(schema: Any) -> dict[str, Any] | None:
    """Name -> schema of the keys of a block; None if the schema is not a block's."""
    schema = _without_none(schema)
    if isinstance(schema, dict):
        return schema
    return get_type_hints(schema) if is_dataclass(schema) and isinstance(schema, type) else None


def item_schema(schema: Any) -> Any:
    """Schema of the items of a list; None if the schema is not a list's."""
    schema = _without_none(schema)
    return get_args(schema)[0] if get_origin(schema) is list else None


def all_keys(schema: Any, key: str = "") -> Iterator[str]:
    """Full dotted keys of a schema, blocks before what they hold; items of lists as `optimizer.groups[].lr`."""
    if (item := item_schema(schema)) is not None:
        yield from all_keys(item, f"{key}[]")
    for name, child in (fields_of(schema) or {}).items():
        yield join(key, name)
        yield from all_keys(child, join(key, name))


def is_optional(schema: Any) -> bool:
    """Whether null is a value of this schema."""
    return type(None) in get_args(schema)


def optional_keys(schema: Any, key: str = "") -> set[str]:
    """Full dotted keys that may be null, as `all_keys` writes them."""
    found = {key} if is_optional(schema) else set()
    if (item := item_schema(schema)) is not None:
        found |= optional_keys(item, f"{key}[]")
    for name, child in (fields_of(schema) or {}).items():
        found |= optional_keys(child, join(key, name))
    return found


def _without_none(schema: Any) -> Any:
    if get_origin(schema) in (Union, types.UnionType):
        schemas = [argument for argument in get_args(schema) if argument is not type(None)]
        return schemas[0] if len(schemas) == 1 else schema
    return schema


def nearest(name: str, names: Sequence[str], similarity: float = _MAYBE) -> str | None:
    """The most similar of `names`, whatever the case; None if none is similar enough (0: anything, 1: equal)."""
    if len(name) > _SHOWN_LETTERS:  # comparing takes the product of both lengths
        return None
    by_lower = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=similarity)
    return by_lower[close[0]] if close else None


def suggest(name: str, block: str, known: Sequence[str], everywhere: Sequence[str]) -> str:
    """What to tell about an unknown key `name` of `block`: the key that was probably meant, else the keys there are.

    Args:
        known: the keys of the block.
        everywhere: full dotted keys of the whole configuration: a right name may stand in the wrong block.
    """
    if close := nearest(name, known, _SURE):
        return f"did you mean {join(block, close)}?"
    same = [key for key in everywhere if key.rpartition(".")[2] == name.rpartition(".")[2]]
    if same:
        return f"did you mean {' or '.join(same[:3])}?"
    names = {key.rpartition(".")[2]: key for key in reversed(everywhere)}
    if close := nearest(name, list(names), _SURE):
        return f"did you mean {names[close]}?"
    if close := nearest(name, known):
        return f"did you mean {join(block, close)}?"
    return f"known keys here: {_some(known)}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) or "none"
    return f"{shown}, ..." if len(names) > _SHOWN else shown


def check_tree(
    schema: Any,
    tree: Any,
    *,
    key: str = "",
    everywhere: Sequence[str] = (),
    is_open: Callable[[Any], bool] = is_interpolation,
) -> Iterator[Problem]:
    """Yield the unknown keys and wrong types of `tree`, at any depth, lists included.

    Args:
        key: where the tree stands in the configuration.
        everywhere: see `suggest`.
        is_open: values not to be checked here.
    """
    fields, item = fields_of(schema), item_schema(schema)
    if is_open(tree) or (tree is None and is_optional(schema)):
        return
    if fields is not None and isinstance(tree, Mapping):
        for name, child in tree.items():
            if name in fields:
                yield from check_tree(fields[name], child, key=join(key, name), everywhere=everywhere, is_open=is_open)
            else:
                yield Problem(join(key, name), f"unknown key; {suggest(str(name), key, list(fields), everywhere)}")
    elif fields is not None:
        yield Problem(key, f"is {shown(tree)}, but must be a block with keys among {_some(list(fields))}")
    elif item is not None and (children := _items(tree)) is not None:
        for index, child in children.items():
            yield from check_tree(item, child, key=f"{key}[{index}]", everywhere=everywhere, is_open=is_open)
    elif not _has_type(schema, tree):
        yield Problem(key, f"is {shown(tree)}, but must be {describe_type(schema)}{_advice(schema, tree)}")
    elif type(tree) is int and tree not in _NUMBERS:
        yield Problem(key, f"is {shown(tree)}, but numbers have at most 64 bits; give a smaller one")


def _items(tree: Any) -> Mapping[Any, Any] | None:
    """Items of a list by index; also of a block of numbers, `groups.0.lr=1`, which changes single items."""
    if isinstance(tree, list):
        return dict(enumerate(tree))
    if isinstance(tree, Mapping) and tree and all(str(index).isdigit() for index in tree):
        return tree
    return None


def _has_type(schema: Any, value: Any) -> bool:
    schema = _without_none(schema)
    if schema in (Any, object):
        return True
    if get_origin(schema) in (Union, types.UnionType):
        return any(_has_type(part, value) for part in get_args(schema))
    if isinstance(value, bool) or schema is bool:
        return schema is bool and isinstance(value, bool)
    if schema is float:
        return isinstance(value, int | float)
    if schema is str:
        return isinstance(value, str | int)  # `name: 2024` is a text that YAML takes for a number
    return isinstance(value, schema) if isinstance(schema, type) else False


def describe_type(schema: Any) -> str:
    """A schema in words, `an integer or null`."""
    inner = _without_none(schema)
    item = item_schema(inner)
    words = (
        f"a list of {_MANY_TYPE_WORDS.get(item, 'blocks')}" if item is not None else _TYPE_WORDS.get(inner, str(inner))
    )
    return f"{words} or null" if is_optional(schema) else words


def _advice(schema: Any, value: Any) -> str:
    if _without_none(schema) is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return f"; write {int(value)}"
    if value is None:
        return "; leave the key out for its default"
    return ""
