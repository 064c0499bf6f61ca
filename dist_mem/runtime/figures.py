"""What is no figure: NaN and infinities are `n/a` in tables and CSV, null in JSON, and not drawn, ranked or tracked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

NO_FIGURE = "n/a"


def is_figure(value: object) -> bool:
    """Return whether a number can be shown, drawn and compared: it is neither NaN nor infinite."""
    return not isinstance(value, float) or math.isfinite(value)


def json_text(value: Any, **options: Any) -> str:
    """Return JSON that every reader takes, with null for what is no figure; the package writes JSON by this alone.

    Args:
        options: of `json.dumps`.
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # rare: most content has no such number, and need not be searched
        return json.dumps(_with_nulls(value), allow_nan=False, **options)


def _with_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_nulls(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(child) for child in value]
    return value if is_figure(value) else None
