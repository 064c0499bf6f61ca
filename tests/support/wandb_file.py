"""Reads the file of a W&B run, whose client has no reader of its own in Python: LevelDB's log of its messages."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

_BLOCK = 32768  # bytes
_FULL, _LAST = 1, 4  # kinds of chunks that end a message


def messages(path: Path) -> Iterator[Any]:
    """Yield the messages of `run-ID.wandb`, in order."""
    data, position, whole = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while position + 7 <= len(data):
        if _BLOCK - position % _BLOCK < 7:  # no chunk begins there
            position += _BLOCK - position % _BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0 or position + 7 + size > len(data):  # still being written
            break
        whole += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (_FULL, _LAST):
            message = wandb_internal_pb2.Record()  # type: ignore[attr-defined] # protobuf makes it at import
            message.ParseFromString(whole)
            whole = b""
            yield message


def points(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Return step and metrics of every logged point."""
    found = []
    for message in messages(path):
        if message.WhichOneof("record_type") == "history":
            logged = message.history.item
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in logged}
            found.append((items["_step"], {name: value for name, value in items.items() if name[0] != "_"}))
    return found
