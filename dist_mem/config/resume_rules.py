"""Compare the configuration of a resumed run with that of its checkpoint, by the rules of the schema.

FREE keys may change, ALLOWED keys need `--allow KEY`, all others must not change (keys.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

from dist_mem.config.blocks import as_tree
from dist_mem.config.check import Problem, flatten, stop_on, suggest
from dist_mem.config.deepspeed_keys import SCHEMA
from dist_mem.config.environment_values import checksum, from_environment
from dist_mem.config.keys import ALLOWED, FREE, ResumeRule
from dist_mem.config.load import known_keys
from dist_mem.config.schema import Config
from dist_mem.config.settings import differing_keys, metadata_of


class Change(NamedTuple):
    """A key whose value changed."""

    key: str
    old: Any  # also None if the key was absent
    new: Any
    rule: ResumeRule

    def __str__(self) -> str:
        return f"{self.key} {self.old!r} -> {self.new!r}"


def rule_of(key: str) -> ResumeRule:
    """Return the rule of a key, of a block, or of the nearest block around a key. Raises KeyError if it has none."""
    rule = metadata_of(key).resume
    if rule is None:
        raise KeyError(f"{key} has no rule; give it `resume=` in config/schema.py")
    return rule


def checksums_to_keep(config: Config) -> dict[str, str]:
    """Return checksums by key of values from the environment that are not FREE; `to_yaml` stores only their names."""
    found = from_environment(config.document)
    return {key: checksum(key, value) for key, (_, value) in found.items() if rule_of(key) != FREE}


def changed_keys(old: Config, new: Config, then: Mapping[str, str] = MappingProxyType({})) -> list[Change]:
    """Return the keys whose resolved values differ, in the order of the schema.

    Args:
        then: `checksums_to_keep` of the old configuration, because the environment may have changed since.
    """
    before, after = flatten(as_tree(old)), flatten(as_tree(new))
    for name, kept in then.items():
        if name in before:
            before[name] = after.get(name) if checksum(name, after.get(name)) == kept else _FORMER
    old_texts, new_texts = _texts(old), _texts(new)

    def value_before(key: str) -> Any:
        was = before.get(key)
        return was if was is _FORMER else old_texts.get(key, was)

    return [
        Change(key, value_before(key), new_texts.get(key, after.get(key)), rule_of(key))
        for key in differing_keys(before, after)
    ]


class _Placeholder(str):
    """A placeholder for a value, printed without quotes."""

    def __repr__(self) -> str:
        return str(self)


_FORMER = _Placeholder("another value")  # the environment's former value, known only by its checksum


def _texts(config: Config) -> dict[str, _Placeholder]:
    return {key: _Placeholder(found.written) for key, found in from_environment(config.document).items()}


def check_allowed(allowed: Sequence[str]) -> None:
    """Raise ConfigError for invalid arguments of `--allow`: unknown keys, or keys that must not change."""
    stop_on([problem for key in allowed if (problem := _not_allowable(key))])


def _not_allowable(given: str) -> Problem | None:
    key, known = _without_index(given), known_keys()
    if (of_deepspeed := key.split(".")[:2])[0] == "deepspeed" and SCHEMA.get(of_deepspeed[-1]) is dict:
        key = ".".join(of_deepspeed)  # DeepSpeed knows what is in it
    if key not in known and not key.startswith("memory."):
        block, _, name = key.rpartition(".")
        inside = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == block]
        return Problem("--allow", f"{given} is not a key; {suggest(name, block, inside, known)}")
    inside = [other for other in known if _covers(key, other)] or [key]  # of a memory
    rules = {rule_of(leaf) for leaf in inside if sum(_covers(leaf, other) for other in inside) == 1}
    if ALLOWED not in rules and rules != {FREE}:
        return Problem("--allow", f"{given} must not change: {rule_of(key).reason}")
    return None


def _covers(allowed: str, key: str) -> bool:
    """Return whether `--allow` of a key or block covers this key."""
    return key == allowed or key.startswith((f"{allowed}.", f"{allowed}["))


def check_changes(
    old: Config, new: Config, *, then: Mapping[str, str] = MappingProxyType({}), allowed: Sequence[str] = ()
) -> list[Change]:
    """Return the changes since the checkpoint, in the order of the schema.

    Args:
        then: as for `changed_keys`.
        allowed: keys, or blocks of keys, given to `--allow`.

    Raises:
        ConfigError: a key changed that must not change, or not without `--allow`; the message has every such key with
            its old value, new value and the fix.
    """
    changes = changed_keys(old, new, then)
    other_run = f"start another run with {_other_run_override(new)}"
    stop_on([problem for change in _causes(changes) if (problem := _refusal(change, allowed, other_run))])
    if new.train.epochs is not None:
        stop_on([_no_epochs(change) for change in changes if change.key == "train.segments_per_update"])
    return changes


def _no_epochs(change: Change) -> Problem:
    values = f"is {change.new!r}, but the run began with {change.old!r}"
    reason = "train.epochs would count its steps so far as if each had read as much as one now"
    return Problem(change.key, f"{values}, and {reason}; give train.steps in its place, or set this back")


def _causes(changes: Sequence[Change]) -> list[Change]:
    """Return the changes without the options of a memory whose kind changed, since all of them changed with it."""
    blocks = [change.key.removesuffix("kind") for change in changes if fnmatchcase(change.key, "memory.*kind")]
    return [
        change
        for change in changes
        if not any(change.key.startswith(block) and change.key != f"{block}kind" for block in blocks)
    ]


def _other_run_override(config: Config) -> str:
    """Return the override that selects another run directory."""
    return "name=NAME" if "${name}" in config.document["run_dir"] else "run_dir=FOLDER"


def _refusal(change: Change, allowed: Sequence[str], other_run: str) -> Problem | None:
    values = f"is {change.new!r}, but the run began with {change.old!r}"
    if change.rule == FREE or (change.rule == ALLOWED and any(_covers(key, change.key) for key in allowed)):
        return None
    if change.rule == ALLOWED:
        allow = f"add --allow {_without_index(change.key)} to continue with the new value"
        return Problem(change.key, f"{values}; set it back, {allow}, or {other_run}")
    return Problem(change.key, f"{values}, and must not change: {change.rule.reason}; set it back, or {other_run}")


def _without_index(key: str) -> str:
    """Return the key of the list that contains an item: `optimizer.groups` for `optimizer.groups[0].lr`."""
    return key.partition("[")[0]
