"""Interpolations: `${key}` and `${oc.env:NAME}` in a configuration, which OmegaConf computes. Nothing else uses it.

A document is the tree that config.yaml has, with interpolations; a configuration has the values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from dist_mem.config.blocks import number_of_type, put, value_at
from dist_mem.config.check import (
    ConfigError,
    Problem,
    check_tree,
    describe_type,
    flatten,
    is_interpolation,
    item_schema,
    stop_on,
    types_of,
)
from dist_mem.config.values import Letters, convert_letters

InterpolationError = OmegaConfBaseException
SchemaOf = Callable[[str], Any]  # full key -> its type; Any for a key that has none


def watch(record: Callable[[str, Any], None]) -> None:
    """Call `record` with name and value of every variable of the environment that is read from now on."""

    def read(*arguments: Any) -> Any:
        value = oc.env(*arguments)
        record(arguments[0], value)
        return value

    OmegaConf.register_resolver("oc.env", read, replace=True)


def check_grammar(tree: Mapping[str, Any]) -> None:
    """Raise InterpolationError, or another error of `documents.UNREADABLE`, if an interpolation cannot be parsed."""
    _node(tree)


def as_plain(tree: Any) -> Any:
    """Return a tree that a program gives, also one of OmegaConf, as a plain one with its interpolations."""
    return OmegaConf.to_container(tree, resolve=False) if OmegaConf.is_config(tree) else tree


def find_interpolations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield key, text and value of every interpolation; None for a value that cannot be resolved."""
    node = _node(document)
    for key, text in _interpolations(document).items():
        value = None
        with suppress(OmegaConfBaseException):
            value = OmegaConf.select(node, key)
        yield key, text, value


def resolve(document: Mapping[str, Any], schema_of: SchemaOf, block: str = "") -> dict[str, Any]:
    """Return the document, or a block of it alone, with values in place of interpolations.

    Raises:
        ConfigError: names the key and the interpolation, never a value, which may be a secret.
    """
    try:
        node = _node(document)
        names = [block] if block else [*document]
        tree = {name: _value(node, name) for name in names}
    except OmegaConfBaseException as error:
        raise ConfigError([_resolution_problem(error, document)]) from None
    problems = []
    for key, text in _interpolations({name: document[name] for name in tree}).items():
        try:
            put(tree, key, of_type(schema_of(key), value_at(tree, key)))
        except ValueError as error:
            problems.append(Problem(key, f"cannot be resolved: the value of {text} must be {error}"))
    stop_on(problems)
    return tree


def _value(node: DictConfig, name: str) -> Any:
    found = node[name]
    return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found


def of_type(schema: Any, value: Any) -> Any:
    """Return a resolved value as one of the type of its key: a text as a number, or true or false; a number as a text.

    Raises:
        ValueError: says what it must be; the text is no such value as values.py reads them: 0012, 1_000.
    """
    schema = item_schema(schema) or schema
    kinds = {*types_of(schema)}
    if type(value) in (int, float):
        return str(value) if str in kinds and type(value) not in kinds else number_of_type(schema, value)
    if not isinstance(value, str) or kinds & {str, Any, object} or not kinds & {int, float, bool}:
        return value
    found = number_of_type(schema, convert_letters(schema, Letters(value)))
    if any(check_tree(schema, found)):
        rule = ", a number without a leading 0, `_` or `:`" if kinds & {int, float} else ""
        raise ValueError(f"{describe_type(schema)}{rule}")
    return found


def default_of_variable(text: str) -> str | None:
    """Return what OmegaConf makes of the default of a variable; None if it is null, or cannot be read."""
    with suppress(OmegaConfBaseException):
        return cast(str | None, OmegaConf.create({"value": f"${{oc.env:DIST_MEM_IS_NEVER_SET,{text}}}"}).value)
    return None


def _node(document: Mapping[str, Any]) -> DictConfig:
    return OmegaConf.create(dict(document))


def _interpolations(document: Mapping[str, Any]) -> dict[str, str]:
    return {key: text for key, text in flatten(document).items() if is_interpolation(text)}


def _resolution_problem(error: OmegaConfBaseException, document: Mapping[str, Any]) -> Problem:
    key = error.full_key or next((key for key, _, value in find_interpolations(document) if value is None), "")
    return Problem(key, f"cannot be resolved: {_reason(error)}")


def _reason(error: OmegaConfBaseException) -> str:
    """Return OmegaConf's message without the value, which may be a secret from the environment."""
    message = str(error.msg or error)
    if named := re.search(r"Interpolation key '([A-Z_][A-Z0-9_]*)' not found", message):
        return f"no key is called {named[1]}; of the environment, write ${{oc.env:{named[1]}}}"
    if missing := re.search(r"Environment variable '(\w+)' not found", message):
        return f"the environment variable {missing[1]} is not set; set it, or write ${{oc.env:{missing[1]},default}}"
    return message.splitlines()[0]
