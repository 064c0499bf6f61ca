"""The tables of dist_mem/deepspeed_keys.py against the DeepSpeed that is installed, and what they refuse.

DeepSpeed reads its top-level keys one by one, so a dict that notes every key it is asked for gives the true list.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from omegaconf import OmegaConf

from dist_mem.__main__ import main
from dist_mem.config import ConfigError, deepspeed_block, deepspeed_keys, load_config
from dist_mem.config.deepspeed_keys import HANDED_ON, OWNED, REFUSED, SCHEMA, UNSUPPORTED
from dist_mem.engine import start

STEPS = "train.steps=1"


class NotingDict(dict[str, Any]):
    """Notes the dotted name of every key that is asked for."""

    def __init__(self, content: dict[str, Any], seen: set[str], block: str = "") -> None:
        super().__init__(content)
        self.seen, self.block = seen, block

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(f"{self.block}{key}")
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(f"{self.block}{key}")
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.seen.add(f"{self.block}{key}")
        return super().__contains__(key)

    def keys(self) -> Any:
        return self  # `key in block.keys()` is noted too

    def __copy__(self) -> NotingDict:
        return self


def keys_deepspeed_asks_for() -> set[str]:
    seen: set[str] = set()
    blocks = ("flops_profiler", "aio", "data_types")
    content: dict[str, Any] = {name: NotingDict({}, seen, f"{name}.") for name in blocks}
    deepspeed_config.DeepSpeedConfig(NotingDict({**content, "train_batch_size": 1}, seen))
    return seen


def test_top_level_keys_are_those_of_the_installed_version() -> None:
    asked = {key for key in keys_deepspeed_asks_for() if "." not in key}
    # Asked for only with a model-parallel unit, a branch that is not taken here.
    known = asked | {"sequence_parallel_size"}
    assert set(SCHEMA) == known - deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys()


@pytest.mark.parametrize("block", ["flops_profiler", "aio"])
def test_plain_blocks_have_the_keys_of_the_installed_version(block: str) -> None:
    asked = {key.partition(".")[2] for key in keys_deepspeed_asks_for() if key.startswith(f"{block}.")}
    assert set(SCHEMA[block]) == asked
    assert set(SCHEMA["aio"]) == set(AIO_DEFAULT_DICT)


def test_data_types_have_the_keys_of_the_installed_version() -> None:
    asked = {key for key in keys_deepspeed_asks_for() if key.startswith("data_types.")}
    assert asked == {f"data_types.{name}" for name in SCHEMA["data_types"]}


def test_deepspeed_has_a_model_of_every_other_block() -> None:
    assert {name for name, kind in HANDED_ON.items() if kind is dict} == set(start._MODELS)
    assert all(model.model_config["extra"] == "forbid" for model in start._MODELS.values())


def test_every_key_has_one_fate() -> None:
    assert len(REFUSED) == len(OWNED) + len(UNSUPPORTED)
    assert not set(REFUSED) & set(HANDED_ON)


def tree_of(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize("key", REFUSED)
def test_refused_key_names_what_to_set_instead_and_auto_is_accepted(key: str) -> None:
    problems = list(deepspeed_keys.check_block(tree_of(key, {"a": 1}), key="deepspeed", everywhere=()))
    assert [problem.key for problem in problems] == [f"deepspeed.{key}"]
    assert REFUSED[key] in problems[0].text
    assert not list(deepspeed_keys.check_block(tree_of(key, "auto"), key="deepspeed", everywhere=()))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("deepspeed.gradient_clipping=0.5", "is set by dist_mem: set train.max_grad_norm"),
        ("deepspeed.bf16.enabled=true", "is set by dist_mem: set train.precision"),
        ("deepspeed.elasticity.enabled=false", "deepspeed.elasticity: unknown key"),
        ("deepspeed.gradient_cliping=auto", "unknown key; did you mean deepspeed.gradient_clipping?"),
        ("deepspeed.zero_optimization=true", "is True, but must be a block"),
        ("deepspeed.zero_optimization.stage=4", "is 4, but must be 0, 1, 2 or 3"),
        ("deepspeed.zero_optimization.stage=two", "is 'two', but must be 0, 1, 2 or 3"),
        ("deepspeed.zero_optimization.stage=${oc.env:DIST_MEM_TEST_UNSET,7}", "must be"),
    ],
)
def test_wrong_deepspeed_key_or_value_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([STEPS, override])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("zero_optimization.overlap_com=true", "unknown key; did you mean deepspeed.zero_optimization.overlap_comm?"),
        ("zero_optimization.overlap_comm=maybe", "is 'maybe', but DeepSpeed says: Input should be a valid boolean"),
        ("zero_optimization.reduce_bucket_size=-1", "is -1, but DeepSpeed says: Input should be greater than 0"),
        ("zero_optimization.offload_param.devise=cpu", "unknown key; leave it out"),
        ("zero_optimization.mics_shard_size=2", "unknown key"),
        ("wandb.grupp=a", "unknown key; did you mean deepspeed.wandb.group?"),
    ],
)
@pytest.mark.parametrize("where", ["file", "command line"])
def test_deepspeed_itself_checks_its_nested_blocks_before_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, override: str, message: str
) -> None:
    key, _, value = override.partition("=")
    tree = {"train": {"steps": 1}, **tree_of(f"deepspeed.{key}", OmegaConf.create(f"a: {value}").a)}
    OmegaConf.save(tree, tmp_path / "mine.yaml")
    given = [str(tmp_path / "mine.yaml")] if where == "file" else [STEPS, f"deepspeed.{override}"]
    assert main(["train", "--check", *given]) == 2
    place = tmp_path / "mine.yaml" if where == "file" else where
    assert f"{place}: deepspeed.{key}: {message}" in capsys.readouterr().err


def test_handed_on_block_is_accepted_by_deepspeed() -> None:
    config = load_config(
        [
            STEPS,
            "deepspeed.zero_optimization={stage: 3, stage3_prefetch_bucket_size: 1e5, offload_param: {device: cpu}}",
            "deepspeed.fp16={initial_scale_power: 8, enabled: auto}",
            "deepspeed.optimizer=auto",
        ]
    )
    block = deepspeed_block(config)
    assert set(block) == {"zero_optimization", "fp16"}
    parsed = deepspeed_config.DeepSpeedConfig({**block, "train_batch_size": 1})
    assert parsed.zero_config.prefetch_bucket_size == 100_000
