"""The tables of dist_mem/config/deepspeed_keys.py against the DeepSpeed that is installed, and what they refuse.

DeepSpeed reads its top-level keys one by one, so a dict that notes every key it is asked for gives the true list.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from omegaconf import OmegaConf

from dist_mem.__main__ import main
from dist_mem.config import deepspeed_block, deepspeed_keys, load_config
from dist_mem.config.deepspeed_keys import HANDED_ON, REFUSED, SCHEMA
from dist_mem.engine import start
from tests.support.configs import nested
from tests.support.messages import said

STEPS = "train.steps=1"
PLAIN_BLOCKS = ("flops_profiler", "aio", "data_types")


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
    content: dict[str, Any] = {name: NotingDict({}, seen, f"{name}.") for name in PLAIN_BLOCKS}
    deepspeed_config.DeepSpeedConfig(NotingDict({**content, "train_batch_size": 1}, seen))
    return seen


def test_keys_are_those_of_the_installed_version() -> None:
    asked = keys_deepspeed_asks_for()
    # Asked for only with a model-parallel unit, a branch that is not taken here.
    known = {key for key in asked if "." not in key} | {"sequence_parallel_size"}
    assert set(SCHEMA) == known - deepspeed_config._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys()
    for block in PLAIN_BLOCKS:
        assert set(SCHEMA[block]) == {key.partition(".")[2] for key in asked if key.startswith(f"{block}.")}
    assert set(SCHEMA["aio"]) == set(AIO_DEFAULT_DICT)


def test_deepspeed_has_a_model_of_every_other_block() -> None:
    assert {name for name, kind in HANDED_ON.items() if kind is dict} == set(start._MODELS)
    assert all(model.model_config["extra"] == "forbid" for model in start._MODELS.values())


@pytest.mark.parametrize("key", REFUSED)
def test_refused_key_names_what_to_set_instead_and_auto_is_accepted(key: str) -> None:
    (problem,) = deepspeed_keys.check_block(nested(key, {"a": 1}), key="deepspeed", everywhere=())
    assert problem.key == f"deepspeed.{key}" and REFUSED[key] in problem.text
    assert not list(deepspeed_keys.check_block(nested(key, "auto"), key="deepspeed", everywhere=()))


@pytest.mark.parametrize(
    "override",
    [
        *("gradient_clipping=0.5", "bf16.enabled=true", "gradient_cliping=auto", "zero_optimization=true"),
        *(f"zero_optimization.stage={value}" for value in ("4", "two", "${oc.env:DIST_MEM_TEST_UNSET,7}")),
        *("zero_optimization.overlap_com=true", "zero_optimization.overlap_comm=maybe", "wandb.grupp=a"),
        *("zero_optimization.reduce_bucket_size=-1", "zero_optimization.offload_param.devise=cpu"),
        "zero_optimization.mics_shard_size=2",
    ],
)
def test_wrong_key_or_value_is_refused_before_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str
) -> None:
    """Those of nested blocks by DeepSpeed itself."""
    key, _, value = override.partition("=")
    tree = {"train": {"steps": 1}, **nested(f"deepspeed.{key}", yaml.safe_load(value))}
    OmegaConf.save(tree, tmp_path / "mine.yaml")
    for given in ([str(tmp_path / "mine.yaml")], [STEPS, f"deepspeed.{override}"]):
        assert main(["train", "--check", *given]) == 2
        place = "command line" if STEPS in given else str(tmp_path / "mine.yaml")
        said(capsys.readouterr().err, f"error: {place}: deepspeed.{key}")


def test_keys_that_divide_gradients_once_more_are_refused() -> None:
    """At stage 3 a factor equal to the number of ranks divides gradients by it and does not multiply them back."""
    assert {"gradient_predivide_factor", "prescale_gradients"} <= set(REFUSED)


def test_keys_of_an_optimizer_in_16_bits_are_refused() -> None:
    """The models of both blocks accept them."""
    keys = {f"bf16.{name}" for name in start._MODELS["bf16"].model_fields}
    keys |= {f"fp16.{name}" for name in start._MODELS["fp16"].model_fields}
    in_half = {key for key in keys if key.endswith(("_master_weights_and_grads", "_optimizer_states"))}
    assert len(in_half) == 3 and in_half <= set(REFUSED)


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
