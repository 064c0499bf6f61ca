"""The range of the time of an update: the bound of step_time.py, times what measured trainings took of theirs.

Every factor is a time that was measured on one H100 (docs/results/gpu/gpu.json), divided by the bound of the program
that was measured (gpu/counted.json); tests/estimate compares all of them with these files. What was never measured
makes the range wider, and is named. Only GPUs have a range: no CPU was compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dist_mem.block import ModelSpec
from dist_mem.config import TrainConfig
from dist_mem.config.memory_blocks import memories_of
from dist_mem.estimate.step_time import StepTime
from dist_mem.runtime.devices import Device

CARD, DAY = "h100-80gb", "2026-11-26"  # all measurements are of one, and of the programs of that day
_WIDTH = 768  # D of the models of which every memory was measured


class MeasuredFactor(NamedTuple):
    """What an update took beside fused attention, relative to its bound; D 768, 16 lanes of T = M = 1,024, bf16."""

    factor: float
    options: dict[str, Any]  # those of the measured memory that choose between programs


BESIDE = {
    "causal": MeasuredFactor(1.9, {"kernel": None}),
    "none": MeasuredFactor(2.0, {"kernel": None}),
    "transformer_xl": MeasuredFactor(1.9, {"kernel": None}),  # relative and rotary positions
    "lamemo": MeasuredFactor(1.9, {"kernel": None}),
    "infinite": MeasuredFactor(1.4, {"over": {"kind": "none"}, "density": "affine", "sampling": "linear"}),
    "memorizing": MeasuredFactor(2.6, {"over": None, "search": "exact", "kernel": None}),
    "linear": MeasuredFactor(3.4, {"over": None, "decay": "scalar", "delta": True}),  # Gated DeltaNet
}
# Of Transformer-XL at D 512 (NVIDIA's base configuration, with small products) and 2,048, relative to D 768.
NARROW, WIDE = (512, 1.85), (2048, 0.96)
# Fused kernels by `Work.operator`: least and largest factor. FlexAttention is gone: our kernels replaced it.
FUSED = {"fused_attention": (1.6, 2.8), "flex_attention": (4.2, 6.9)}
BEST, WORST = min(least for least, _ in FUSED.values()), max(most for _, most in FUSED.values())
REPEATED = 1.1  # each model was measured once; a second training, of rotary positions, differed by 2 %
ELSEWHERE = 1.3  # an assumption: how far each thing that was never measured moves both ends

_KEYS = {"distance_attention": "model.attention=triton"}  # operator -> the key that chooses it


class LikelySeconds(NamedTuple):
    """The seconds of an update, and why."""

    low: float
    high: float
    origin: list[str]  # sentences


def likely_seconds(spec: ModelSpec, time: StepTime, device: Device, *, world_size: int) -> LikelySeconds | None:
    """Return the range for an update whose bound is `time`; None on a CPU."""
    if device.name == "cpu":
        return None
    low, high = _factor_range(spec)
    least = time.products + time.streams + time.update
    ends = [low * least + time.exposed, high * least + time.communication]
    for operator, seconds in time.fused.items():
        factors = FUSED.get(operator, (BEST, WORST))
        ends = [end + factor * seconds for end, factor in zip(ends, factors, strict=True)]
    missing = list(_never_measured(spec, device, world_size))
    wider = REPEATED * ELSEWHERE ** len(missing)
    return LikelySeconds(max(time.total, ends[0] / wider), ends[1] * wider, list(_origin(spec, time, missing)))


def _origin(spec: ModelSpec, time: StepTime, missing: list[str]) -> Iterator[str]:
    low, high = _factor_range(spec)
    factors = f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"
    yield f"measured on one {CARD}, {DAY}: {factors} times the bound beside fused attention"
    for operator in time.fused.keys() - FUSED.keys():
        ends = f"{BEST} times its bound, as torch's kernels, to {WORST} times, as FlexAttention"
        yield f"never measured: {_KEYS.get(operator, operator)}, which may take {ends}"
    if unknown := [kind for kind in _kinds(spec.memory) if kind not in BESIDE]:
        yield f"never measured: memory {', '.join(unknown)}; the range is that of {', '.join(BESIDE)}"
    if missing:
        yield f"never measured: {', '.join(missing)}; each makes both ends {ELSEWHERE} times wider, an assumption"
    if _is_compiled(spec.train):
        gained = "1 to 3 % in GPT-2 and Transformer-XL, 2.1 times in Gated DeltaNet"
        yield f"compiled blocks fuse what is counted apart: they gained {gained}; the fast end is the bound"


def _is_compiled(train: TrainConfig) -> bool:
    return train.compile is not False  # null: on GPUs


def _kinds(memory: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(each["kind"] for each in memories_of(memory).values()))


def _factor_range(spec: ModelSpec) -> tuple[float, float]:
    """Return the least and the largest factor of all beside fused attention."""
    kinds = _kinds(spec.memory)
    factors = [BESIDE[kind].factor for kind in (kinds if BESIDE.keys() >= set(kinds) else BESIDE)]
    width = spec.model.d_model
    of_width = NARROW[1] if width < _WIDTH else WIDE[1] if width > _WIDTH else 1.0
    low = 1.0 if _is_compiled(spec.train) else min(factors) * min(of_width, 1.0)
    return low, max(factors) * max(of_width, 1.0)


def _never_measured(spec: ModelSpec, device: Device, world_size: int) -> Iterator[str]:
    """Yield what differs from all measured trainings, beside kinds of memories and kernels."""
    train, width = spec.train, spec.model.d_model
    if device.name != CARD:
        yield f"a {device.name}"
    if world_size > 1:
        yield f"{world_size} GPUs"
    if train.precision != "bf16":
        yield f"train.precision={train.precision}"
    if train.activation_checkpointing != "none":
        yield f"train.activation_checkpointing={train.activation_checkpointing}"
    if not NARROW[0] <= width <= WIDE[0]:
        yield f"model.d_model={width}"
    for memory in memories_of(spec.memory).values():
        kind = memory["kind"]
        for key, value in BESIDE[kind].options.items() if kind in BESIDE else ():
            if key == "over":
                given, value = ((over or {}).get("kind") for over in (memory.get(key), value))
            else:
                given = memory.get(key, value)
            if given != value:
                yield f"memory {kind} with {key} {given}"
