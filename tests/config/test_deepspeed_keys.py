"""The tables of dist_mem/deepspeed_keys.py against the DeepSpeed that is installed, and what they refuse.

DeepSpeed reads its top-level keys one by one, so a dict that notes every key it is asked for gives the true list.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from dist_mem.config import ConfigError, deepspeed_block, deepspeed_keys, load_config
from dist_mem.config.deepspeed_keys import HANDED_ON, OWNED, REFUSED, REMOVED, SCHEMA, UNSUPPORTED

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
    assert set(SCHEMA) == asked | {"sequence_parallel_size"}


@pytest.mark.parametrize("block", ["flops_profiler", "aio"])
def test_plain_blocks_have_the_keys_of_the_installed_version(block: str) -> None:
    asked = {key.partition(".")[2] for key in keys_deepspeed_asks_for() if key.startswith(f"{block}.")}
    assert set(SCHEMA[block]) == asked
    assert set(SCHEMA["aio"]) == set(AIO_DEFAULT_DICT)


def test_data_types_have_the_keys_of_the_installed_version() -> None:
    asked = {key for key in keys_deepspeed_asks_for() if key.startswith("data_types.")}
    assert asked == {f"data_types.{name}" for name in SCHEMA["data_types"]}


def pydantic_blocks() -> Iterator[tuple[str, type[DeepSpeedConfigModel]]]:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig

    yield "zero_optimization", DeepSpeedZeroConfig
    yield "bf16", DeepSpeedBF16Config
    yield "fp16", DeepSpeedFP16Config
    yield "comms_logger", CommsLoggerConfig
    yield "tensorboard", TensorBoardConfig
    yield "csv_monitor", CSVConfig
    yield "wandb", WandbConfig
    yield "comet", CometConfig


def inner_model(annotation: Any) -> type[DeepSpeedConfigModel] | None:
    parts = [part for part in (annotation, *get_args(annotation)) if inspect.isclass(part)]
    return next((part for part in parts if issubclass(part, DeepSpeedConfigModel)), None)


def check_model(model: type[DeepSpeedConfigModel], table: dict[str, Any], block: str) -> None:
    """Same keys, aliases included, same types, at any depth."""
    names = {name for field, info in model.model_fields.items() for name in (field, info.alias or field)}
    removed = {key.rpartition(".")[2] for key in REMOVED if key.rpartition(".")[0] == block}
    assert set(table) - removed == names, block
    hints = get_type_hints(model)
    for field, info in model.model_fields.items():
        kind = table[info.alias or field]
        if inner := inner_model(hints[field]):
            check_model(inner, kind, f"{block}.{field}")
        elif kind in (bool, int, float):
            assert kind in (hints[field], *get_args(hints[field])) or issubclass(hints[field], kind), f"{block}.{field}"


@pytest.mark.parametrize(("block", "model"), list(pydantic_blocks()))
def test_nested_blocks_are_those_of_the_installed_version(block: str, model: type[DeepSpeedConfigModel]) -> None:
    table: Any = SCHEMA
    for name in block.split("."):
        table = table[name]
    check_model(model, table, block)


def test_all_keys_that_deepspeed_has_removed_are_refused() -> None:
    top_level = set(deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    in_zero = {f"zero_optimization.{key}" for key in deepspeed_config._REMOVED_ZERO_CONFIG_KEYS}
    assert set(REMOVED) == top_level | in_zero


def test_every_key_has_one_fate() -> None:
    assert len(REFUSED) == len(OWNED) + len(UNSUPPORTED) + len(REMOVED)
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
        ("deepspeed.elasticity.enabled=false", "is refused: DeepSpeed 0.19 has removed it"),
        ("deepspeed.gradient_cliping=auto", "unknown key; did you mean deepspeed.gradient_clipping?"),
        ("deepspeed.zero_optimization=true", "is True, but must be a block with keys among stage"),
        ("deepspeed.zero_optimization.stage=4", "is 4, but must be 0, 1, 2 or 3"),
        ("deepspeed.zero_optimization.overlap_comm=1", "is 1, but must be true or false"),
        ("deepspeed.zero_optimization.stage=${oc.env:DIST_MEM_TEST_UNSET,7}", "must be"),
    ],
)
def test_wrong_deepspeed_key_or_value_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([STEPS, override])
    assert message in str(caught.value)


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
