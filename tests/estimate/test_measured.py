"""The range of a predicted update: it has every measured training, and says what was never measured."""

import importlib
import json
import re
from typing import Any

import pytest

from dist_mem.block import ModelSpec, model_spec
from dist_mem.config import TrainConfig, load_config
from dist_mem.estimate.job_estimate import JobEstimate, as_json, as_text
from dist_mem.estimate.likely_time import CARD, likely_seconds
from dist_mem.estimate.search import Cluster
from dist_mem.estimate.step_time import CheckpointCost, StepTime
from dist_mem.memory import memory_options
from dist_mem.runtime.devices import GPUS, device_named, gpu_of
from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "results" / "gpu"
RESULTS, COUNTED = (json.loads((FOLDER / f"{name}.json").read_text()) for name in ("gpu", "counted"))
MEASURED = {name: one for name, one in RESULTS["cases"].items() if name.startswith("speed ") and "step_seconds" in one}
PAGE = (ROOT / "docs" / "howto" / "estimate.md").read_text(encoding="utf-8")
SPEED = str(ROOT / "configs" / "speed" / "125m.yaml")
WRITTEN = "train.compile=false"  # as what was measured
BOUND = StepTime(0.5, {"fused_attention": 0.125}, 0.25, 0.125, 0.0, 0.0)


def bound_of(name: str) -> StepTime:
    """Return the bound of the program that was measured, as it was counted then."""
    floor = dict(COUNTED[name]["floor"])
    parts = {part: floor.pop(part) for part in ("products", "streams", "update")}
    return StepTime(**parts, fused=floor, communication=0.0, exposed=0.0)


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    blocks: dict[str, dict[str, Any]] = importlib.import_module("lib.speed").memories(1024)
    return {**blocks, "causal": {"kind": "causal"}}


def loaded(path: str, *keys: str) -> ModelSpec:
    return model_spec(load_config([path, *keys], memory_options=memory_options), 32_000)


def model_of(name: str, memories: dict[str, dict[str, Any]]) -> ModelSpec:
    _, size, memory = name.split(" ", 2)
    keys = [WRITTEN, f"memory={json.dumps(memories[memory])}", *(["model.kind=gpt2"] if memory == "causal" else [])]
    return loaded(str(ROOT / "configs" / "speed" / f"{size}.yaml"), *keys)


@pytest.mark.parametrize("name", MEASURED)
def test_the_range_has_the_measured_update(name: str, memories: dict[str, dict[str, Any]]) -> None:
    """The bound of XL was 277,197 tokens/s where 90,900 were measured. Those with FlexAttention count as such."""
    one, bound, spec = MEASURED[name], bound_of(name), model_of(name, memories)
    card = gpu_of(RESULTS["machine"]["card"])
    assert card is not None and card.name == CARD
    found = likely_seconds(spec, bound, card, world_size=1)
    assert found is not None
    assert bound.total < found.low < one["step_seconds"] < found.high
    assert "never measured" not in " ".join(found.origin)
    tokens = one["tokens_per_second"] * one["step_seconds"]
    speeds = [f"{tokens / seconds:,.0f}" for seconds in (found.high, found.low, bound.total)]
    shown = f"{one['tokens_per_second']:,.0f} | {speeds[0]} to {speeds[1]} | {speeds[2]}"
    assert f"| {name.removeprefix('speed ')} | {shown} |" in PAGE


OTHERWISE = {
    "memory={kind: titans, window: 64}": "titans",
    "memory={kind: linear, decay: fixed, delta: false}": "linear with decay fixed",
    "train.precision=fp32": "train.precision=fp32",
    "train.activation_checkpointing=blocks": "train.activation_checkpointing",
    "model.d_model=3072": "model.d_model=3072",
}


@pytest.mark.parametrize("key", OTHERWISE)
def test_what_was_never_measured_is_said_and_widens_the_range(key: str) -> None:
    narrow, wide = (
        likely_seconds(loaded(SPEED, WRITTEN, *more), BOUND, device_named(CARD), world_size=1) for more in ([], [key])
    )
    assert narrow is not None and wide is not None and wide.high / wide.low > narrow.high / narrow.low
    assert OTHERWISE[key] in next(line for line in wide.origin if line.startswith("never measured: "))


@pytest.mark.parametrize("device", [device for device in GPUS if device.name != CARD])
def test_other_cards_and_several_gpus_were_never_measured(device: Any) -> None:
    spec = loaded(SPEED, WRITTEN)
    one, other = (likely_seconds(spec, BOUND, device_named(CARD), world_size=ranks) for ranks in (1, 8))
    elsewhere = likely_seconds(spec, BOUND, device, world_size=1)
    assert one is not None and other is not None and elsewhere is not None
    assert one.low > max(other.low, elsewhere.low) and one.high < min(other.high, elsewhere.high)
    assert "8 GPUs" in " ".join(other.origin) and device.name in " ".join(elsewhere.origin)


def test_the_range_is_never_faster_than_the_bound() -> None:
    """Also of compiled blocks, and of many things that were never measured."""
    for keys in (
        [],
        ["train.compile=true"],
        [WRITTEN, "train.precision=fp32", "train.activation_checkpointing=blocks"],
    ):
        spec = loaded(SPEED, *keys)
        found = likely_seconds(spec, BOUND, device_named("a100-80gb"), world_size=8)
        assert found is not None and found.low == BOUND.total < found.high


def test_kernels_that_never_ran_lie_between_the_best_and_the_worst_that_did() -> None:
    spec = loaded(SPEED, WRITTEN)
    ends = {}
    for operator in ("fused_attention", "flex_attention", "distance_attention"):
        found = likely_seconds(spec, BOUND._replace(fused={operator: 1.0}), device_named(CARD), world_size=1)
        assert found is not None
        ends[operator] = (found.low, found.high)
        assert ("never measured: model.attention=triton" in " ".join(found.origin)) == (operator[0] == "d")
    assert ends["distance_attention"] == (ends["fused_attention"][0], ends["flex_attention"][1])


@pytest.mark.parametrize(
    ("gpu", "steps", "hours"),
    [
        ("h100-80gb", 7200, r"training +7,200 steps: 3.\d to 4.\d hours, without evaluations"),
        ("cpu", 7200, r"training +7,200 steps: at least 2 hours; never measured on CPUs"),
        ("h100-80gb", None, r"training +3 epochs; hours are known once the data are built"),
    ],
)
def test_a_plan_has_the_bound_the_range_and_the_hours_of_the_training(gpu: str, steps: int | None, hours: str) -> None:
    spec = loaded(SPEED, WRITTEN)
    device, cost = device_named(gpu), CheckpointCost(10, 1.0, 2.0)
    expected = likely_seconds(spec, BOUND, device, world_size=1)
    job = JobEstimate("one", Cluster(device, 1, 1), [], BOUND, expected, steps, 100_000, 0.3, cost, [])
    found, text = as_json(job), as_text(TrainConfig(epochs=3), job, shows_all=True)
    assert found["tokens_per_second_bound"] == 100_000
    assert re.search(r"^update +at least 1 s: ", text, re.MULTILINE)
    assert re.search(r"^speed +at most 100,000 tokens/s: a bound", text, re.MULTILINE)
    assert re.search(hours, " ".join(text.split()))
    if gpu == "cpu":
        assert found["tokens_per_second_likely"] is None is found["hours_likely"]
        return
    low, high = found["tokens_per_second_likely"]
    assert f"expected {float(f'{low:.1e}'):,.0f} to {float(f'{high:.1e}'):,.0f} tokens/s" in text
    assert high < found["tokens_per_second_bound"]
    if steps:
        assert found["hours_likely"] == pytest.approx([steps * 100_000 / each / 3600 for each in (high, low)])
