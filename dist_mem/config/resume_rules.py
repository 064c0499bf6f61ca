"""Rules for changing keys when a run is resumed: the longest pattern in `RULES` that matches a key decides.

There are three classes. FREE keys may change: they do not affect the contents of the checkpoint. ALLOWED keys change
what the run computes from now on; they require `--allow KEY`, so that a typing mistake cannot change them. SAME keys
determine the contents of the checkpoint and must not change, for the reason in `REASONS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from omegaconf import OmegaConf

from dist_mem.config.check import Problem, flatten, stop_on, suggest
from dist_mem.config.environment_values import checksum, checksums, from_environment
from dist_mem.config.load import known_keys
from dist_mem.config.schema import Config
from dist_mem.config.sources import plain_block

FREE, ALLOWED, SAME = "free", "allowed", "same"

RULES: dict[str, str] = {
    # The name of the run, its tracking, and the checkpoint it resumes from.
    "name": FREE,
    "run_dir": FREE,
    "resume": FREE,
    "tracking.*": FREE,
    # The machine it runs on, and its supervision.
    "launch.*": FREE,
    "preflight": FREE,
    "watchdog.*": FREE,
    # Saving and evaluation do not affect training.
    "checkpoint.*": FREE,
    "eval.*": FREE,
    # The same tokens, whose fingerprints are compared, from another place in the same order.
    "data.path": FREE,
    "data.allow_pipe": FREE,
    "data.cache": FREE,
    "data.on_corrupt": FREE,
    "data.prefetch": FREE,
    "data.stage": FREE,
    "data.stage_dir": FREE,
    "data.*": SAME,
    # Parameters and memories of the checkpoint.
    "model.*": SAME,
    "model.pretrained": FREE,  # read only when a run begins
    "model.dropout": ALLOWED,
    "model.attention_dropout": ALLOWED,
    "memory.*": SAME,
    # Read in every step.
    "train.steps": FREE,
    "train.epochs": FREE,
    "train.max_grad_norm": FREE,
    "schedule.*": FREE,
    "divergence.*": FREE,
    "optimizer.lr": FREE,
    # The division of lanes and state among ranks affects speed and memory use, not results.
    "train.micro_lanes": FREE,
    "train.activation_checkpointing": FREE,
    "train.threads": FREE,
    "deepspeed*": FREE,
    # The documents each lane reads.
    "train.seed": SAME,
    "train.lanes": SAME,
    "train.seg_len": SAME,
    # The computation of an update. The checkpoint still fits, but the run continues differently.
    "train.segments_per_update": ALLOWED,
    "train.precision": ALLOWED,
    "optimizer.*": ALLOWED,
    "optimizer.kind": SAME,
    "deepspeed.fp16.*": ALLOWED,
    "deepspeed.bf16.*": ALLOWED,
    "deepspeed.data_types.*": ALLOWED,
}

REASONS: dict[str, str] = {
    "data.*": "every lane is in the middle of a document that this would assign to another lane or cut differently",
    "model.*": "the parameters of the checkpoint are those of that model",
    "memory.*": "the lanes of the checkpoint carry memories of that kind and size",
    "train.seed": "memories draw their random numbers from it",
    "train.lanes": "a memory belongs to a lane, and the plan assigns the documents to that many lanes: with another "
    "number each lane would be in the middle of a document that is no longer its own (the number of ranks, "
    "train.micro_lanes and train.segments_per_update may change)",
    "train.seg_len": "memories are built for segments of that length, and lanes are between two of them",
    "optimizer.kind": "the checkpoint holds the moments of that optimizer",
}


class Change(NamedTuple):
    """A key whose value changed."""

    key: str
    old: Any  # also None if the key was absent
    new: Any
    rule: str  # FREE, ALLOWED or SAME

    def __str__(self) -> str:
        return f"{self.key} {self.old!r} -> {self.new!r}"


def rule_of(key: str) -> str:
    """Return FREE, ALLOWED or SAME. Raises KeyError for a key without a rule."""
    return RULES[_pattern_of(key)]


def _pattern_of(key: str) -> str:
    fitting = [pattern for pattern in RULES if fnmatchcase(key, pattern)]
    if not fitting:
        raise KeyError(f"{key} has no rule; add one to RULES")
    return max(fitting, key=len)


def checksums_to_keep(config: Config) -> dict[str, str]:
    """Return checksums by key of values from the environment that are not FREE; `to_yaml` stores only their names."""
    return checksums(config, which=lambda key: rule_of(key) != FREE)


def changed_keys(old: Config, new: Config, then: Mapping[str, str] = MappingProxyType({})) -> list[Change]:
    """Return the keys whose resolved values differ, in the order of the schema.

    Args:
        then: `checksums_to_keep` of the old configuration, because the environment may have changed since.
    """
    before, after = flatten(plain_block(old)), flatten(plain_block(new))
    for key in before.keys() & then.keys():
        before[key] = after.get(key) if checksum(key, after.get(key)) == then[key] else _FORMER
    old_texts, new_texts = _texts(old), _texts(new)
    pairs = [(key, before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after])]
    return [
        Change(key, was if was is _FORMER else old_texts.get(key, was), new_texts.get(key, now), rule_of(key))
        for key, was, now in pairs
        if _differ(was, now)
    ]


class _Written(str):
    """A placeholder for a value, printed without quotes."""

    def __repr__(self) -> str:
        return str(self)


_FORMER = _Written("another value")  # the environment's former value, known only by its checksum


def _texts(config: Config) -> dict[str, _Written]:
    return {key: _Written(found.written) for key, found in from_environment(config).items()}


def _differ(was: Any, now: Any) -> bool:
    """Return whether two values differ; an empty block or list equals None."""
    nothing: tuple[Any, ...] = (None, {}, [])
    return was != now and not (was in nothing and now in nothing)


def check_allowed(allowed: Sequence[str]) -> None:
    """Raise ConfigError for invalid arguments of `--allow`: unknown keys, or keys that must not change."""
    stop_on([problem for key in allowed if (problem := _not_allowable(key))])


def _not_allowable(given: str) -> Problem | None:
    key, known = _without_index(given), [*known_keys(), "memory.kind"]
    if key not in known:
        block, _, name = key.rpartition(".")
        inside = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == block]
        return Problem("--allow", f"{given} is not a key; {suggest(name, block, inside, known)}")
    inside = [other for other in known if _covers(key, other)]
    rules = {rule_of(leaf) for leaf in inside if sum(_covers(leaf, other) for other in inside) == 1}
    if ALLOWED not in rules and SAME in rules:
        return Problem("--allow", f"{given} must not change: {_reason(key)}")
    return None


def _covers(allowed: str, key: str) -> bool:
    """Return whether `--allow` of a key or block covers this key."""
    return key == allowed or key.startswith((f"{allowed}.", f"{allowed}["))


def _reason(key: str) -> str:
    fitting = [pattern for pattern in REASONS if fnmatchcase(key, pattern) or fnmatchcase(f"{key}.", pattern)]
    return REASONS[max(fitting, key=len)]


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
    return changes


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
    given = OmegaConf.to_container(cast(Any, config), resolve=False)
    return "name=NAME" if "${name}" in cast(dict[str, Any], given)["run_dir"] else "run_dir=FOLDER"


def _refusal(change: Change, allowed: Sequence[str], other_run: str) -> Problem | None:
    values = f"is {change.new!r}, but the run began with {change.old!r}"
    if change.rule == SAME:
        return Problem(change.key, f"{values}, and must not change: {_reason(change.key)}; set it back, or {other_run}")
    if change.rule == ALLOWED and not any(_covers(key, change.key) for key in allowed):
        allow = f"add --allow {_without_index(change.key)} to continue with the new value"
        return Problem(change.key, f"{values}; set it back, {allow}, or {other_run}")
    return None


def _without_index(key: str) -> str:
    """Return the key of the list that contains an item: `optimizer.groups` for `optimizer.groups[0].lr`."""
    return key.partition("[")[0]
