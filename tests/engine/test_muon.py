"""Muon against torch's update and beside a plain loop, under every ZeRO stage (tests/golden/muon; README.md there)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dist_mem.block import model_spec
from dist_mem.config import OptimizerConfig, load_config
from dist_mem.config.schema import MuonConfig
from dist_mem.data.batch import IGNORE
from dist_mem.engine.muon import (
    ADAMW,
    MOMENTUM,
    MUON,
    HeldRange,
    MuonAdamW,
    MuonMatrix,
    orthogonal_bytes,
    orthogonal_flops,
    orthogonalize,
    shape_factor,
)
from dist_mem.engine.optimizer import build_optimizer, describe_rules, lr_factor, parameter_groups
from dist_mem.estimate.zero import job_of, shares, sizes_of
from dist_mem.memory import memory_options
from dist_mem.memory.base import detach_state
from dist_mem.model import MemoryLM, reset_lanes
from dist_mem.runtime.distributed import World
from tests.support.allocated import Allocated
from tests.support.contract_cases import case_params, small_model
from tests.support.engine_saves import restore_and_train, save_and_train
from tests.support.jobs import difference
from tests.support.messages import refused
from tests.support.paths import GOLDEN, ROOT
from tests.support.ranks import Pools
from tests.support.tiny import VOCAB, full_parameters, ragged_segments, run_steps, tiny_config, tiny_job

OURS = {"torch_original": "original", "torch_match_rms_adamw": "match_rms_adamw"}
OPTIMIZER: dict[str, Any] = {"kind": "muon", "lr": 2e-3, "weight_decay": 0.1, "muon": {"lr": 0.01}}


def golden() -> list[Any]:
    return [pytest.param(path, id=path.stem) for path in sorted((GOLDEN / "muon").glob("*.npz"))]


def read_vectors(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def settings_of(vectors: dict[str, Any], variant: str) -> tuple[dict[str, Any], MuonConfig]:
    """Rate and decay of a variant, and the rest as our configuration."""
    given = json.loads(str(vectors[f"{variant}/config_json"]))
    scale = OURS.get(variant, "original")
    return given, MuonConfig(momentum=given["momentum"], eps=given["eps"], steps=given["ns_steps"], scale=scale)


def updates_in_float64(vectors: dict[str, Any], variant: str) -> Iterator[Tensor]:
    """Yield the parameter after each of our updates."""
    given, settings = settings_of(vectors, variant)
    parameter = torch.from_numpy(vectors["start"]).clone()
    factor = shape_factor(parameter.shape[0], parameter.shape[1], settings.scale)
    momentum = torch.zeros_like(parameter)
    for gradient in map(torch.from_numpy, vectors["grads"]):
        momentum.lerp_(gradient, 1 - settings.momentum)
        moved = orthogonalize(gradient.lerp(momentum, settings.momentum), steps=settings.steps, eps=settings.eps)
        parameter.mul_(1 - given["lr"] * given["weight_decay"])
        parameter.sub_(moved, alpha=given["lr"] * factor)
        yield parameter.clone()


@pytest.mark.parametrize("variant", ["keller", "keller_decay"])
@pytest.mark.parametrize("path", golden())
def test_six_steps_are_those_of_the_published_code_where_its_eps_does_not_matter(path: Path, variant: str) -> None:
    """It adds eps to the norm, of which ours is the least; the two differ where norms are as small as eps."""
    vectors = read_vectors(path)
    pairs = zip(updates_in_float64(vectors, variant), vectors[f"{variant}/params_f64"], strict=True)
    far = max(float((found - torch.from_numpy(expected)).abs().max()) for found, expected in pairs)
    assert far > 1e-3 if path.stem == "6x6_tiny_gradients" else far < 1e-7, far


@pytest.mark.parametrize("variant", OURS)
@pytest.mark.parametrize("path", golden())
def test_six_steps_are_those_of_torch(path: Path, variant: str) -> None:
    """In float64, in float32, and with Newton-Schulz in bfloat16 as far as its rounding goes."""
    vectors = read_vectors(path)
    for parameter, expected in zip(updates_in_float64(vectors, variant), vectors[f"{variant}/params_f64"], strict=True):
        torch.testing.assert_close(parameter, torch.from_numpy(expected), rtol=0, atol=1e-10)
    given, settings = settings_of(vectors, variant)
    start = torch.from_numpy(vectors["start"])
    factor = shape_factor(start.shape[0], start.shape[1], settings.scale)
    rounding = 0.25 * given["lr"] * factor
    for precision, expected, tolerance in (("fp32", "params_f32", 1e-5), ("bf16", "params_torch_f32_bf16", rounding)):
        weight = nn.Parameter(start.float())
        groups = [{"params": [weight], "lr": given["lr"], "weight_decay": given["weight_decay"], "rule": MUON}]
        optimizer = MuonAdamW(groups, MuonConfig(**{**vars(settings), "precision": precision}))
        whole = MuonMatrix((start.shape[0], start.shape[1]), HeldRange(0, weight.numel(), 0))
        optimizer.bind({weight: [whole]}, weight.device, is_replicated=True)
        for gradient in vectors["grads"]:
            weight.grad = torch.from_numpy(gradient).float()
            optimizer.step()
        found = torch.from_numpy(vectors[f"{variant}/{expected}"])
        torch.testing.assert_close(weight.detach(), found[-1].float(), rtol=0, atol=tolerance)


def test_hooks_of_a_step_run_once() -> None:
    """From the first AdamW of a process on, torch's own step calls hooks too."""
    weight = nn.Parameter(torch.ones(2))
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    optimizer = MuonAdamW([{"params": [weight], "rule": ADAMW}], MuonConfig(), lr=0.1)
    calls = list[str]()
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    weight.grad = torch.ones(2)
    optimizer.step()
    assert calls == ["before", "after"]
    assert weight[0] < 1


def rules_of(model: MemoryLM, config: OptimizerConfig) -> dict[str, str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[each]: group["rule"] for group in parameter_groups(model, config) for each in group["params"]}


@pytest.mark.parametrize("case", case_params())
def test_muon_takes_the_linear_maps_of_the_blocks_and_nothing_else(case: str) -> None:
    model = small_model(case)
    config = tiny_config({"optimizer": OPTIMIZER}).optimizer
    rules = rules_of(model, config)
    assert rules.keys() == dict(model.named_parameters()).keys()
    maps = {f"{name}.weight" for name, module in model.blocks.named_modules() if isinstance(module, nn.Linear)}
    assert maps == {name.removeprefix("blocks.") for name, rule in rules.items() if rule == MUON}
    assert {rule for name, rule in rules.items() if not name.startswith("blocks.")} == {ADAMW}


def test_a_group_chooses_the_rule_and_muon_takes_no_vector() -> None:
    model = small_model("transformer_xl")
    for pattern, rule in (("feed_forward", "adamw"), (r"embedding.*weight", "muon")):
        groups = [{"param_regex": pattern, "rule": rule}]
        config = tiny_config({"optimizer": {**OPTIMIZER, "groups": groups}}).optimizer
        taken = {rule for name, rule in rules_of(model, config).items() if pattern.partition(".")[0] in name}
        assert taken == {rule}
    groups = [{"param_regex": "bias", "rule": "muon"}]
    with refused(ValueError, "optimizer.groups[0].rule is muon", "the shape"):
        build_optimizer(model, tiny_config({"optimizer": {**OPTIMIZER, "groups": groups}}).optimizer)


def plain_updates(config: Any, num_steps: int) -> dict[str, Tensor]:
    """Return the parameters of a plain loop: one process, one loss, AdamW of torch, matrices one after the other."""
    torch.manual_seed(config.train.seed)
    model = MemoryLM(model_spec(config, VOCAB))
    groups = parameter_groups(model, config.optimizer)
    of_muon = [(each, group) for group in groups if group["rule"] == MUON for each in group["params"]]
    momenta = {each: torch.zeros_like(each) for each, _ in of_muon}
    others = torch.optim.AdamW([group for group in groups if group["rule"] == ADAMW], lr=config.optimizer.lr)
    peaks = [group["lr"] for group in others.param_groups]
    state = fresh = model.init_state(torch.arange(config.train.global_batch_size), "cpu", torch.float32)
    for step in range(num_steps):
        nll, num_scored = torch.zeros(()), 0
        for batch in ragged_segments(config, step=step):
            state = reset_lanes(detach_state(state), fresh, batch.is_new_document)
            output = model(batch.tokens, batch.targets, batch.valid_len, state=state)
            state, nll = output.state, nll + output.nll.sum()
            num_scored += int((batch.targets != IGNORE).sum())
        model.zero_grad()
        (nll / num_scored).backward()
        state = detach_state(state)
        factor = lr_factor(step, config.schedule, 100)
        for group, peak in zip(others.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        others.step()
        with torch.no_grad():
            for each, group in of_muon:
                momenta[each].mul_(0.95).add_(each.grad, alpha=0.05)
                update = 0.05 * each.grad + 0.95 * momenta[each]
                wide = update.T if update.shape[0] > update.shape[1] else update
                x = wide / wide.norm()
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                moved = x.T if update.shape[0] > update.shape[1] else x
                lr = group["lr"] * factor
                each.mul_(1 - lr * group["weight_decay"]).sub_(moved, alpha=lr * 0.2 * max(each.shape) ** 0.5)
    return {name: value.detach() for name, value in model.named_parameters()}


def updated(world: World, stage: int, num_steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    config = tiny_config({"optimizer": OPTIMIZER, "train": {"max_grad_norm": None}})
    job = tiny_job(config, world, stage=stage)
    run_steps(job, first=0, last=num_steps)
    return full_parameters(job), plain_updates(config, num_steps)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fifty_steps_are_those_of_a_plain_loop(rank_pool: Pools, stage: int) -> None:
    """The gradients of the maps of positions are a thousandth of the others', and are divided by their norm."""
    for found, expected in rank_pool(2).run(updated, stage, 50):
        for name, value in found.items():
            tolerance = 1e-5 if ".position." in name else 1e-6
            torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance, msg=name)


def count_update(num_ranks: int, shapes: list[tuple[int, int]], *, stage: int, precision: str) -> tuple[int, int]:
    """Return the most bytes of an update beside flat tensors, and how many matrices it orthogonalises, on rank 1."""
    numels = [rows * columns for rows, columns in shapes]
    if stage == 0:  # every matrix is a flat tensor of its own
        held = {number: [(number, 0, numel)] for number, numel in enumerate(numels)}
    else:  # one of all matrices, of which the rank has the first half of the first one
        held = {0: [(number, 0, numel // 2 if number == 0 else 0) for number, numel in enumerate(numels)]}
    flats = [torch.zeros(sum(stop for *_, stop in each), device="meta") for each in held.values()]
    optimizer = MuonAdamW(
        [{"params": flats, "lr": 0.1, "weight_decay": 0.1, "rule": MUON}], MuonConfig(precision=precision)
    )
    matrices = {
        flat: [MuonMatrix(shapes[number], HeldRange(0, stop, 0) if stop else None) for number, _, stop in each]
        for flat, each in zip(flats, held.values(), strict=True)
    }
    optimizer.bind(matrices, torch.device("meta"), is_replicated=stage == 0)
    given = Allocated()
    for flat in flats:
        flat.grad, optimizer.state[flat][MOMENTUM] = torch.zeros_like(flat), torch.zeros_like(flat)
        for tensor in (flat, flat.grad, optimizer.state[flat][MOMENTUM]):
            given.live.add(tensor.untyped_storage())
    before, computed = given.live.now, list[tuple[int, ...]]()

    def orthogonalize_one(update: Tensor, **settings: Any) -> Tensor:
        computed.append(update.shape)
        return orthogonalize(update, **settings)

    with pytest.MonkeyPatch.context() as patched:
        for name, value in (("is_initialized", True), ("get_world_size", num_ranks), ("get_rank", 1)):
            patched.setattr(dist, name, lambda value=value: value)
        for name in ("reduce", "broadcast"):
            patched.setattr(dist, name, lambda *args, **kwargs: None)
        patched.setattr("dist_mem.engine.muon.orthogonalize", orthogonalize_one)
        with given:
            optimizer.step()
    return given.live.peak - before, len(computed)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1])
def test_what_a_rank_holds_and_computes_does_not_grow_with_the_ranks(stage: int, precision: str) -> None:
    shapes = [(64, 256), (256, 64), (64, 64)] * 64
    for num_ranks in (2, 64):
        peak, number = count_update(num_ranks, shapes, stage=stage, precision=precision)
        assert number == len(shapes) // num_ranks
        assert 0.7 * orthogonal_bytes(shapes, precision) <= peak <= orthogonal_bytes(shapes, precision)


def test_the_estimate_counts_what_muon_holds_and_not_by_the_ranks() -> None:
    """A rank's part of the largest group's gradients, and a few matrices: of 6.7 billion parameters, within a GiB."""
    files = [str(ROOT / "configs/sizes/6.7b.yaml"), "optimizer.kind=muon", "train.precision=bf16"]
    config = load_config(files, memory_options=memory_options)
    for num_ranks in (2, 64):
        job = job_of(config, 32_000, world_size=num_ranks, on_gpu=True)
        sizes = sizes_of(job.spec, torch.bfloat16, job.optimizer)
        part, of_muon = -(-sizes.largest_group // num_ranks), orthogonal_bytes(sizes.matrices, "fp32")
        copy = 2 * part  # of the new weights in 16 bits, when the matrices are freed
        assert shares(job, sizes).update == 4 * part + max(copy, of_muon)
    assert copy < of_muon < 2**30


@pytest.mark.parametrize(
    ("origin", "target"), [((2, 3), (1, 0)), ((2, 1), (3, 3)), ((1, 0), (2, 2)), ((3, 2), (2, 1)), ((2, 0), (2, 3))]
)
def test_momenta_move_to_other_ranks_and_stages_exactly(
    tmp_path: Path, rank_pool: Pools, origin: tuple[int, int], target: tuple[int, int]
) -> None:
    plain = [{"optimizer": {**OPTIMIZER, "groups": []}}]
    values, losses = rank_pool(origin[0]).run(save_and_train, tmp_path, origin[1], plain)[0]
    ((found, others),) = rank_pool(target[0]).run(restore_and_train, [tmp_path], target[1], plain)[0]
    kinds = {name.partition("/")[0] for name in values}
    assert kinds == {"master", MOMENTUM, "exp_avg", "exp_avg_sq", "step"}
    assert difference(dict(sorted(values.items())), dict(sorted(found.items()))) is None
    assert others == pytest.approx(losses, abs=1e-5)
    config = tiny_config({"model": {"d_inner": 37}, "optimizer": OPTIMIZER})
    counted = sizes_of(model_spec(config, VOCAB), torch.float32, config.optimizer).moments
    moments = (MOMENTUM, "exp_avg", "exp_avg_sq")
    assert counted == sum(value.numel() for name, value in values.items() if name.partition("/")[0] in moments)


def test_the_page_shows_what_the_start_of_the_demo_says() -> None:
    """With the vocabulary of the sample library."""
    config = load_config([str(ROOT / "configs/demo.yaml"), "optimizer.kind=muon"], memory_options=memory_options)
    (message,) = describe_rules(build_optimizer(MemoryLM(model_spec(config, 1_280)), config.optimizer))
    assert f"`{message}` (configs/demo.yaml)" in (ROOT / "docs/howto/muon.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_the_operations_of_an_update_are_counted(shape: tuple[int, int]) -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(shape), steps=5, eps=1e-7)
    assert orthogonal_flops([shape], 5) == counter.get_total_flops()
