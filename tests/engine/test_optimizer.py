"""Parameter groups by name, and the learning rate as a function of the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode

from dist_mem.config import ScheduleConfig
from dist_mem.engine.optimizer import build_optimizer, lr_factor, parameter_groups
from dist_mem.engine.zero_restore import _kinds
from dist_mem.model import MemoryLM
from tests.support.messages import refused
from tests.support.tiny import VOCAB, tiny_config


def schedule(**values: Any) -> Any:
    return OmegaConf.merge(OmegaConf.structured(ScheduleConfig), values)


def grouped(groups: list[dict[str, Any]]) -> tuple[MemoryLM, dict[str, tuple[float, float]]]:
    """A model and the (lr, weight decay) of every parameter that is trained."""
    config = tiny_config({"optimizer": {"lr": 1.0, "weight_decay": 0.1, "groups": groups}})
    model = MemoryLM(config, VOCAB)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in parameter_groups(model, config.optimizer)
        for parameter in group["params"]
    }
    return model, found


def test_only_matrices_decay() -> None:
    model, found = grouped([])
    assert found.keys() == dict(model.named_parameters()).keys()
    decaying = {name for name, (_, decay) in found.items() if decay}
    assert decaying == {
        name for name, parameter in model.named_parameters() if name.endswith(".weight") and parameter.dim() > 1
    }
    assert {decay for _, decay in found.values()} == {0.0, 0.1}


def test_first_matching_group_takes_the_parameter() -> None:
    _, found = grouped(
        [{"param_regex": r"^blocks\.0\.", "lr": 0.5}, {"param_regex": "blocks", "lr": 0.25, "weight_decay": 0.0}]
    )
    assert {lr for name, (lr, _) in found.items() if name.startswith("blocks.0.")} == {0.5}
    assert {value for name, value in found.items() if name.startswith("blocks.1.") and "weight" in name} == {
        (0.25, 0.0)
    }
    assert {lr for name, (lr, _) in found.items() if not name.startswith("blocks.")} == {1.0}


def test_frozen_group_is_left_out_and_needs_no_gradient() -> None:
    model, found = grouped([{"param_regex": "embedding", "trainable": False}])
    assert not any("embedding" in name for name in found)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen
    assert all("embedding" in name for name in frozen)


def test_pattern_without_a_parameter_is_refused_by_name() -> None:
    with refused(ValueError, "optimizer.groups", "param_regex"):
        grouped([{"param_regex": "attn"}])


def test_freezing_everything_is_refused() -> None:
    with refused(ValueError):
        grouped([{"param_regex": "", "trainable": False}])


@pytest.mark.parametrize(
    ("kind", "expected"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)]
)
def test_optimizer_is_of_the_kind_and_has_every_parameter_once(
    kind: str, expected: type[torch.optim.Optimizer]
) -> None:
    config = tiny_config({"optimizer": {"kind": kind}})
    model = MemoryLM(config, VOCAB)
    optimizer = build_optimizer(model, config.optimizer)
    assert type(optimizer) is expected
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))


@pytest.mark.parametrize(("fused", "device"), [(True, "cuda"), (False, "cpu")])
def test_restored_step_counts_are_where_the_optimizer_keeps_them(fused: bool, device: str) -> None:
    with FakeTensorMode():
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3, device="cuda"))], fused=fused)
        kinds = _kinds(optimizer, torch.device("cuda"))
    assert {kind: place.type for kind, place in kinds.items()} == {
        "step": device,
        "exp_avg": "cuda",
        "exp_avg_sq": "cuda",
    }


def test_warmup_rises_linearly_to_the_peak() -> None:
    config = schedule(kind="cosine", warmup_steps=4)
    assert [lr_factor(step, config, 100) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize(("kind", "middle"), [("linear", 0.55), ("cosine", 0.55), ("constant", 1.0)])
def test_descent_to_the_end_value(kind: str, middle: float) -> None:
    config = schedule(kind=kind, warmup_steps=10, end_factor=0.1)
    assert lr_factor(10, config, 110) == pytest.approx(1.0)
    assert lr_factor(60, config, 110) == pytest.approx(middle)
    assert lr_factor(110, config, 110) == pytest.approx(1.0 if kind == "constant" else 0.1)


def test_after_the_descent_the_rate_stays() -> None:
    config = schedule(kind="linear", decay_steps=10, end_factor=0.2)
    assert {lr_factor(step, config, 1000) for step in (10, 11, 999)} == {0.2}
