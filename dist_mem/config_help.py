"""Every configuration key with its default and its meaning, as commented YAML: `dist-mem config`.

The meanings are the comments beside the keys in dist_mem/config.py; there is no second list to keep true.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_args

import yaml

from dist_mem.config import Config
from dist_mem.config_check import fields_of, item_schema

_FIELD = re.compile(r"^    (\w+): [^#]*?(?:#\s*(.*))?$")


def schema_as_yaml() -> str:
    """The whole schema; blocks that are off by default stand in comments."""
    return "\n".join(_block_lines(Config)) + "\n"


def _meanings(schema: type) -> dict[str, str]:
    matches = map(_FIELD.match, inspect.getsource(schema).splitlines())
    return {match[1]: match[2] or "" for match in matches if match}


def _block_lines(schema: type) -> Iterator[str]:
    meanings = _meanings(schema)
    types = fields_of(schema) or {}
    for field in fields(schema):
        default = _default(field)
        if is_dataclass(default):
            yield f"{field.name}:"
            yield from (f"  {line}" for line in _block_lines(type(default)))
            continue
        meaning = f"  # {meanings[field.name]}" if meanings[field.name] else ""
        yield f"{field.name}: {_as_yaml(default)}{meaning}"
        inner = item_schema(types[field.name]) or types[field.name]
        if fields_of(inner):
            yield from (f"#   {line}" for line in _block_lines(_dataclass_of(inner)))


def _dataclass_of(schema: Any) -> type:
    """The dataclass in `X`, `X | None`."""
    return next(part for part in (schema, *get_args(schema)) if isinstance(part, type) and is_dataclass(part))


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")
