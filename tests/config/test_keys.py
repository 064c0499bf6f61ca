"""The metadata of keys: every key has limits, and values outside of them are refused."""

import os
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any, get_args

import pytest

from dist_mem.config import Config, ConfigError, as_tree, build_block, change_config, load_config, value_of
from dist_mem.config.check import flatten, item_schema
from dist_mem.config.keys import RESULT, Command, Key, key, keys_of
from dist_mem.config.settings import keys_set_by, may_set
from dist_mem.config.sources import find_file
from dist_mem.memory import describe_memories, memory_options
from tests.support.configs import STEPS, config_from
from tests.support.messages import refused

KEYS = keys_of(Config)
OPTIONS = {
    f"memory.{name}": found for _, schema in describe_memories().values() for name, found in keys_of(schema).items()
}


def is_of(found: Key, *kinds: type) -> bool:
    """Whether a value of the key, or an item of it, has one of these types."""
    schema = item_schema(found.schema) or found.schema
    return bool({schema, *get_args(schema)} & set(kinds))


def test_every_key_has_limits(subtests: pytest.Subtests) -> None:
    for name in KEYS:
        with subtests.test(name=name):
            found, metadata = KEYS[name], KEYS[name].metadata
            if is_of(found, int, float):
                assert metadata.limits("at least", "greater than", "less than"), "give it at_least= or above="
            if is_of(found, int):
                assert metadata.at_most is not None, "give it at_most="
            assert not metadata.choices or is_of(found, str)


def test_every_whole_number_of_a_memory_has_an_upper_bound() -> None:
    """A memory from outside is its author's."""
    assert [name for name, found in OPTIONS.items() if is_of(found, int) and found.metadata.at_most is None] == []


def test_options_of_memories_have_the_rules_of_the_memory() -> None:
    """No rule of their own: that of a memory from outside is known before its code may run."""
    own = {
        name: (found.metadata.resume, found.metadata.affects, found.metadata.set_by) for name, found in OPTIONS.items()
    }
    assert {name for name, rules in own.items() if rules != (None, None, None)} == set()


def test_a_command_names_the_keys_that_it_may_set() -> None:
    for command in Command:
        named = keys_set_by(command)
        assert all(may_set(command, name.removesuffix(".*")) for name in named)
        for name in KEYS:
            listed = {name, f"{name}.*", f"{name.partition('.')[0]}.*"}
            assert may_set(command, name) == bool(listed & set(named)), name
    assert not any(
        may_set(command, name) for command in Command for name in KEYS if KEYS[name].metadata.affects in RESULT
    )


@pytest.mark.parametrize(
    "name", sorted(name for name, found in KEYS.items() if is_of(found, int) and "[]." not in name)
)
def test_only_values_above_the_upper_bound_are_refused(name: str) -> None:
    def message(value: int) -> str:
        try:
            load_config([STEPS, f"{name}={[value] if item_schema(KEYS[name].schema) else value}"])
        except ConfigError as error:
            return str(error)
        return ""

    most = int(KEYS[name].metadata.at_most or 0)
    assert "must be at most" not in message(most)
    assert "must be at most" in message(most + 1) or "at most 64 bits" in message(most + 1)


def test_options_of_memories_are_bounded_and_refused_together_with_other_keys() -> None:
    over = "memory={kind: infinite, over: {kind: transformer_xl, mem_len: 99999999}}"
    several = ["memory.mem_len=99999999", "train.global_batch_size=0", "memory.mem_lne=3"]
    for given, keys in (([over], ["memory.over.mem_len"]), (several, ["memory.mem_lne", "train.global_batch_size"])):
        with refused(ConfigError, *keys):
            load_config([STEPS, *given], memory_options=memory_options)


@dataclass
class Options:
    share: float = key(0.5, above=0, below=1)
    norm: str = key("pre", choices=("pre", "post"))
    scale: float = 1.0


@pytest.mark.parametrize("values", [{"share": 1.0}, {"norm": "pots"}, {"scale": float("nan")}])
def test_a_memory_from_outside_declares_limits_and_choices_too(values: dict[str, Any]) -> None:
    with refused(ConfigError, f"memory.{next(iter(values))}"):
        build_block(Options, values, "memory")


def test_a_configuration_changes_by_known_keys_alone_and_what_refers_to_them_follows() -> None:
    config = config_from({"run_dir": "${name}/${train.seg_len}", "optimizer": {"lr": 1}})
    other = change_config(config, {"name": "x", "train.seg_len": 8, "memory": {"kind": "none"}})
    assert (other.run_dir, other.memory, other.document["run_dir"]) == (
        "x/8",
        {"kind": "none"},
        config.document["run_dir"],
    )
    assert isinstance(config.optimizer.lr, float) and (config.name, config.train.seg_len) == ("run", 64)
    for name in ("train.seg_length", "trian.seg_len", "no_such_key"):
        with pytest.raises(KeyError):
            change_config(config, {name: 8})
    with refused(KeyError, "seg_length"):
        config_from({"train": {"seg_length": 8}})
    with pytest.raises(FrozenInstanceError):
        config.train.seg_len = 8  # type: ignore[misc]


def test_every_value_of_a_configuration_can_be_read_by_its_key() -> None:
    given = ["optimizer.groups=[{param_regex: u, lr: 0.5}]", "deepspeed.zero_optimization.overlap_comm=true"]
    config = load_config([STEPS, *given], memory_options=memory_options)
    leaves = flatten(as_tree(config))
    assert {name: value_of(config, name) for name in leaves} == leaves
    assert value_of(config, "memory") == config.memory
    for wrong in ("memory.mem_lem", "optimizer.groups[1].lr", "train.epoch"):
        with refused(ConfigError, wrong):
            value_of(config, wrong)


def test_default_of_a_key_is_copied() -> None:
    Config().optimizer.betas.append(0.5)
    assert Config().optimizer.betas == [0.9, 0.999]


def test_a_missing_file_is_not_looked_for_all_over_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep" / "folder").mkdir(parents=True)
    walked: list[str] = []
    scan: Any = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path=".": (walked.append(str(path)), scan(path))[1])
    with refused(ConfigError, "absent.yaml: no such file"):
        find_file(str(tmp_path / "absent.yaml"), [Path(), tmp_path])
    assert not [path for path in walked if "deep" in path]
