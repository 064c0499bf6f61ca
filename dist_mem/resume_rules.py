"""Which keys may change when a run is resumed: `RULES` is the table, a key goes by the longest pattern that fits it."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from dist_mem.config import Config
from dist_mem.config_check import ConfigError, Problem, flatten
from dist_mem.config_sources import plain_block

FREE, SAME = "free", "same"

RULES: dict[str, str] = {
    # What the run is called and where it is told of.
    "name": FREE,
    "run_dir": FREE,
    "tracking.*": FREE,
    # Saving and evaluation change nothing in training.
    "checkpoint.*": FREE,
    "eval.*": FREE,
    # The same tokens from another place (their fingerprints are compared), in the same order.
    "data.path": FREE,
    "data.cache": FREE,
    "data.on_corrupt": FREE,
    "data.prefetch": FREE,
    "data.seed": SAME,
    "data.layout": SAME,
    "data.max_document_len": SAME,
    "data.train_split": SAME,
    # Parameters and memories of the checkpoint.
    "model.*": SAME,
    "memory.*": SAME,
    # Read anew in every step.
    "train.steps": FREE,
    "train.epochs": FREE,
    "train.max_grad_norm": FREE,
    "schedule.*": FREE,
    "optimizer.lr": FREE,
    # Speed and space, not numbers.
    "train.activation_checkpointing": FREE,
    "train.threads": FREE,
    "deepspeed*": FREE,
    # Which lane reads what, and who holds it.
    "train.seed": SAME,
    "train.lanes": SAME,
    "train.micro_lanes": SAME,
    "train.seg_len": SAME,
    "train.segments_per_update": SAME,
    # What the optimizer's state in the checkpoint is made of.
    "train.precision": SAME,
    "optimizer.*": SAME,
    "deepspeed.zero_optimization.stage": SAME,
    "deepspeed.fp16.*": SAME,
    "deepspeed.bf16.*": SAME,
    "deepspeed.data_types.*": SAME,
}


class Change(NamedTuple):
    """A key with another value than before."""

    key: str
    old: Any  # None also where the key was absent
    new: Any
    rule: str  # FREE or SAME


def rule_of(key: str) -> str:
    """FREE or SAME. Raises KeyError for a key without a rule."""
    fitting = [pattern for pattern in RULES if fnmatchcase(key, pattern)]
    if not fitting:
        raise KeyError(f"{key} has no rule; add one to RULES")
    return RULES[max(fitting, key=len)]


def changed_keys(old: Config, new: Config) -> list[Change]:
    """The keys whose resolved values differ, in the order of the schema."""
    before, after = flatten(plain_block(old)), flatten(plain_block(new))
    pairs = [(key, before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after])]
    return [Change(key, was, now, rule_of(key)) for key, was, now in pairs if _differ(was, now)]


def _differ(was: Any, now: Any) -> bool:
    """Whether two values differ; an empty block or list is as good as none."""
    nothing: tuple[Any, ...] = (None, {}, [])
    return was != now and not (was in nothing and now in nothing)


def refuse_changes(old: Config, new: Config) -> None:
    """Raise ConfigError naming every key that must stay the same and has not."""
    problems = [
        Problem(change.key, f"is {change.new!r}, but the run began with {change.old!r}; set it back, or start afresh")
        for change in changed_keys(old, new)
        if change.rule == SAME
    ]
    if problems:
        raise ConfigError(problems)
