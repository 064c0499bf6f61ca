"""The results of gpu.sh as Markdown: checks, kernels, models and peers, each with its floor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lib.gpu_models import BASE

from dist_mem.runtime.devices import gpu_of

PUBLISHED = 59_961  # tokens/s of NVIDIA's base configuration on one A100 of 40 GB
ESTIMATE = (0.9, 1.1)  # of the memory that was measured
Results = dict[str, dict[str, Any]]


def tables(made: Results, about: dict[str, Any], counted: Results) -> str:
    """Return the results as Markdown.

    Args:
        made: by name of the case.
        about: the machine.
        counted: of the models whose speed is measured, by name: bytes, floor, operations of a token.
    """
    parts = [_checks(made), _kernels(made), _speeds(made, about, counted)]
    head = f"{about['card']}, {', '.join(f'{name} {text}' for name, text in about['versions'].items())}"
    return "\n\n".join([head, *("\n".join(lines) for part in parts if (lines := list(part)))]) + "\n"


def _checks(made: Results) -> Iterator[str]:
    checks = {name: one for name, one in made.items() if name.split()[0] not in ("kernel", "speed", "peer")}
    if not checks:
        return
    yield from ("| check | result | error | limit | s |", "|---|---|---|---|---|")
    for name, one in checks.items():
        pairs = [(one[key], one[f"{key}_limit"]) for key in ("float64", "float32", "bfloat16") if key in one]
        pairs = pairs or [(one[key], one["limit"]) for key in ("error",) if key in one]
        errors, limits = ("; ".join(f"{pair[side]:.1e}" for pair in pairs) for side in (0, 1))
        yield f"| {name} | {one['status']} | {errors} | {limits} | {one.get('seconds', '')} |"
    yield from ("", "Errors of memories: float64; float32; bfloat16. Of attention: float32; bfloat16.")


def _kernels(made: Results) -> Iterator[str]:
    kernels = {name.removeprefix("kernel "): one for name, one in made.items() if name.startswith("kernel ")}
    if not kernels:
        return
    yield from ("| kernel | forward ms | with backward ms | floor ms | times | |", "|---|---|---|---|---|---|")
    for name, one in kernels.items():
        if one["status"] != "done":
            yield f"| {name} | | | | | {one['status']} |"
            continue
        floor = one["floor_ms"]
        beside = f"{floor:.2f} | {one['both_ms'] / floor:.1f}" if floor else " | "
        yield f"| {name} | {one['forward_ms']:.2f} | {one['both_ms']:.2f} | {beside} | |"


def _speeds(made: Results, about: dict[str, Any], counted: Results) -> Iterator[str]:
    speeds = {name: one for name, one in made.items() if name.split()[0] in ("speed", "peer")}
    if not speeds:
        return
    yield "| model | tokens/s | MFU | ms per update | floor ms | times | GPU busy | peak GB | estimate/peak | |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    card = gpu_of(about["card"])
    for name, one in speeds.items():
        title = name.removeprefix("speed ")
        if one["status"] != "done":
            yield f"| {title}{' |' * 9} {one['status']} |"
            continue
        of_model = counted.get(name.removesuffix(" compiled"), {})
        cells = [f"{one['tokens_per_second']:,.0f}", _mfu(one, of_model, card), f"{1e3 * one['step_seconds']:,.1f}"]
        floor = 1e3 * sum(of_model.get("floor", {}).values())
        cells += [f"{floor:,.1f}", f"{1e3 * one['step_seconds'] / floor:.1f}"] if floor else ["", ""]
        cells.append(f"{one['busy_share']:.0%}" if one.get("busy_share") else "")
        cells += _memory(one, of_model)
        yield f"| {title} | {' | '.join(cells)} | {_notes(title, one)} |"


def _mfu(one: dict[str, Any], counted: dict[str, Any], card: Any) -> str:
    if "mfu" in one:
        return f"{one['mfu']:.1%}"
    if card is None or "flops_per_token" not in counted:
        return ""
    return f"{one['tokens_per_second'] * counted['flops_per_token'] / card.flops['bf16']:.1%}"


def _memory(one: dict[str, Any], counted: dict[str, Any]) -> list[str]:
    peak = one.get("peak_memory_gb")
    if not peak or "memory" not in counted or one.get("micro_lanes"):
        return [f"{peak:.2f}" if peak else "", ""]
    share = counted["memory"] / 1e9 / peak
    return [f"{peak:.2f}", f"{share:.2f}" if ESTIMATE[0] <= share <= ESTIMATE[1] else f"**{share:.2f}**"]


def _notes(title: str, one: dict[str, Any]) -> str:
    notes = [f"{one['micro_lanes']} lanes at once"] if one.get("micro_lanes") else []
    if one.get("compile_seconds"):
        notes.append(f"compiled in {one['compile_seconds']:.0f} s")
    if title.startswith(BASE):
        notes.append(f"{one['tokens_per_second'] / PUBLISHED:.2f} x NVIDIA's on one A100")
    return ", ".join(notes)
