"""Memory files: the memory of one lane after a text, in one safetensors file.

    dist-mem read holmes.txt --run runs/demo -o holmes.mem
    dist-mem memory show holmes.mem

The tensors are those of the lane's `LMState`, by the names of `named_tensors`, and `open_segment`, the inputs after the
last complete segment. The header has one entry, `dist_mem_memory`: JSON with what the memory was read from and by, and
a SHA-256 of all of it and of the tensors. A file contains only data, and equal memories make equal files
(docs/howto/memory_files.md). Which model may use a file is decided in kept_memory.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dist_mem.data.tar import MAX_TOKENS
from dist_mem.errors import UnusableError, run_error
from dist_mem.runtime.file_schema import check, integer, leaf, list_of, record, sha256, table, text
from dist_mem.runtime.files import by_name, is_wrong_path, write_bytes

FORMAT_VERSION = 1
OPEN_SEGMENT = "open_segment"  # name of the tensor of inputs; names of a state's tensors contain a dot
_ENTRY = "dist_mem_memory"
_AGAIN = "copy it again, or read the text again: dist-mem read TEXT --run RUN -o {path}"
_SETTING = leaf("a setting", lambda value: value is None or isinstance(value, bool | int | float | str | list | dict))
_HEADER = record(
    {
        "format_version": integer(1),
        "sha256": sha256,
        "model": record({"name": text, "step": integer(), "weights_sha256": sha256}, is_open=True),
        "tokenizer_fingerprint": text,
        "settings": table(_SETTING),
        "texts": list_of(
            record({"name": text, "sha256": sha256, "num_tokens": integer(high=int(MAX_TOKENS))}, is_open=True)
        ),
    },
    is_open=True,
)


class TextRead(NamedTuple):
    """A text that was read into a memory."""

    name: str
    sha256: str  # of the text as UTF-8
    num_tokens: int


class MemoryFile(NamedTuple):
    """The verified content of a memory file."""

    path: Path
    header: dict[str, Any]
    tensors: dict[str, Tensor]  # on the CPU; of a state, lane first, and OPEN_SEGMENT (num_inputs,) int64

    @property
    def texts(self) -> tuple[TextRead, ...]:
        """The texts that were read, in this order, as one document."""
        return tuple(TextRead(*(read[name] for name in TextRead._fields)) for read in self.header["texts"])

    @property
    def num_tokens(self) -> int:
        """Number of tokens read, with those of the open segment."""
        return sum(read.num_tokens for read in self.texts)

    @property
    def tag(self) -> str:
        """A name for files and metrics, the same for every model that has read these texts: "memory-1a2b3c4d"."""
        return f"memory-{hashlib.sha256(' '.join(read.sha256 for read in self.texts).encode()).hexdigest()[:8]}"

    def __str__(self) -> str:
        return f"after {', '.join(ascii(read.name)[1:-1] for read in self.texts)} ({self.num_tokens:,} tokens)"


def digest_of(tensors: Mapping[str, Tensor], prefix: str = "") -> str:
    """Return the SHA-256 of a text and of named tensors: their names, types, shapes and bytes, in order of names."""
    digest = hashlib.sha256(prefix.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_memory_file(path: Path, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a memory file, atomically.

    Args:
        header: all keys of a header; sha256 is made.
        tensors: as in MemoryFile, on any device.

    Raises:
        UnusableError: the path cannot be written.
    """
    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    content = {**header, "sha256": _digest(header, stored)}
    try:
        write_bytes(path, save(stored, {_ENTRY: json.dumps(content, sort_keys=True)}))
    except OSError as error:
        if is_wrong_path(error):
            raise UnusableError(f"{path} cannot be written: {error.strerror}; give another file") from error
        raise


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    hashed = {key: value for key, value in header.items() if key != "sha256"}
    return digest_of(tensors, json.dumps(hashed, sort_keys=True))


def read_memory_file(path: Path) -> MemoryFile:
    """Read a memory file, and compare its content with its SHA-256.

    Raises:
        UnusableError: there is no such file, it is not a memory file, damaged, of another format, or not finite.
        UnfitError: it cannot be read now.
    """
    if not path.is_file():
        raise UnusableError(f"{path}: there is no such memory file; make it: dist-mem read TEXT --run RUN -o {path}")
    again = _AGAIN.format(path=path)
    try:
        with by_name(path) as name, safe_open(name, "pt") as file:
            entry = (file.metadata() or {}).get(_ENTRY)
            names = [] if entry is None else file.keys()
            # Copied: products of tensors that begin where they lie in the file are rounded in another order.
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except SafetensorError as error:
        raise UnusableError(f"{path} is not a memory file, or is cut short or damaged ({error}): {again}") from error
    except OSError as error:
        raise run_error(error, f"{path} cannot be read: {error.strerror or error}") from error
    if entry is None:
        raise UnusableError(f"{path} is a safetensors file, but not a memory file (no {_ENTRY} in its header): {again}")
    header = _parse_header(path, entry, again)
    if header.get("sha256") != _digest(header, tensors):
        raise UnusableError(f"{path}: SHA-256 differs from the one in the file (damaged): {again}")
    check(header, _HEADER, path, UnusableError, f": {again}")
    if OPEN_SEGMENT not in tensors or tensors[OPEN_SEGMENT].dtype != torch.int64 or tensors[OPEN_SEGMENT].dim() != 1:
        raise UnusableError(f"{path} is damaged (no {OPEN_SEGMENT} of int64): {again}")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UnusableError(f"{path}: {name} is not finite, as after a divergence; no model can use it: {again}")
    return MemoryFile(path, header, tensors)


def _parse_header(path: Path, entry: str, again: str) -> dict[str, Any]:
    """Return the header, of this format."""
    try:
        header = json.loads(entry)
    except (RecursionError, ValueError) as error:
        raise UnusableError(f"{path} is damaged (its header is not JSON: {error}): {again}") from error
    found = header.get("format_version") if isinstance(header, dict) else None
    if type(found) is not int:
        raise UnusableError(f"{path} is damaged (its header has no format_version): {again}")
    if found != FORMAT_VERSION:
        remedy = "update dist_mem, or " if found > FORMAT_VERSION else ""
        raise UnusableError(
            f"{path} has format_version {found}, but this dist_mem reads {FORMAT_VERSION}: {remedy}read the text "
            f"again: dist-mem read TEXT --run RUN -o {path}"
        )
    return dict(header)
