"""What may change on resume: every key has a rule, and a change that is not allowed is refused by name."""

import pickle

import pytest

from dist_mem.config import Config, ConfigError, known_keys, load_config
from dist_mem.config.keys import ALLOWED, FREE, Affects
from dist_mem.config.resume_rules import changed_keys, check_allowed, check_changes, rule_of
from dist_mem.config.settings import metadata_of
from dist_mem.memory import memory_options
from tests.support.messages import refused


def load(*overrides: str) -> Config:
    return load_config(["train.steps=10", *overrides], memory_options=memory_options)


def test_every_key_has_a_rule() -> None:
    for key in (*known_keys(), "memory.kind", "memory.anything"):
        assert metadata_of(key).affects in list(Affects), f"{key}: give it or its block affects="
        assert key == "train" or rule_of(key) in (FREE, ALLOWED) or rule_of(key).reason
    with refused(KeyError, "train.new_key has no rule"):
        rule_of("train.new_key")
    assert rule_of("deepspeed.fp16.loss_scale") == ALLOWED
    assert rule_of("deepspeed.zero_optimization.stage") == FREE
    assert rule_of("memory.kernels") == rule_of("memory.8.over.kernels") == FREE


def test_equal_configurations_have_no_changes() -> None:
    assert changed_keys(load(), load("train.seg_len=64")) == []
    assert changed_keys(load(), load("memory.mem_len=128")) == []  # the default, written out


FREE_CHANGES = [
    *("train.steps=20", "optimizer.lr=5", "schedule.kind=linear", "name=other", "eval.every=5", "data.path=d"),
    *("checkpoint.every=5", "train.micro_batch_size=4", "deepspeed.zero_optimization.stage=3", "resume=5"),
]


def test_free_changes_are_accepted() -> None:
    changes = check_changes(load(), load(*FREE_CHANGES))
    assert {change.key for change in changes} == {*(text.partition("=")[0] for text in FREE_CHANGES), "run_dir"}
    assert {change.rule for change in changes} == {FREE}


ALLOWED_CHANGES = [
    *("model.dropout=0.3", "optimizer.betas=[0.8, 0.999]", "optimizer.weight_decay=0.5", "train.precision=fp32"),
    *("optimizer.groups=[{param_regex: u, lr: 1}]", "train.segments_per_update=2"),
    "deepspeed.fp16.initial_scale_power=8",
]


@pytest.mark.parametrize("override", ALLOWED_CHANGES)
def test_changes_of_what_is_computed_are_refused_until_they_are_allowed(override: str) -> None:
    """The message says what to add, and adding that does it."""
    allow = override.partition("=")[0]
    items = {"optimizer.betas": "[0]", "optimizer.groups": "[0].param_regex"}  # of lists
    key = allow + items.get(allow, "")
    with refused(ConfigError, f"--allow {allow} ") as caught:
        check_changes(load(), load(override))
    assert key in {problem.key for problem in caught.value.problems}
    assert key in {change.key for change in check_changes(load(), load(override), allowed=[allow])}
    check_changes(load(), load(override), allowed=[allow.split(".")[0]])  # a whole block
    with pytest.raises(ConfigError):
        check_changes(load(), load(override), allowed=["model.attention_dropout"])
    check_allowed([allow, allow.split(".")[0]])


def test_epochs_are_not_counted_in_steps_of_another_size() -> None:
    """Half of the epochs asked for would be left out, or more read."""
    epochs = ["train.steps=null", "train.epochs=2"]
    with refused(ConfigError, "train.segments_per_update", "train.epochs"):
        check_changes(load(*epochs), load(*epochs, "train.segments_per_update=2"), allowed=["train"])


@pytest.mark.parametrize(
    "override",
    [
        *("model.num_layers=3", "memory.mem_len=5", "memory.kind=none", "train.seg_len=32", "train.seed=1"),
        *("train.global_batch_size=32", "data.seed=1", "data.layout=stream", "optimizer.kind=sgd"),
    ],
)
def test_other_changes_are_refused_with_old_value_new_value_reason_and_fix(override: str) -> None:
    """Whole, also where the error reaches the other ranks."""
    key = override.partition("=")[0]
    with refused(ConfigError, key) as caught:
        check_changes(load(), load(override), allowed=["model", "train", "optimizer", "data", "memory"])
    (problem,) = [problem for problem in caught.value.problems if problem.key == key]
    assert rule_of(key).reason in problem.text
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.problems) == (str(caught.value), caught.value.problems)


def test_only_what_can_be_allowed_is_accepted_by_allow() -> None:
    for key in ("optimizer.beta", "train.global_batch_size"):
        with refused(ConfigError, key):
            check_allowed([key])
    for key in ("memory", "memory.kind", "memory.mem_len", "memory.0.mem_len"):
        with refused(ConfigError, f"{key} must not change"):
            check_allowed([key])
    check_allowed(["optimizer.lr", "memory.kernels", "memory.0.kernels"])  # they may change anyway
