"""Trees and values: a checked tree becomes dataclasses, a dataclass a tree; and a key finds its place in a tree.

A tree is what a YAML parser returns: dicts, lists, scalars.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from dist_mem.config.check import ConfigError, Problem, block_of, fields_of, item_schema, join, parts_of, types_of


def as_tree(value: Any) -> Any:
    """Return a value as a tree of its own, of which nothing is shared with the value."""
    if dataclasses.is_dataclass(value):
        return {field.name: as_tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: as_tree(child) for name, child in value.items()}
    return [as_tree(child) for child in value] if isinstance(value, list | tuple) else value


def add_defaults(schema: Any, tree: Any) -> Any:
    """Return a tree with the defaults of all keys that it lacks, in the order of the schema.

    Raises:
        KeyError: a block has a key that the schema does not have.
    """
    if (item := item_schema(schema)) is not None and isinstance(tree, list):
        return [add_defaults(item, child) for child in tree]
    if item is None and (block := block_of(schema)) is not None and isinstance(tree, Mapping):
        given, kinds = {**as_tree(block()), **tree}, fields_of(block) or {}
        if unknown := [name for name in given if name not in kinds]:
            raise KeyError(f"{unknown[0]} is no key of {block.__name__}")
        return {name: add_defaults(kind, given[name]) for name, kind in kinds.items()}
    return number_of_type(schema, tree)


def build(schema: Any, tree: Any, key: str = "") -> Any:
    """Return a checked and resolved tree as a value of its schema: its blocks are dataclasses.

    Args:
        key: full dotted key of the tree, for messages.

    Raises:
        ConfigError: a key without a default is missing.
    """
    if (item := item_schema(schema)) is not None and isinstance(tree, list):
        return [build(item, child, f"{key}[{index}]") for index, child in enumerate(tree)]
    if get_origin(schema) is dict and isinstance(tree, Mapping):
        return {name: build(get_args(schema)[1], child, join(key, name)) for name, child in tree.items()}
    if item is None and (block := block_of(schema)) is not None and isinstance(tree, Mapping):
        kinds = fields_of(block) or {}
        required = [field.name for field in dataclasses.fields(block) if _is_required(field)]
        if missing := [Problem(join(key, name), "is missing: give it") for name in required if name not in tree]:
            raise ConfigError(missing)
        return block(**{name: build(kinds[name], child, join(key, name)) for name, child in tree.items()})
    return as_tree(number_of_type(schema, tree))


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def number_of_type(schema: Any, value: Any) -> Any:
    """Return a whole number as a float or a text where the schema has that type; all else as it is."""
    kinds = types_of(schema)
    if type(value) is not int or int in kinds:
        return value
    return float(value) if float in kinds else str(value) if str in kinds else value


def value_at(tree: Any, key: str) -> Any:
    """Return what has a full key in a tree; None if there is nothing, as inside a block that is null."""
    for name in parts_of(key):
        if isinstance(tree, Mapping):
            tree = tree.get(name)
        else:
            tree = tree[name] if isinstance(tree, list) and isinstance(name, int) and name < len(tree) else None
    return tree


def put(tree: Any, key: str, value: Any) -> None:
    """Replace what has a full key in a tree. Raises KeyError or IndexError if its block or list does not exist."""
    *parents, last = parts_of(key)
    for name in parents:
        tree = tree[name]
    tree[last] = value
