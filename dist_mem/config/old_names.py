"""Names that keys had before version 0.1, accepted with a notice until version `ENDS`, which deletes this module.

They are accepted wherever a configuration is read: files, overrides, sweeps and tables of `reproduce`, and the copies
in run directories, checkpoints and exports (sources.py); in `--allow`; and in the settings that memory files and
journals record.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from dist_mem.config.check import ConfigError, Problem, join
from dist_mem.runtime.ranks import is_rank0

ENDS = "0.2"
KEYS = {  # block -> old name -> present name
    "train": {"lanes": "global_batch_size", "micro_lanes": "micro_batch_size"},
    "eval": {"lanes": "batch_size"},
    "optimizer.groups[]": {"match": "param_regex"},
}
OPTIONS = {"infinite": {"widths": "basis_widths"}}  # kind of memory -> old name -> present name
VALUES = {"infinite": {"density": {"moments": "softmax_moments"}}}  # kind -> option -> old value -> present value
_NONE: Mapping[str, Any] = MappingProxyType({})
_BLOCKS = {block.partition(".")[0] for block in KEYS} | {"memory"}
_MEMORY = re.compile(r"memory(\.over)*")
_INDEX = re.compile(r"\[\d+\]|\.\d+(?=\.|$)")  # of an item of a list: groups[0] in a configuration, groups.0 in MLflow


def with_present_names(tree: Mapping[str, Any], where: str, kinds: dict[str, Any]) -> dict[str, Any]:
    """Return a tree of a YAML parser with the present names, and print a notice for each old one.

    Args:
        where: the file, or "command line", for messages.
        kinds: block of a memory -> its kind, of the sources before this one; this one's are added.

    Raises:
        ConfigError: a key is given under both names.
    """
    return {
        name: _renamed(child, name, name, where, kinds) if name in _BLOCKS else child for name, child in tree.items()
    }


def _renamed(node: Any, block: str, key: str, where: str, kinds: dict[str, Any]) -> Any:
    """Rename inside of one node; `block` is its name in `KEYS`, `key` its name in messages."""
    if isinstance(node, list):
        return [_renamed(item, f"{block}[]", f"{key}[{index}]", where, kinds) for index, item in enumerate(node)]
    if not isinstance(node, Mapping):
        return node
    names: Mapping[str, str] = KEYS.get(block, {})
    values: Mapping[str, Mapping[str, str]] = _NONE
    if _MEMORY.fullmatch(block):
        kind = kinds[block] = str(node.get("kind", kinds.get(block)))
        names, values = OPTIONS.get(kind, {}), VALUES.get(kind, {})
    found: dict[str, Any] = {}
    for name, child in node.items():
        present, is_item = names.get(name, name), str(name).isdigit()
        if present != name and present in node:
            text = f"is also given under its old name, {join(key, name)}: remove that one"
            raise ConfigError([Problem(join(key, present), text, where)])
        if present != name:
            _notify(where, join(key, name), join(key, present))
        inside = f"{key}[{name}]" if is_item else join(key, present)
        new = _renamed(child, f"{block}[]" if is_item else join(block, present), inside, where, kinds)
        if isinstance(new, str) and new in values.get(present, {}):
            _notify(where, f"{inside}={new}", f"{inside}={values[present][new]}")
            new = values[present][new]
        found[present] = new
    return found


@cache
def _notify(where: str, old: str, new: str) -> None:
    """Print once, on rank 0, that a name has changed."""
    if is_rank0():
        text = f"notice: {where}: {old} is now {new}; the old name is accepted until version {ENDS}"
        print(text, file=sys.stderr, flush=True)


def present_key(key: str, settings: Mapping[str, Any] = _NONE) -> str:
    """Return the present name of a dotted key; `settings`: of the same configuration, where kinds of memories are."""
    block, _, name = key.rpartition(".")
    names = KEYS.get(_INDEX.sub("[]", block), {})
    if _MEMORY.fullmatch(block):
        names = OPTIONS.get(str(settings.get(f"{block}.kind")), {})
    return join(block, names.get(name, name))


def present_keys_given(keys: Iterable[str], where: str) -> list[str]:
    """Return the present names of keys that a user gave in `where`, and print a notice for each old one."""
    found = [(key, present_key(key)) for key in keys]
    for key, present in found:
        if present != key:
            _notify(where, key, present)
    return [present for _, present in found]


def present_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings, dotted key -> value, with the present names."""
    found = {}
    for key, value in settings.items():
        indexed = re.fullmatch(r"(.*?)((?:\[\d+\]|\.\d+)?)", key)  # widths[0] is an item of an option
        assert indexed is not None, "any text matches"
        block, _, name = present_key(indexed[1], settings).rpartition(".")
        values = VALUES.get(str(settings.get(f"{block}.kind")), {}).get(name, {}) if _MEMORY.fullmatch(block) else {}
        found[join(block, name) + indexed[2]] = values.get(value, value) if isinstance(value, str) else value
    return found


def present_keys_named(name: str) -> list[str]:
    """Return the keys of the schema that had this as the last part of their old name: for `lanes`, two keys."""
    return [join(block, names[name]) for block, names in KEYS.items() if name in names]
