"""What a run of a study is: the settings that affect its metrics; a cell has them, and refuses those of another run.

A cell outlives versions of dist_mem. A key that is newer than it counts as having had its default, with which a newer
version computes what an older one did.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dist_mem.config import Config, as_tree
from dist_mem.config.keys import DRAW, RESULT, SCORE, SPEED
from dist_mem.config.settings import differing_keys, select_keys
from dist_mem.errors import UnusableError
from dist_mem.memory import memory_options
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.terminal import some

Settings = dict[str, Any]  # dotted key -> resolved value
_COMPARED = RESULT | DRAW | SCORE  # of data, a definition has the fingerprints


def settings_of(config: Config) -> Settings:
    """Return the settings that affect the metrics or the speed."""
    return select_keys(as_tree(config), affects=_COMPARED | SPEED)


def compare(kept: Mapping[str, Any], definition: Mapping[str, Any], what: str, remedy: str) -> None:
    """Raise UnusableError if two definitions differ in more than speed; the message names the first keys that differ.

    Args:
        kept: the definition of `what`; an older version of dist_mem may have written it.
        definition: without the fingerprints of data that are not here, which are not compared.
        remedy: ends the message.
    """
    now = select_keys(json.loads(json_text(definition)), affects=_COMPARED)
    then = select_keys(kept, affects=_COMPARED)
    then.pop("ranks", None)  # an older version kept them: those of the command, also of a job of Slurm with more
    if newer := now.keys() - then.keys():
        usual = json.loads(json_text(_defaults(now))) if "memory.kind" in then else {}
        then |= {key: usual[key] for key in newer if key in usual}
    differing = sorted(differing_keys(then, now))
    if keys := [key for key in differing if key in now or not key.startswith("data/")]:
        changes = (f"{key} was {then.get(key)!r} and is {now.get(key)!r}" for key in keys)
        raise UnusableError(f"{what} of another definition: {some(changes, 3, separator='; ')}; {remedy}")


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
    return select_keys({**asdict(Config()), "memory": memory_options(memory)}, affects=_COMPARED)
