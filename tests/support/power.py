"""A disk whose power can be cut: data that was not flushed are lost, as ext4 itself loses them.

The disk is a mounted file with an ext4 file system. The cut is ext4's own (EXT4_IOC_SHUTDOWN without flushing the
journal), and the next mount replays the journal as after a crash. ext4 writes nothing by itself before
`COMMIT_SECONDS`.
"""

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

COMMIT_SECONDS = 300  # Linux writes unflushed data after 30 s: a test must cut before
_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_NO_LOG_FLUSH = 2


class Disk:
    """A separate file system, mounted at `folder`."""

    def __init__(self, folder: Path, image: Path) -> None:
        self.folder, self._image = folder, image

    def mount(self) -> None:
        """Mount the disk; skip the test where this is not allowed (it needs root and a loop device)."""
        options = f"loop,commit={COMMIT_SECONDS}"
        command = ["mount", "-t", "ext4", "-o", options, str(self._image), str(self.folder)]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"a disk cannot be mounted here: {mounted.stderr.strip()}")

    def unmount(self) -> None:
        """Unmount the disk; no process may have a file open there."""
        subprocess.run(["umount", str(self.folder)], check=True)

    def cut(self) -> None:
        """Cut the power: nothing more reaches the disk, and every call fails."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def restart(self) -> None:
        """Restore the power: mount the disk with what had reached it."""
        self.unmount()
        self.mount()


@contextmanager
def disk_without_power(folder: Path, *, megabytes: int = 64) -> Iterator[Disk]:
    """Create and mount a new, empty disk."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("a disk cannot be made here: mkfs.ext4 is not installed")
    folder.mkdir(parents=True)
    image = folder.with_name(f"{folder.name}.img")
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    disk = Disk(folder, image)
    disk.mount()
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)
