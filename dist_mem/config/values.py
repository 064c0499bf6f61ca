"""How a text becomes a value: by the type that the schema gives its key, never by a guess of YAML.

A YAML parser knows no schema: it reads `name: 0010` as the number 8, `2024_01_05` as 20240105, and `1:30` as 90. So
`parse` and `_read_overrides` (sources.py) leave scalars without quotes as `Letters`, and `convert_letters` converts
these:

    text key          the letters themselves, also those of an override after `=`, unless all of them stand in quotes;
                      `null` is none if the key accepts none
    number key        a decimal number: -3, 0.5, 1e-4; no leading 0, no `_`, no `:`
    true or false     true, false, yes, no, on, off
    list or block     of a file: its YAML; of an override: the letters as YAML on one line

The options of a memory have a type once its kind is known (`build_block`); `untyped_values` converts what has no type
at all. `dump` writes texts so that these rules, and any YAML parser, read the same texts.
"""

from __future__ import annotations

import json
import re
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any, ClassVar, Union, get_args, get_origin

import yaml

from dist_mem.config.check import ConfigError, Problem, fields_of, format_value, is_interpolation, item_schema, join

_NULLS = ("", "~", "null", "Null", "NULL")
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
BOOLS = {form: value for word, value in _WORDS.items() for form in (word, word.capitalize(), word.upper())}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(
    r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_LIKE_NUMBER = re.compile(r"[-+]?\.?[0-9]")  # what begins so is a number to some parser
_PLAIN = "tag:dist_mem,plain"
_TEXT, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
_MOST_PARTS = 100_000  # of a document: its keys and values, and as one more each 100 characters of a text
_MOST_DEPTH = 100
_MOST_DIGITS = 400  # of a number; Python refuses to read one of more than 4,300


class Letters(str):
    """A scalar as it was written, without quotes; `convert_letters` or `untyped_values` gives it a type."""

    __slots__ = ()


class _Loader(yaml.SafeLoader):
    """Reads YAML with scalars as texts, those without quotes as `Letters`; refuses keys that are given twice."""

    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        _PLAIN: lambda loader, node: Letters(loader.construct_scalar(node)),
        _MERGE: lambda loader, node: Letters(loader.construct_scalar(node)),  # of a value, not a key
        **{
            f"tag:yaml.org,2002:{kind}": yaml.SafeLoader.yaml_constructors[f"tag:yaml.org,2002:{kind}"]
            for kind in ("str", "map", "seq")
        },
        None: yaml.SafeLoader.yaml_constructors[None],  # refuses other tags, as !!int
    }

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode:
            return (_MERGE if value == "<<" else _PLAIN) if implicit[0] else _TEXT
        return super().resolve(kind, value, implicit)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        if twice := _first_duplicate(name.value for name, _ in node.value if name.tag in (_PLAIN, _TEXT)):
            raise yaml.constructor.ConstructorError(
                "while constructing a mapping", node.start_mark, f"found duplicate key {twice}", node.start_mark
            )
        pairs = super().construct_mapping(node, deep=deep)
        return {str(name) if isinstance(name, str) else name: child for name, child in pairs.items()}


def _first_duplicate(names: Iterable[str]) -> str | None:
    return next((name for name, times in Counter(names).items() if times > 1), None)


def parse(text: str | bytes) -> tuple[Any, dict[str, int]]:
    """Return the tree of a YAML text, with `Letters`, and the line of every key. No tag makes an object of Python.

    Raises:
        YAMLError, ValueError or RecursionError: it is not YAML, or larger than the limits.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        if fault := _too_large(node):
            raise yaml.constructor.ConstructorError(None, None, fault, node.start_mark)
        return loader.construct_document(node), dict(_lines(node, ""))
    finally:
        loader.dispose()


def _lines(node: yaml.Node, key: str) -> Iterator[tuple[str, int]]:
    """Yield the full key of every value with its line. An alias has the lines of what it repeats."""
    if key:
        yield key, node.start_mark.line + 1
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            yield from _lines(child, f"{key}[{index}]")
    elif isinstance(node, yaml.MappingNode):
        for name, child in node.value:
            yield from _lines(child, join(key, name.value))


def _too_large(tree: Any) -> str | None:
    """Return why a tree, of YAML's nodes or plain, is refused before anything walks it; None if it is not.

    Parts that an alias repeats count each time: a walk visits them each time. Each is looked at once.
    """
    extents: dict[int, tuple[int, int]] = {}

    def extent(part: Any) -> tuple[int, int]:
        """Return parts and depth."""
        content = part.value if isinstance(part, yaml.Node) else part
        if not isinstance(content, list | Mapping):
            return 1 + len(content) // 100 if isinstance(content, str) else 1, 1
        if id(part) not in extents:
            extents[id(part)] = (_MOST_PARTS + 1, 1)  # until it is known: for an alias of what it stands in
            pairs = content.items() if isinstance(content, Mapping) else content
            inside = [extent(each) for pair in pairs for each in (pair if isinstance(pair, tuple) else (pair,))]
            extents[id(part)] = (1 + sum(num for num, _ in inside), 1 + max((depth for _, depth in inside), default=0))
        return extents[id(part)]

    num_parts, depth = extent(tree)
    if depth > _MOST_DEPTH:
        return "it is nested too deeply"
    most = f"it has more than {_MOST_PARTS:,} parts, where an alias counts as all that it repeats"
    return most if num_parts > _MOST_PARTS else None


def parse_json(text: bytes) -> Any:
    """Return the tree of a JSON text, with its numbers as `Letters`.

    Raises:
        ValueError or RecursionError: it is not JSON, gives a key twice, or is larger than the limits.
    """

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if twice := _first_duplicate(name for name, _ in pairs):
            raise ValueError(f"found duplicate key {twice}")
        return dict(pairs)

    tree = json.loads(
        text, object_pairs_hook=refuse_duplicates, parse_int=Letters, parse_float=Letters, parse_constant=Letters
    )
    if fault := _too_large(tree):
        raise ValueError(fault)
    return tree


def as_override(text: str) -> str:
    """Return the value of an override: its letters, or the text inside if all of it stands in quotes, as in a file."""
    if text[:1] in ("'", '"'):
        with suppress(yaml.YAMLError, RecursionError, ValueError):
            node = yaml.compose(text)
            if isinstance(node, yaml.ScalarNode) and node.style == text[0] and node.end_mark.index == len(text):
                return str(node.value)
    return Letters(text)


def open_letters(letters: Letters) -> Any:
    """Return the list or block that the letters of an override write; the letters themselves if they write none.

    Raises:
        YAMLError: they are not YAML.
    """
    found = letters if is_lone_interpolation(letters) else parse(letters)[0]
    return found if isinstance(found, list | Mapping) else letters


def is_lone_interpolation(letters: str) -> bool:
    """Return whether the letters are an interpolation, not a list or block with one inside."""
    return is_interpolation(letters) and letters.lstrip()[:1] not in ("[", "{")


def convert_letters(schema: Any, tree: Any, key: str = "") -> Any:
    """Return the tree with its `Letters` as values of the schema's types.

    Letters that do not fit stay a text, or another value, which `check_tree` refuses. Letters of `Any`, and of keys
    that the schema does not have, stay `Letters`.

    Args:
        key: full dotted key of the tree, for messages.

    Raises:
        ConfigError: the letters of a list or block are not YAML.
    """
    if isinstance(tree, Letters):
        return _of_letters(schema, tree, key)
    fields, item = fields_of(schema), item_schema(schema)
    if isinstance(tree, Mapping):
        of_values = (get_args(schema) or (None, Any))[1] if get_origin(schema) is dict else Any
        kinds = fields if fields is not None else dict.fromkeys(tree, of_values if item is None else item)
        return {name: convert_letters(kinds.get(name, Any), child, join(key, name)) for name, child in tree.items()}
    if isinstance(tree, list):
        return [
            convert_letters(Any if item is None else item, child, f"{key}[{index}]") for index, child in enumerate(tree)
        ]
    return tree


def _of_letters(schema: Any, letters: Letters, key: str) -> Any:
    is_union = get_origin(schema) in (Union, types.UnionType)
    kinds = get_args(schema) if is_union else (schema,)
    if Any in kinds or object in kinds:
        return letters
    if type(None) in kinds and letters in _NULLS:
        return None
    if any(_holds_parts(kind) for kind in kinds) and not is_lone_interpolation(letters):
        try:
            found = open_letters(letters)
        except (yaml.YAMLError, RecursionError, ValueError) as error:
            raise ConfigError(
                [Problem(key, f"{format_value(str(letters))} cannot be read as YAML: {yaml_error(error)}")]
            ) from None
        if found is not letters:
            return convert_letters(schema, found, key)
    if is_interpolation(letters):
        return str(letters)
    if bool in kinds and letters in BOOLS:
        return BOOLS[letters]
    number = _number(letters) if int in kinds or float in kinds else None
    if number is not None and (float in kinds or isinstance(number, int) or str not in kinds):
        return number
    return str(letters) if str in kinds else _guess(letters)


def _holds_parts(kind: Any) -> bool:
    return fields_of(kind) is not None or kind in (list, dict) or get_origin(kind) in (list, dict)


def yaml_error(error: Exception) -> str:
    """Return why a text cannot be read as YAML."""
    too_deep = isinstance(error, RecursionError) or "nesting depth" in str(error)  # the latter from PyYAML 6.0.4 on
    return "it is nested too deeply" if too_deep else str(error)


def untyped_values(tree: Any) -> Any:
    """Return the tree with what is left of `Letters` as the values that they write: null, true, a number, a text."""
    if isinstance(tree, Letters):
        try:
            found = open_letters(tree)
        except (yaml.YAMLError, RecursionError, ValueError):  # a text, if its key has a type that accepts it
            return str(tree)
        return _guess(tree) if found is tree else untyped_values(found)
    if isinstance(tree, Mapping):
        return {name: untyped_values(child) for name, child in tree.items()}
    return [untyped_values(child) for child in tree] if isinstance(tree, list) else tree


def _guess(letters: Letters) -> Any:
    if letters in _NULLS:
        return None
    if letters.lower() in ("true", "false") and letters in BOOLS:
        return BOOLS[letters]
    number = _number(letters)
    return str(letters) if number is None else number


def _number(letters: str) -> int | float | None:
    """Return the number that the letters write in decimal notation; None if they write none."""
    if len(letters) > _MOST_DIGITS:
        return None
    if _INTEGER.fullmatch(letters):
        return int(letters)
    if not _NUMBER.fullmatch(letters):
        return None
    return float(letters.lower().replace(".inf", "inf").replace(".nan", "nan"))


class _Dumper(yaml.SafeDumper):
    """Writes texts so that no YAML parser takes them for numbers."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _LIKE_NUMBER.match(text) or text in BOOLS else None
    return dumper.represent_scalar(_TEXT, text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_multi_representer(PurePath, lambda dumper, path: _represent_text(dumper, str(path)))


def dump(tree: Any) -> str:
    """Return a plain tree as YAML."""
    return yaml.dump(tree, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)
