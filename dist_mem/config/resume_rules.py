"""What may change when a run is resumed: `RULES` is the table, a key goes by the longest pattern that fits it.

Three classes. FREE keys may change: they leave what the checkpoint holds as it is. ALLOWED ones change what the run
computes from here on, which a typing mistake must not do: they take `--allow KEY`. SAME keys are what the checkpoint is
made of, for the reason in `REASONS`.
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
    # What the run is called, where it is told of, and from where it goes on.
    "name": FREE,
    "run_dir": FREE,
    "resume": FREE,
    "tracking.*": FREE,
    # On what machine it runs, and who watches it.
    "launch.*": FREE,
    "preflight": FREE,
    "watchdog.*": FREE,
    # Saving and evaluation change nothing in training.
    "checkpoint.*": FREE,
    "eval.*": FREE,
    # The same tokens from another place (their fingerprints are compared), in the same order.
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
    "model.pretrained": FREE,  # read where a run begins, and no more
    "model.dropout": ALLOWED,
    "model.attention_dropout": ALLOWED,
    "memory.*": SAME,
    # Read anew in every step.
    "train.steps": FREE,
    "train.epochs": FREE,
    "train.max_grad_norm": FREE,
    "schedule.*": FREE,
    "divergence.*": FREE,
    "optimizer.lr": FREE,
    # Who holds which lane, and how the state is divided: speed and space, not numbers.
    "train.micro_lanes": FREE,
    "train.activation_checkpointing": FREE,
    "train.threads": FREE,
    "deepspeed*": FREE,
    # Which lane reads what.
    "train.seed": SAME,
    "train.lanes": SAME,
    "train.seg_len": SAME,
    # What an update is made of. The checkpoint fits, but the run goes on as another one.
    "train.segments_per_update": ALLOWED,
    "train.precision": ALLOWED,
    "optimizer.*": ALLOWED,
    "optimizer.kind": SAME,
    "deepspeed.fp16.*": ALLOWED,
    "deepspeed.bf16.*": ALLOWED,
    "deepspeed.data_types.*": ALLOWED,
}

REASONS: dict[str, str] = {
    "data.*": "every lane is in the middle of a document that this would give to another lane, or cut otherwise",
    "model.*": "the parameters of the checkpoint are those of that model",
    "memory.*": "the lanes of the checkpoint carry memories of that kind and size",
    "train.seed": "memories draw their random numbers from it",
    "train.lanes": "a memory belongs to a lane, and the plan deals the documents to so many lanes: with another number "
    "each would be in the middle of a document that is no longer its own (the number of ranks, train.micro_lanes and "
    "train.segments_per_update may change)",
    "train.seg_len": "memories are made for segments of that length, and lanes stand between two of them",
    "optimizer.kind": "the checkpoint holds the moments of that optimizer",
}


class Change(NamedTuple):
    """A key with another value than before."""

    key: str
    old: Any  # None also where the key was absent
    new: Any
    rule: str  # FREE, ALLOWED or SAME

    def __str__(self) -> str:
        return f"{self.key} {self.old!r} -> {self.new!r}"


def rule_of(key: str) -> str:
    """FREE, ALLOWED or SAME. Raises KeyError for a key without a rule."""
    return RULES[_pattern_of(key)]


def _pattern_of(key: str) -> str:
    fitting = [pattern for pattern in RULES if fnmatchcase(key, pattern)]
    if not fitting:
        raise KeyError(f"{key} has no rule; add one to RULES")
    return max(fitting, key=len)


def checksums_to_keep(config: Config) -> dict[str, str]:
    """Checksums, by key, of values of the environment that may not change freely; `to_yaml` has only their names."""
    return checksums(config, which=lambda key: rule_of(key) != FREE)


def changed_keys(old: Config, new: Config, then: Mapping[str, str] = MappingProxyType({})) -> list[Change]:
    """The keys whose resolved values differ, in the order of the schema.

    Args:
        then: `checksums_to_keep` of the old one; what the environment says now is not what it said then.
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
    """A text that stands for a value, and is shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


_FORMER = _Written("another value")  # which the environment had then


def _texts(config: Config) -> dict[str, _Written]:
    return {key: _Written(found.written) for key, found in from_environment(config).items()}


def _differ(was: Any, now: Any) -> bool:
    """Whether two values differ; an empty block or list is as good as none."""
    nothing: tuple[Any, ...] = (None, {}, [])
    return was != now and not (was in nothing and now in nothing)


def check_allowed(allowed: Sequence[str]) -> None:
    """Raise ConfigError for what cannot be given to `--allow`: a key that is not there, or must stay the same."""
    stop_on([problem for key in allowed if (problem := _not_allowable(key))])


def _not_allowable(given: str) -> Problem | None:
    key, known = _without_index(given), [*known_keys(), "memory.kind"]
    if key not in known:
        block, _, name = key.rpartition(".")
        inside = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == block]
        return Problem("--allow", f"{given} is no key; {suggest(name, block, inside, known)}")
    inside = [other for other in known if _covers(key, other)]
    rules = {rule_of(leaf) for leaf in inside if sum(_covers(leaf, other) for other in inside) == 1}
    if ALLOWED not in rules and SAME in rules:
        return Problem("--allow", f"{given} must stay what it is: {_reason(key)}")
    return None


def _covers(allowed: str, key: str) -> bool:
    """Whether `--allow` of a key or block is meant for this key too."""
    return key == allowed or key.startswith((f"{allowed}.", f"{allowed}["))


def _reason(key: str) -> str:
    fitting = [pattern for pattern in REASONS if fnmatchcase(key, pattern) or fnmatchcase(f"{key}.", pattern)]
    return REASONS[max(fitting, key=len)]


def check_changes(
    old: Config, new: Config, *, then: Mapping[str, str] = MappingProxyType({}), allowed: Sequence[str] = ()
) -> list[Change]:
    """What has changed since the checkpoint, in the order of the schema.

    Args:
        then: as for `changed_keys`.
        allowed: keys, or blocks of keys, given to `--allow`.

    Raises:
        ConfigError: naming every key that must not change, or not without `--allow`: old value, new value and fix.
    """
    changes = changed_keys(old, new, then)
    other_run = f"start another run with {_way_to_another_run(new)}"
    stop_on([problem for change in _causes(changes) if (problem := _refusal(change, allowed, other_run))])
    return changes


def _causes(changes: Sequence[Change]) -> list[Change]:
    """The changes without the options of a memory of another kind, which all have changed with it."""
    blocks = [change.key.removesuffix("kind") for change in changes if fnmatchcase(change.key, "memory.*kind")]
    return [
        change
        for change in changes
        if not any(change.key.startswith(block) and change.key != f"{block}kind" for block in blocks)
    ]


def _way_to_another_run(config: Config) -> str:
    """The override that leads to another run directory."""
    given = OmegaConf.to_container(cast(Any, config), resolve=False)
    return "name=NAME" if "${name}" in cast(dict[str, Any], given)["run_dir"] else "run_dir=FOLDER"


def _refusal(change: Change, allowed: Sequence[str], other_run: str) -> Problem | None:
    said = f"is {change.new!r}, but the run began with {change.old!r}"
    if change.rule == SAME:
        return Problem(change.key, f"{said}, and must stay so: {_reason(change.key)}; set it back, or {other_run}")
    if change.rule == ALLOWED and not any(_covers(key, change.key) for key in allowed):
        allow = f"add --allow {_without_index(change.key)} to go on with the new value"
        return Problem(change.key, f"{said}; set it back, {allow}, or {other_run}")
    return None


def _without_index(key: str) -> str:
    """The list that an item stands in: `optimizer.groups` for `optimizer.groups[0].lr`."""
    return key.partition("[")[0]
