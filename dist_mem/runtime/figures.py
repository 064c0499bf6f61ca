"""What is no figure: NaN and infinities are `n/a` in tables and CSV, null in JSON, and not drawn, ranked or tracked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

NO_FIGURE = "n/a"
MAX_EXPONENT = 709.0  # largest exponent of e in float64
_NAMES = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
NAMED = frozenset(_NAMES.values())  # numbers that are texts in JSON


def is_figure(value: object) -> bool:
    """Return whether a number can be shown, drawn and compared: it is neither NaN nor infinite."""
    return not isinstance(value, float) or math.isfinite(value)


def finite_or_nan(value: float | str) -> float:
    """Return a value as MLflow can keep it: an infinite one would be the largest float, a number like any other."""
    number = float(value)
    return number if is_figure(number) else math.nan


def exponential(nats: float) -> float:
    """Return exp(nats), as a perplexity; nan if it is too large for a float, or nats is nan."""
    return math.exp(nats) if nats < MAX_EXPONENT else math.nan


def json_text(value: Any, *, is_exact: bool = False, **options: Any) -> str:
    """Return JSON that every reader takes: it knows no NaN, and no infinity.

    Args:
        is_exact: what is no figure is the text "NaN", "Infinity" or "-Infinity", as in protobuf's JSON, which `float`
            reads again; else null.
        options: of `json.dumps`.
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:  # rare: most content has no such number, and need not be searched
        return json.dumps(_figure_or_name(value, _NAMES if is_exact else {}), allow_nan=False, **options)


def _figure_or_name(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _figure_or_name(child, names) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_figure_or_name(child, names) for child in value]
    return value if is_figure(value) else names.get(str(value))
