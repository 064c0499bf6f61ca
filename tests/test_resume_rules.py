"""Which keys may change on resume: every key has a rule, and changes are told by name."""

from __future__ import annotations

import pytest

from dist_mem.config import Config, ConfigError, known_keys, load_config
from dist_mem.config_check import all_keys, fields_of
from dist_mem.memory import memory_options
from dist_mem.resume_rules import FREE, RULES, SAME, changed_keys, refuse_changes, rule_of


def load(*overrides: str) -> Config:
    return load_config(["train.steps=10", *overrides], memory_options=memory_options)


def schema_leaves() -> list[str]:
    keys = [*known_keys(), "memory.kind", "memory.anything"]
    return [key for key in keys if not any(other.startswith((f"{key}.", f"{key}[")) for other in keys)]


def test_every_key_of_the_schema_has_one_rule() -> None:
    for key in schema_leaves():
        assert rule_of(key) in (FREE, SAME)
    with pytest.raises(KeyError, match=r"train\.new_key has no rule"):
        rule_of("train.new_key")


def test_no_rule_is_for_a_key_that_does_not_exist() -> None:
    keys = schema_leaves()
    for pattern in RULES:
        prefix = pattern.removesuffix("*")
        assert any(key == pattern or (pattern != prefix and key.startswith(prefix)) for key in keys), pattern
    assert set(fields_of(Config) or {}) == {pattern.split(".")[0].removesuffix("*") for pattern in RULES}
    assert len(set(all_keys(Config))) == len(list(all_keys(Config)))


def test_equal_configurations_have_no_changes() -> None:
    assert changed_keys(load(), load("train.seg_len=64")) == []
    assert changed_keys(load(), load("memory.mem_len=128")) == []  # the default, written out


def test_free_changes_are_accepted() -> None:
    new = load("train.steps=20", "optimizer.lr=5", "schedule.kind=linear", "name=other", "eval.every=5", "data.path=d")
    changes = changed_keys(load(), new)
    assert {change.key for change in changes} == {
        "name",
        "run_dir",
        "data.path",
        "train.steps",
        "optimizer.lr",
        "schedule.kind",
        "eval.every",
    }
    assert {change.rule for change in changes} == {FREE}
    refuse_changes(load(), new)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.dropout=0.3", "model.dropout"),
        ("memory.mem_len=5", "memory.mem_len"),
        ("memory.kind=none", "memory.kind"),
        ("train.seg_len=32", "train.seg_len"),
        ("train.lanes=32", "train.lanes"),
        ("train.micro_lanes=4", "train.micro_lanes"),
        ("data.seed=1", "data.seed"),
        ("optimizer.groups=[{match: u, lr: 1}]", "optimizer.groups[0].match"),
        ("deepspeed.zero_optimization.stage=3", "deepspeed.zero_optimization.stage"),
        ("deepspeed.fp16.initial_scale_power=8", "deepspeed.fp16.initial_scale_power"),
    ],
)
def test_other_changes_are_refused_by_name(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_changes(load(), load(override))
    assert key in {problem.key for problem in caught.value.problems}
    assert "but the run began with" in str(caught.value)


def test_interpolated_values_are_compared_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST_MEM_TEST_LANES", "16")
    assert changed_keys(load(), load("train.lanes=${oc.env:DIST_MEM_TEST_LANES}")) == []
