"""Parts of configurations."""

from __future__ import annotations

from typing import Any


def nested(key: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": [{"c": VALUE}]}} for `a.b[].c`."""
    tree = value
    for name in reversed(key.split(".")):
        tree = {name.removesuffix("[]"): [tree] if name.endswith("[]") else tree}
    return dict(tree)


STEPS = "train.steps=10"
