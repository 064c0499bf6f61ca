"""Old names of keys, all of them by discovery over the table: they are read as the present ones, with a notice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dist_mem.config import Config, ConfigError, load_config, to_yaml
from dist_mem.config.check import flatten
from dist_mem.config.environment_values import checksum
from dist_mem.config.old_names import (
    ENDS,
    KEYS,
    OPTIONS,
    VALUES,
    _notify,
    present_settings,
    with_present_names,
)
from dist_mem.config.resume_rules import changed_keys
from dist_mem.config.sources import read_saved
from dist_mem.evaluation.trained_model import read_settings
from dist_mem.memory import memory_options

FORMATS = Path("tests/golden/formats")
SAMPLES: dict[str, Any] = {"widths": [0.125, 0.25], "micro_lanes": 4}  # others: 12
GROUPS = "optimizer={groups: [{lr: 1.0, %s: embedding}]}"


def override(block: str, name: str, value: Any) -> str:
    return GROUPS % name if block == "optimizer.groups[]" else f"{block}.{name}={value}"


def cases() -> Iterator[Any]:
    """Yield the overrides that must come first, old and new override, and the names that the notice has."""
    for block, names in KEYS.items():
        for old, new in names.items():
            value = SAMPLES.get(old, 12)
            key = block.replace("[]", "[0]")
            yield pytest.param([], override(block, old, value), override(block, new, value), f"{key}.{old}", id=old)
    for kind, names in OPTIONS.items():
        for old, new in names.items():
            value = SAMPLES.get(old, 12)
            for place in ("memory", "memory.over"):
                first = ["memory.kind=infinite"] if place == "memory.over" else []
                first = [*first, f"{place}.kind={kind}"]
                changed = [override(place, name, value) for name in (old, new)]
                yield pytest.param(first, *changed, f"{place}.{old}", id=f"{place}.{old}")
    for kind, options in VALUES.items():
        for option, values in options.items():
            for old, new in values.items():
                changed = [override("memory", option, value) for value in (old, new)]
                yield pytest.param([f"memory.kind={kind}"], *changed, f"memory.{option}={old}", id=old)


@pytest.fixture(autouse=True)
def _notices_again() -> None:
    _notify.cache_clear()


def load(*arguments: str) -> Config:
    return load_config([*arguments, "train.steps=1"], memory_options=memory_options)


@pytest.mark.parametrize(("first", "old", "new", "name"), list(cases()))
def test_an_old_name_is_read_as_the_new_one_with_one_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: list[str], old: str, new: str, name: str
) -> None:
    wanted = to_yaml(load(*first, new))
    assert capsys.readouterr().err == "", "a new name has no notice"
    key, _, value = old.partition("=")
    path = tmp_path / "old.yaml"
    tree: Any = OmegaConf.to_container(OmegaConf.from_dotlist([*first, f"{key}={value}"]))
    path.write_text(OmegaConf.to_yaml(tree))
    for where, arguments in (("command line", [*first, old]), (str(path), [str(path)])):
        assert to_yaml(load(*arguments)) == wanted
        notices = capsys.readouterr().err.splitlines()
        assert len(notices) == 1
        assert notices[0].startswith(f"notice: {where}: {name} is now ") and ENDS in notices[0]
        load(*arguments)
        assert capsys.readouterr().err == "", "a notice is given once"


@pytest.mark.parametrize(("first", "old", "new", "name"), [case for case in cases() if "density" not in case.values[1]])
def test_both_names_of_a_key_in_one_place_are_refused(first: list[str], old: str, new: str, name: str) -> None:
    in_item = "groups" in new
    given = [GROUPS % "match: u, param_regex"] if in_item else [old, new]
    with pytest.raises(ConfigError) as caught:
        load(*first, *given)
    present = f"{name.rpartition('.')[0]}.param_regex" if in_item else new.partition("=")[0]
    assert f"{present}: is also given under its old name, {name}: remove that one" in str(caught.value)


def test_a_later_source_wins_under_either_name(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text("train: {lanes: 32}\nmemory: {kind: infinite, widths: [0.125]}\noptimizer: {groups: [{match: u}]}")
    config = load(str(path), "train.global_batch_size=64", "memory.basis_widths=[0.25]", "optimizer.groups.0.match=v")
    assert config.train.global_batch_size == 64
    assert config.memory.basis_widths == [0.25]
    assert config.optimizer.groups[0].param_regex == "v"


def test_memories_of_others_keep_their_own_names() -> None:
    tree = {"memory": {"kind": "./mine.py:Mine", "widths": [1], "density": "moments"}, "data": {"lanes": 1}}
    assert with_present_names(tree, "mine.yaml", {}) == tree


@pytest.mark.parametrize("directory", sorted(FORMATS.glob("format-*/step-*")), ids=lambda path: path.parent.name)
def test_checkpoints_of_old_formats_have_every_old_name_and_open(directory: Path) -> None:
    written: Any = OmegaConf.to_container(OmegaConf.load(directory / "config.yaml"))
    for block, names in KEYS.items():
        assert all(any(key.endswith(f".{old}") for key in flatten(written)) for old in names), block
    saved = flatten(read_saved(directory / "config.yaml"))
    assert saved["train.global_batch_size"] == 4
    assert saved["optimizer.groups[0].param_regex"] == "embedding"
    config = read_settings(directory, ["train.micro_lanes=1", "eval.lanes=3"])
    assert (config.train.micro_batch_size, config.eval.batch_size) == (1, 3)


def test_recorded_settings_get_the_present_names() -> None:
    old = {
        "train.lanes": 4,
        "eval.lanes": "2",
        "optimizer.groups.0.match": "u",
        "memory.kind": "infinite",
        "memory.widths[1]": 0.25,
        "memory.density": "moments",
        "memory.over.kind": "mine",
        "memory.over.widths": "kept",
    }
    assert present_settings(old) == {
        "train.global_batch_size": 4,
        "eval.batch_size": "2",
        "optimizer.groups.0.param_regex": "u",
        "memory.kind": "infinite",
        "memory.basis_widths[1]": 0.25,
        "memory.density": "softmax_moments",
        "memory.over.kind": "mine",
        "memory.over.widths": "kept",
    }


def test_a_value_of_the_environment_is_compared_under_its_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    then = {"train.lanes": checksum("train.lanes", 16)}
    for value, changed in (("16", []), ("32", ["train.global_batch_size"])):
        monkeypatch.setenv("DIST_MEM_TEST_LANES", value)
        config = load("train.global_batch_size=${oc.env:DIST_MEM_TEST_LANES}")
        assert [change.key for change in changed_keys(config, config, then)] == changed
