"""What a run of a study is: the settings that affect its metrics; a cell has them, and refuses those of another run.

A cell outlives versions of dist_mem. A key that is newer than it counts as having had its default, with which a newer
version computes what an older one did.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from dist_mem.config import Config, DivergenceConfig, as_tree
from dist_mem.config.deepspeed_keys import ALLOWED_ON_RESUME
from dist_mem.config.keys import keys_of
from dist_mem.errors import UnusableError
from dist_mem.memory import memory_options
from dist_mem.runtime.figures import json_text

Settings = dict[str, Any]  # dotted key -> resolved value
BLOCKS = ("data", "model", "memory", "train", "optimizer", "schedule", "eval")  # blocks that affect the metrics
# Keys that leave the metrics as they are. Data are compared by their fingerprints.
_NO_METRIC = {"data.path", *(name for name, key in keys_of(Config).items() if key.metadata.changes_no_result)}
_OF_DEEPSPEED = (*ALLOWED_ON_RESUME, "communication_data_type")  # parts of that block that affect the metrics


def settings_of(config: Config) -> Settings:
    """Return the settings that affect the metrics; outside `BLOCKS` those that are not the defaults."""
    tree = as_tree(config)
    found = _of_blocks(tree)
    usual = dict(flat("divergence", asdict(DivergenceConfig())))
    found |= {key: value for key, value in flat("divergence", tree["divergence"]) if value != usual[key]}
    given = {name: tree["deepspeed"][name] for name in _OF_DEEPSPEED if name in tree["deepspeed"]}
    return found | (dict(flat("deepspeed", given)) if given else {})


def compare(kept: Mapping[str, Any], definition: Mapping[str, Any], what: str, remedy: str) -> None:
    """Raise UnusableError if two definitions differ; the message names the first keys that differ.

    Args:
        kept: the definition of `what`; an older version of dist_mem may have written it.
        definition: without the fingerprints of data that are not here, which are not compared.
        remedy: ends the message.
    """
    now = json.loads(json_text(definition))
    then = {key: value for key, value in kept.items() if key not in _NO_METRIC}
    if newer := now.keys() - then.keys():
        usual = json.loads(json_text(_defaults(now))) if "memory.kind" in then else {}
        then |= {key: usual[key] for key in newer if key in usual}
    is_here = [key for key in sorted({*then, *now}) if key in now or not key.startswith("data/")]
    if keys := [key for key in is_here if then.get(key) != now.get(key)]:
        shown = "; ".join(f"{key} was {then.get(key)!r} and is {now.get(key)!r}" for key in keys[:3])
        more = f" and {len(keys) - 3} more" if keys[3:] else ""
        raise UnusableError(f"{what} of another definition: {shown}{more}; {remedy}")


def flat(key: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a tree with their values."""
    if isinstance(node, dict) and node:
        for name, child in node.items():
            yield from flat(f"{key}.{name}", child)
    else:
        yield key, node


def _of_blocks(tree: Mapping[str, Any]) -> Settings:
    return {key: value for name in BLOCKS for key, value in flat(name, tree[name]) if key not in _NO_METRIC}


def _defaults(definition: Settings) -> Settings:
    """Return the defaults of all keys of a definition, with its kinds of memory."""
    memory: dict[str, Any] = {}
    for key, value in definition.items():
        if re.fullmatch(r"memory\.(.+\.)?kind", key):
            *parents, last = key.split(".")[1:]
            block = memory
            for name in parents:
                block = block.setdefault(name, {})
            block[last] = value
    return _of_blocks({**asdict(Config()), "memory": memory_options(memory)})
