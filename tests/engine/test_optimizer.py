"""Parameter groups by name, and the learning rate as a function of the step."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dist_mem.block import model_spec
from dist_mem.config import ScheduleConfig
from dist_mem.config.schema import DECAY_SHAPES
from dist_mem.engine.optimizer import build_optimizer, lr_factor, parameter_groups
from dist_mem.engine.zero_restore import _kinds
from dist_mem.model import MemoryLM
from tests.support.messages import refused
from tests.support.tiny import VOCAB, tiny_config


def grouped(groups: list[dict[str, Any]]) -> tuple[MemoryLM, dict[str, tuple[float, float]]]:
    """A model and the (lr, weight decay) of every parameter that is trained."""
    config = tiny_config({"optimizer": {"lr": 1.0, "weight_decay": 0.1, "groups": groups}})
    model = MemoryLM(model_spec(config, VOCAB))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        names[id(parameter)]: (group["lr"], group["weight_decay"])
        for group in parameter_groups(model, config.optimizer)
        for parameter in group["params"]
    }
    return model, found


def test_the_first_matching_group_takes_a_parameter_and_a_frozen_one_needs_no_gradient() -> None:
    first = {"param_regex": r"^blocks\.0\.", "lr": 0.5}
    second = {"param_regex": "blocks", "lr": 0.25, "weight_decay": 0.0}
    model, found = grouped([first, second, {"param_regex": "embedding", "trainable": False}])
    assert {lr for name, (lr, _) in found.items() if name.startswith("blocks.0.")} == {0.5}
    assert {found[name] for name in found if name.startswith("blocks.1.") and "weight" in name} == {(0.25, 0.0)}
    assert {lr for name, (lr, _) in found.items() if not name.startswith("blocks.")} == {1.0}
    names = {name for name, _ in model.named_parameters()}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen
    assert frozen == names - found.keys() == {name for name in names if "embedding" in name}


@pytest.mark.parametrize(
    ("group", "named"),
    [({"param_regex": "attn"}, "param_regex"), ({"param_regex": "", "trainable": False}, "trainable")],
    ids=["no parameter", "everything is frozen"],
)
def test_groups_that_leave_nothing_to_train_are_refused_by_name(group: dict[str, Any], named: str) -> None:
    with refused(ValueError, "optimizer.groups", named):
        grouped([group])


@pytest.mark.parametrize(
    ("kind", "expected"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)]
)
def test_optimizer_is_of_the_kind_and_has_every_parameter_once(
    kind: str, expected: type[torch.optim.Optimizer]
) -> None:
    config = tiny_config({"optimizer": {"kind": kind}})
    model = MemoryLM(model_spec(config, VOCAB))
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


@pytest.mark.parametrize(
    ("kind", "decay_steps", "expected"),
    [
        ("linear", None, [0.1, 1.0, 0.55, 0.1]),
        ("cosine", None, [0.1, 1.0, 0.55, 0.1]),
        ("constant", None, [0.1, 1.0, 1.0, 1.0]),
        ("linear", 25, [0.1, 1.0, 0.1, 0.1]),  # after the descent the rate stays
        ("wsd", 25, [0.1, 1.0, 1.0, 0.1]),
        ("wsd", 100, [0.1, 1.0, 0.1 + 0.9 * (1 - 0.5**0.5), 0.1]),
    ],
)
def test_the_rate_rises_and_descends_to_the_end_value(
    kind: str, decay_steps: int | None, expected: list[float]
) -> None:
    """Every step of a warm-up and half a cosine: tests/training/test_reference.py."""
    given: dict[str, Any] = {"kind": kind, "warmup_steps": 10, "end_factor": 0.1, "decay_steps": decay_steps}
    config = ScheduleConfig(**given)
    assert [lr_factor(step, config, 110) for step in (0, 10, 60, 110)] == pytest.approx(expected)


@pytest.mark.parametrize("shape", DECAY_SHAPES)
def test_a_held_rate_decays_in_the_last_steps_wherever_the_end_is_put(shape: str) -> None:
    """So a decay can be added to a run that holds, put off, and branched from one checkpoint."""
    held = ScheduleConfig(kind="wsd", warmup_steps=5, decay_share=0.0)
    decayed = replace(held, decay_share=0.25, decay_shape=shape)
    for total in (80, 200):
        before, after = ([lr_factor(step, config, total) for step in range(total)] for config in (held, decayed))
        first = total * 3 // 4
        assert before[: first + 1] == after[: first + 1] and set(before[5:]) == {1.0}
        assert all(later < earlier for earlier, later in pairwise(after[first:])) and after[-1] < 0.06
    usual = replace(held, decay_share=None)
    assert [lr_factor(step, usual, 100) for step in (80, 85)] == pytest.approx([1.0, 0.5])
