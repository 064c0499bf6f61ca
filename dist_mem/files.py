"""Writing files so that a crash leaves the old one or the new one, never half of one."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Flush a file, or a directory's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by a file holding `content`, atomically and durably."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    fsync_path(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by a file holding `text` as UTF-8, atomically and durably."""
    write_bytes(path, text.encode())


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
