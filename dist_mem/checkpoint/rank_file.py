"""The file of one rank in a checkpoint: everything that the rank saves, and its reader.

    ranks/rank-00003.safetensors   engine/KIND/NAME   parameters and optimizer state, see engine_files.py
                                   lanes/NAME         memory state and cursor of every lane of the rank
                                   rng/DEVICE         state of its random generators

One file per rank and checkpoint: on a shared file system, a thousand ranks wait for its names rather than for its
bytes. It is written and hashed in one pass, without a second copy of the tensors: safetensors' own writer copies every
tensor into a Python object while it holds the interpreter lock, and the file would have to be read again to be hashed.
The bytes equal the library's, which reads them; a test compares them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dist_mem.checkpoint.manifest import reading
from dist_mem.errors import CheckpointError, UnusableError
from dist_mem.runtime.files import by_name
from dist_mem.runtime.terminal import some

FOLDER = "ranks"


def rank_file(rank: int) -> str:
    """Return the name in a checkpoint of the file that `rank` writes."""
    return f"{FOLDER}/rank-{rank:05d}.safetensors"


def tensors_of_file(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the content of a rank's file: the tensors of each part under PART/NAME."""
    return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


class RankFile:
    """Reads one part (engine, lanes, rng) of a rank's file, tensor by tensor."""

    def __init__(self, path: Path, part: str) -> None:
        """Open the file. Raises CheckpointError if it cannot be read."""
        prefix = f"{part}/"
        self.path = path
        with reading(path):
            with by_name(path) as name:
                self._file = safe_open(name, framework="pt")
            keys = self._file.keys()
        self._keys = {key.removeprefix(prefix): key for key in keys if key.startswith(prefix)}

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def read(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return these tensors (default: all of the part). Raises CheckpointError if they cannot be read."""
        with reading(self.path):
            return {name: self._file.get_tensor(self._keys[name]) for name in names or self._keys}

    def elements(self, name: str, low: int, high: int, *, size: int) -> Tensor:
        """Return elements low to high of a tensor of `size` elements, or a whole 0-d tensor.

        Raises:
            CheckpointError: it has another shape, or cannot be read.
        """
        with reading(self.path):
            stored = self._file.get_slice(self._keys[name])
            shape = stored.get_shape()
            if shape not in ([], [size]):
                raise CheckpointError(f"{self.path}: {name} has shape {shape}, but engine.json lists {size} elements")
            return stored[low:high] if shape else self._file.get_tensor(self._keys[name])


# Names in the header. Wide types come first in a file, so that every tensor is aligned.
_DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = {dtype: index for index, dtype in enumerate(_DTYPES)}


def safetensors_parts(
    tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the content of a file with these contiguous CPU tensors, equal to that of `safetensors.torch.save`.

    Raises:
        UnusableError: a tensor has a dtype that the format lacks.
    """
    if strange := [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype not in _DTYPES]:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise UnusableError(f"{some(strange, 3)}, which no checkpoint can hold: use one of {known}")
    ordered = sorted(tensors.items(), key=lambda item: (_ORDER[item[1].dtype], item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield tensor.reshape(-1).view(torch.uint8).numpy().data
