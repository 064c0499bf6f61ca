"""Schemas of manifest.json and engine.json, checked by their readers so that later code can rely on the content."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from dist_mem.data.mixture import MIXTURE_PART
from dist_mem.runtime.file_schema import (
    Schema,
    integer,
    leaf,
    list_of,
    metric,
    number,
    optional,
    plain_path,
    record,
    sha256,
    table,
    text,
)

WEIGHTS = "model.safetensors"  # of an export
_COUNT = integer(high=2**53)
_FILES = table(record({"bytes": _COUNT, "sha256": sha256}, is_open=False), keys=plain_path)
_LANE_ID = leaf("a lane", lambda key: isinstance(key, str) and key.isdecimal() and len(key) <= 15)
_DIVERGENCE = {"skip": _COUNT, "rollback": _COUNT, "first_trained": _COUNT, "losses": list_of(metric)}
_ALL = {"format_version": integer(), "sha256": sha256, "step": integer(high=10**12), "files": _FILES}
_CHECKPOINT = {
    "world_size": integer(1, 10**6),
    "zero_stage": integer(0, 3),
    "versions": table(text),
    "mlflow_run_id": optional(text),
    "data_fingerprint": text,
    "tokenizer_fingerprint": text,
    "meter": table(metric),
}
_FURTHER = {
    "time": leaf("a time", lambda value: type(value) in (int, float) and 0 <= value < 2**34),
    "commit": optional(text),
    "environment": table(text),
    "machine": table(text),
    "divergence": record({}, _DIVERGENCE, is_open=True),
    "points": _COUNT,
    "goodput": record({"time": number, "seconds": table(number)}, is_open=True),
    "validation": optional(record({"step": _COUNT, "loss": metric, "measure": text}, is_open=False)),
    "stage_ends": list_of(_COUNT),
    "mixture": list_of(MIXTURE_PART),
}
_OF_CHECKPOINT = record(
    {**_ALL, **_CHECKPOINT, "lanes": table(list_of(leaf("a file, or its row", lambda value: True)))},
    _FURTHER,
    is_open=True,
)
_OF_EXPORT = record(
    {**_ALL, "tokenizer_fingerprint": text},
    {**_FURTHER, "versions": table(text), "data_fingerprint": text},
    is_open=True,
)


def manifest_problems(key: str, body: Any) -> Iterator[str]:
    """Yield the problems of a manifest.json."""
    is_export = isinstance(body, dict) and isinstance(body.get("files"), dict) and WEIGHTS in body["files"]
    yield from (_OF_EXPORT if is_export else _OF_CHECKPOINT)(key, body)
    if not is_export:
        yield from _lane_problems(body)


def _lane_problems(body: dict[str, Any]) -> Iterator[str]:
    """Check that every lane has a row in a file of the manifest, and that no two lanes share one."""
    taken: dict[tuple[str, int], str] = {}
    for lane, place in body["lanes"].items():
        where = f"lanes[{lane!a}]"
        yield from _LANE_ID("a key of lanes", lane)
        if [type(part) for part in place] != [str, int] or place[0] not in body["files"] or place[1] < 0:
            yield f"{where} is {ascii(place)[:80]}, but must be a file of this checkpoint and a row in it"
            continue
        if (other := taken.setdefault((place[0], place[1]), lane)) != lane:
            yield f"{where} and lanes[{other!a}] have the same row"


_ENGINE: Schema = record(
    {
        "counters": table(number),
        "shapes": table(list_of(_COUNT)),
        "aliases": table(list_of(text)),
        "slices": table(list_of(list_of(_COUNT, low=4, high=4))),
    },
    is_open=True,
)


def engine_problems(key: str, body: Any) -> Iterator[str]:
    """Yield the problems of an engine.json: the ranks' slices must cover every parameter exactly once."""
    yield from _ENGINE(key, body)
    if body["slices"].keys() != body["shapes"].keys():
        yield "slices and shapes have different names"
        return
    for name, shape in body["shapes"].items():
        end = 0
        for _, start, stop, length in body["slices"][name]:
            if start != end or stop <= start or length == 0:
                yield f"slices[{name!a}] have a gap, or overlap, at element {end}"
                return
            end = stop
        if end != prod(shape):
            yield f"slices[{name!a}] end at element {end} of {prod(shape)}"
