"""Serialize safetensors files in parts, to be written and hashed in one pass without a second copy of the tensors.

The library's writer copies every tensor into a Python object while it holds the interpreter lock, and the file would
have to be read again to be hashed. Both would slow down the training that runs while a checkpoint is written. The bytes
equal those of the library, which reads them; a test compares them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

# Names in the header. Wide types come first in a file, so that every tensor is aligned.
_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = {dtype: index for index, dtype in enumerate(_DTYPES)}


def safetensors_parts(
    tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the content of a file with these contiguous CPU tensors, equal to that of `safetensors.torch.save`."""
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
