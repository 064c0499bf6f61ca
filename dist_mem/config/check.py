"""Check configuration trees for unknown keys and wrong types, and suggest the key that was probably meant.

A tree is the output of a YAML parser: dicts, lists, scalars. A schema is a dataclass, or a nested dict of types for
keys that have no dataclass here (DeepSpeed's). Every check yields all problems it finds, so that a user can fix them
all at once. This module knows no key by name.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from dist_mem.config.other_names import OTHER_NAMES
from dist_mem.errors import UnusableError
from dist_mem.runtime.terminal import list_names, some

SURE = 0.75  # similarity at which a key of the same block is suggested first
_MAYBE = 0.5  # two letters swapped in a name of two
_SHOWN = 15  # most keys listed in a message
_QUOTED = re.compile(r"[-+]?(0|[1-9][0-9]{0,99})(\.[0-9]*)?([eE][-+]?[0-9]+)?")  # a number; a text only in quotes
_SHOWN_LETTERS = 120  # most characters of a value in a message
_NUMBERS = range(-(2**63), 2**63)  # integers that tensors, arrays and MLflow can hold
_TYPE_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "a block",
}
_MANY_TYPE_WORDS = {
    int: "integers",
    float: "numbers",
    bool: "true or false",
    str: "texts",
    list: "lists",
    Any: "values",
}


class Problem(NamedTuple):
    """One problem in a configuration."""

    key: str  # full dotted key, "optimizer.groups[0].lr"; empty if the problem concerns a whole file
    text: str  # the problem, the value and the fix
    where: str = ""  # the file, or "command line"

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, _shorten(self.key), self.text) if part)


class ConfigError(UnusableError):
    """Raised for an invalid configuration; the message has one line per problem."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return ConfigError, (self.problems,)  # pickled when rank 0 sends it to the other ranks


def stop_on(problems: Iterator[Problem] | Sequence[Problem]) -> None:
    """Raise `ConfigError` if there is any problem."""
    found = list(problems)
    if found:
        raise ConfigError(found)


def locate(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """Return the problem with the source that set its key, a part of it, or else an enclosing block.

    Args:
        origins: full key of every given leaf -> file or command line.
    """
    key = "" if problem.where else problem.key
    while key:
        inside = (f"{key}.", f"{key}[")
        places = [where for name, where in origins.items() if name == key or name.startswith(inside)]
        if places:
            return problem._replace(where=places[-1])
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return problem


def format_value(value: Any) -> str:
    """Format a value for a message; long values are truncated."""
    return _shorten(repr(value))


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}... ({len(text):,} characters)"


def is_interpolation(value: Any) -> bool:
    """Return whether OmegaConf computes the value, as `${name}`; its type is known only once it is resolved."""
    return isinstance(value, str) and "${" in value


def join(key: str, name: Any) -> str:
    """Return the dotted key of `name` inside the block `key`."""
    return f"{key}.{name}" if key else str(name)


def flatten(tree: Any, key: str = "", *, into_lists: bool = True) -> dict[str, Any]:
    """Return the leaves of a tree by full key, {"optimizer.groups[0].lr": 0.1}; an empty block or list is a leaf.

    Args:
        into_lists: False: every list is a leaf.
    """
    if isinstance(tree, Mapping) and tree:
        parts = [flatten(child, join(key, name), into_lists=into_lists) for name, child in tree.items()]
    elif into_lists and isinstance(tree, list) and tree:
        parts = [flatten(child, f"{key}[{index}]") for index, child in enumerate(tree)]
    else:
        return {key: tree}
    return {name: leaf for part in parts for name, leaf in part.items()}


def parts_of(key: str) -> list[str | int]:
    """Return the names and indexes of a full key: `optimizer.groups[0].lr` -> optimizer, groups, 0, lr."""
    return [int(index) if index else name for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", key)]


def types_of(schema: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one that the schema is."""
    return get_args(schema) if get_origin(schema) in (Union, types.UnionType) else (schema,)


def fields_of(schema: Any) -> dict[str, Any] | None:
    """Return name -> schema for the keys of a block; None if the schema is not a block."""
    schema = _without_none(schema)
    if isinstance(schema, dict):
        return schema
    return dict(_hints_of(schema)) if is_dataclass(schema) and isinstance(schema, type) else None


@cache
def _hints_of(schema: type) -> dict[str, Any]:
    return get_type_hints(schema)  # compiles every annotation: a quarter of `load_config`


def item_schema(schema: Any) -> Any:
    """Return the schema of the items of a list; None if the schema is not a list."""
    schema = _without_none(schema)
    return get_args(schema)[0] if get_origin(schema) is list else None


def all_keys(schema: Any, key: str = "") -> Iterator[str]:
    """Yield the full dotted keys of a schema, a block before its keys, list items as `optimizer.groups[].lr`."""
    if (item := item_schema(schema)) is not None:
        yield from all_keys(item, f"{key}[]")
    for name, child in (fields_of(schema) or {}).items():
        yield join(key, name)
        yield from all_keys(child, join(key, name))


def is_optional(schema: Any) -> bool:
    """Return whether the schema allows null."""
    return type(None) in get_args(schema)


def block_of(schema: Any) -> type | None:
    """Return the dataclass X of `X`, `X | None` or `list[X]`; None if there is none."""
    schema = item_schema(schema) or schema
    return next((part for part in (schema, *get_args(schema)) if isinstance(part, type) and is_dataclass(part)), None)


def _without_none(schema: Any) -> Any:
    if get_origin(schema) in (Union, types.UnionType):
        schemas = [argument for argument in get_args(schema) if argument is not type(None)]
        return schemas[0] if len(schemas) == 1 else schema
    return schema


def nearest(name: str, names: Sequence[str], similarity: float = _MAYBE) -> str | None:
    """Return the name most similar to `name`, ignoring case; None if none reaches `similarity`.

    Args:
        similarity: 0 accepts any name, 1 only an equal one.
    """
    if len(name) > _SHOWN_LETTERS:  # the comparison costs the product of both lengths
        return None
    by_lower = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=similarity)
    return by_lower[close[0]] if close else None


def hint(name: str, names: Iterable[str]) -> str:
    """Return `: did you mean NAME?` for the most similar name; nothing if none is similar."""
    close = nearest(name, list(names), SURE)
    return f": did you mean {close}?" if close else ""


def suggest(name: str, block: str, known: Sequence[str], everywhere: Sequence[str]) -> str:
    """Return a hint for the unknown key `name` of `block`: the key that was probably meant, or else the known keys.

    Args:
        known: the keys of the block.
        everywhere: full dotted keys of the whole configuration; the right name may be in the wrong block.
    """
    other = OTHER_NAMES.get(name.lower().replace("-", "_"), "")
    if (option := other.removeprefix("memory.")) != other:  # the schema has none of their options
        outer = block.partition(".")[0]
        if outer == "memory" and option in known:  # of its kind
            return f"did you mean {join(block, option)}?"
        if outer not in ("memory", "deepspeed") and everywhere:
            return f"did you mean {other}?"
    elif other in everywhere:
        return f"did you mean {other}?"
    if close := nearest(name, known, SURE):
        return f"did you mean {join(block, close)}?"
    same = [key for key in everywhere if key.rpartition(".")[2] == name.rpartition(".")[2]]
    if same:
        return f"did you mean {' or '.join(same[:3])}?"
    names = {key.rpartition(".")[2]: key for key in reversed(everywhere)}
    if close := nearest(name, list(names), SURE):
        return f"did you mean {names[close]}?"
    if close := nearest(name, known):
        return f"did you mean {join(block, close)}?"
    return f"known keys here{list_names(known)}"


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
        key: full dotted key of the tree.
        everywhere: see `suggest`.
        is_open: returns whether to skip the check of a value.
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
        yield Problem(
            key, f"is {format_value(tree)}, but must be a block with keys among {some(fields, _SHOWN) or 'none'}"
        )
    elif item is not None and (children := _items(tree)) is not None:
        for index, child in children.items():
            yield from check_tree(item, child, key=f"{key}[{index}]", everywhere=everywhere, is_open=is_open)
    elif get_origin(schema) is dict and isinstance(tree, Mapping):
        for name, child in tree.items():
            yield from check_tree(
                get_args(schema)[1], child, key=join(key, name), everywhere=everywhere, is_open=is_open
            )
    elif not _has_type(schema, tree):
        yield Problem(key, f"is {format_value(tree)}, but must be {describe_type(schema)}{_advice(schema, tree)}")
    elif type(tree) is int and tree not in _NUMBERS:
        yield Problem(key, f"is {format_value(tree)}, but numbers have at most 64 bits; give a smaller one")


def _items(tree: Any) -> Mapping[Any, Any] | None:
    """Return the items of a list by index; also of a block with numeric keys, `groups.0.lr=1`, which sets one item."""
    if isinstance(tree, list):
        return dict(enumerate(tree))
    if isinstance(tree, Mapping) and tree and all(str(index).isdecimal() for index in tree):
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
        return isinstance(value, str | int)  # as `${train.steps}`
    return isinstance(value, schema) if isinstance(schema, type) else False


def describe_type(schema: Any) -> str:
    """Describe a schema in words, `an integer or null`."""
    inner = _without_none(schema)
    item = item_schema(inner)
    if item is not None:
        words = f"a list of {_MANY_TYPE_WORDS.get(get_origin(item) or item, 'blocks')}"
    else:
        words = _TYPE_WORDS.get(get_origin(inner) or inner, str(inner))
    return f"{words} or null" if is_optional(schema) else words


def _advice(schema: Any, value: Any) -> str:
    if _without_none(schema) is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return f"; write {int(value)}"
    if value is None:
        return "; leave the key out for its default"
    if _without_none(schema) in (int, float) and isinstance(value, str) and _QUOTED.fullmatch(value):
        return "; write it without quotes"
    if _without_none(schema) in (int, float) and isinstance(value, str) and re.match(r"[-+]?\.?[0-9]", value):
        return "; write it as a decimal number, without a leading 0, `_` or `:`"
    return ""
