"""Named tuples in code that torch.compile reads."""

from __future__ import annotations

from typing import Any, TypeVar

TupleT = TypeVar("TupleT", bound=tuple[Any, ...])


def replace(item: TupleT, **changes: Any) -> TupleT:
    """Return a NamedTuple with some fields changed, as its `_replace`, which Dynamo of torch 2.11 reads wrongly.

    There a compiled function stops at `_replace`, or returns a tuple without fields.
    """
    new: TupleT = type(item)(**{**dict(zip(item._fields, item, strict=True)), **changes})  # type: ignore[attr-defined]
    return new
