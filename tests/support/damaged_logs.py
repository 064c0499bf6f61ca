"""Logs of runs that are damaged at random, by a seed: bytes, lines, keys, values, and the file with the run's id."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dist_mem.tracking.log import METRICS_FILE
from dist_mem.tracking.mlflow.store import RUN_ID_FILE

_VALUES: list[Any] = [None, True, -1, 0, 2**63, 10**400, 1e308, float("nan"), float("-inf"), "", "a" * 10_000, "\0"]
_VALUES += [
    "\udcff",
    "../../x",
    "/etc/passwd",
    [],
    [[]],
    {},
    {"a": 1},
    "'; DROP TABLE runs; --",
    "${oc.env:HOME}",
    "%s%n",
]
_IDS = ["", "0" * 32, "../..", "a b", "\0", "é" * 40, "runs:/x", "a" * 300, "x' OR '1'='1", "none"]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value inside a value."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else [])
    return [place for key, child in pairs for place in ((value, key), *_places(child))]


def _bytes(data: bytes, rng: random.Random) -> bytes:
    """Change, remove or repeat some bytes."""
    begin = rng.randrange(len(data))
    end = min(len(data), begin + rng.choice([1, 1, 4, 200]))
    return data[:begin] + rng.choice([b"", rng.randbytes(end - begin), data[begin:end] * 2, b"\n", b"\0"]) + data[end:]


def _lines(data: bytes, rng: random.Random) -> bytes:
    """Remove, repeat, swap or add lines."""
    lines = data.splitlines(keepends=True)
    first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[first]
        case 1:
            lines.insert(second, lines[first])
        case 2:
            lines[first], lines[second] = lines[second], lines[first]
        case _:
            lines.insert(first, rng.choice([b"\n", b"{}\n", b"[]\n", b"null\n", b"[\n", b'{"kind": "x"}\n']))
    return b"".join(lines)


def _values(data: bytes, rng: random.Random) -> bytes:
    """Change or remove a value of a line, or give it a key more."""
    lines = data.splitlines()
    number = rng.randrange(len(lines))
    body = json.loads(lines[number])
    container, key = rng.choice(_places(body))
    match rng.randrange(4):
        case 0:
            del container[key]
        case 1 if isinstance(container, dict):
            container[rng.choice(["a", "", "\udcff", "\0", "a/b", "é" * 300, *container])] = rng.choice(_VALUES)
        case _:
            container[key] = rng.choice(_VALUES)
    lines[number] = json.dumps(body).encode()
    return b"\n".join(lines) + b"\n"


def damage(run_dir: Path, seed: int) -> str:
    """Damage a run directory by a seed, and say how."""
    rng = random.Random(seed)
    logs = [run_dir / METRICS_FILE] * 3 + sorted(run_dir.glob("mlflow/*.jsonl"))
    if rng.random() < 0.1:
        text = rng.choice(_IDS)
        (run_dir / RUN_ID_FILE).write_text(text, errors="surrogateescape")
        return f"{RUN_ID_FILE}: {text!r}"
    path = rng.choice(logs)
    change: Callable[[bytes, random.Random], bytes] = rng.choice([_bytes, _lines, _values, _values, _values])
    path.write_bytes(change(path.read_bytes(), rng))
    return f"{path.name}: {change.__name__}"
