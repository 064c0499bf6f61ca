"""Faults for tests: disks that are small or read-only, and what messages say of them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "reference" / "faults.md").read_text(encoding="utf-8")


def assert_says(text: str, *phrases: str) -> None:
    """Assert that a message has these phrases and no traceback."""
    assert [phrase for phrase in phrases if phrase not in text] == []
    assert "Traceback" not in text


def assert_quoted(text: str, *phrases: str) -> None:
    """Assert that a message has these phrases, and that the page of errors, which lists it, has them too."""
    assert_says(text, *phrases)
    assert [phrase for phrase in phrases if phrase not in PAGE] == [], "docs/reference/faults.md"


def flip(path: Path, position: int, bits: int = 1) -> None:
    """Change one byte of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= bits
    path.write_bytes(content)


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """Mount a separate file system in memory; skip the test where mounting is not allowed (it needs root)."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    """Change the size of a small disk, or make it read-only."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def used_kilobytes(folder: Path) -> int:
    """Return the size of a folder in kilobytes; tmpfs counts whole pages of memory."""
    counted = subprocess.run(["du", "-sk", str(folder)], capture_output=True, text=True, check=True)
    return int(counted.stdout.split()[0])
