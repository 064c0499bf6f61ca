"""Print every configuration key with its default and meaning, as commented YAML: `dist-mem config`.

The meanings are the comments beside the keys in dist_mem/config/schema.py, so there is no second list to maintain.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, get_args

import yaml

from dist_mem.config.check import fields_of, item_schema
from dist_mem.config.schema import Config

_FIELD = re.compile(r"^    (\w+): [^#]*?(?:#\s*(.*))?$")


def schema_as_yaml() -> str:
    """Return the whole schema as YAML; blocks that are off by default are commented out."""
    return "\n".join(_block_lines(Config)) + "\n"


def meanings(schema: type) -> dict[str, str]:
    """Return key -> meaning for one dataclass, in terms of YAML (null, not None)."""
    lines = textwrap.dedent(inspect.getsource(schema)).splitlines()
    matches = map(_FIELD.match, lines)
    return {match[1]: re.sub(r"\bNone\b", "null", match[2] or "") for match in matches if match}


def default_of(field: Field[Any]) -> Any:
    """Return the default value of a field."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def block_of(schema: Any) -> type | None:
    """Return the dataclass X of `X`, `X | None` or `list[X]`; None if there is none."""
    schema = item_schema(schema) or schema
    return next((part for part in (schema, *get_args(schema)) if isinstance(part, type) and is_dataclass(part)), None)


def as_yaml(value: Any) -> str:
    """Format a value as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


def _block_lines(schema: type) -> Iterator[str]:
    types = fields_of(schema) or {}
    comments = meanings(schema)
    for field in fields(schema):
        default, block = default_of(field), block_of(types[field.name])
        is_on = is_dataclass(default)
        value = "" if is_on else f" {as_yaml(default)}"
        yield f"{field.name}:{value}" + (f"  # {comments[field.name]}" if comments[field.name] else "")
        if block is not None:
            yield from (f"  {line}" if is_on else f"#   {line}" for line in _block_lines(block))
