"""Numbers as MLflow takes them."""

from __future__ import annotations

import math

from dist_mem.runtime.figures import is_figure


def finite_or_nan(value: float | str) -> float:
    """Return a value as MLflow can keep it: an infinite one would be the largest float, a number like any other."""
    number = float(value)
    return number if is_figure(number) else math.nan
