"""Faults for tests: of files, of disks that are small or read-only, and what messages say of them."""

import contextlib
import os
import random
import socket
import subprocess
from collections.abc import Callable, Iterator
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


# What can be wrong with a file that a command reads


def as_pipe(path: Path, choose: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def as_folder(path: Path, choose: random.Random) -> None:
    path.unlink()
    path.mkdir()


def as_loop(path: Path, choose: random.Random) -> None:
    path.unlink()
    path.symlink_to(path.name)


def as_link_to_nothing(path: Path, choose: random.Random) -> None:
    path.unlink()
    path.symlink_to("nothing")


def as_link_out(path: Path, choose: random.Random) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def as_device(path: Path, choose: random.Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def as_socket(path: Path, choose: random.Random) -> None:
    path.unlink()
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


def emptied_file(path: Path, choose: random.Random) -> None:
    path.write_bytes(b"")


def random_bytes(path: Path, choose: random.Random) -> None:
    path.write_bytes(choose.randbytes(choose.choice([1, 7, 64, 1000])))


def cut_short(path: Path, choose: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: choose.randrange(max(1, path.stat().st_size))])


def flipped(path: Path, choose: random.Random) -> None:
    content = bytearray(path.read_bytes() or b"x")
    for _ in range(choose.choice([1, 1, 3])):
        content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    path.write_bytes(content)


Damage = Callable[[Path, random.Random], None]
PLACES: list[Damage] = [as_pipe, as_folder, as_loop, as_link_to_nothing, as_link_out, as_device, as_socket]
CONTENTS: list[Damage] = [emptied_file, random_bytes, cut_short, flipped]


# Disks


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
