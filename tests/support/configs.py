"""Parts of configurations."""

from collections.abc import Mapping
from typing import Any

from dist_mem.config import Config, as_tree, change_config


def nested(key: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": [{"c": VALUE}]}} for `a.b[].c`."""
    tree = value
    for name in reversed(key.split(".")):
        tree = {name.removesuffix("[]"): [tree] if name.endswith("[]") else tree}
    return dict(tree)


STEPS = "train.steps=10"


def config_from(*trees: Mapping[str, Any]) -> Config:
    """Return the configuration of the defaults with trees merged into them, whose values must be valid.

    Raises:
        KeyError: there is no such key.
    """
    document = as_tree(Config())
    for tree in trees:
        document = _fill(document, tree)
    return change_config(Config(), document)


def _fill(old: Any, new: Any) -> Any:
    """Merge blocks key by key, also an empty one."""
    if not isinstance(new, Mapping):
        return as_tree(new)
    kept = old if isinstance(old, Mapping) else {}
    return {**kept, **{name: _fill(kept.get(name), child) for name, child in new.items()}}
