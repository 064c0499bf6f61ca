"""The file system that a path is on."""

from __future__ import annotations

import re
from pathlib import Path

_NETWORK_FILE_SYSTEMS = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "orangefs", "panfs"),
    *("pvfs2", "smb3", "smbfs", "virtiofs", "wekafs"),
}


def file_system_of(path: Path) -> str:
    """Return the type of the file system of a path, which need not exist yet: ext4, nfs4, lustre, fuse.sshfs.

    Return an empty text if the kernel does not list its mounts, as on systems other than Linux.
    """
    folders = [path.resolve(), *path.resolve().parents]  # first: with autofs, this access mounts it
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    found = [(len(mounted.parts), kind) for mounted, kind in map(_mount, mounts) if mounted in folders]
    deepest = max((depth for depth, _ in found), default=0)
    return next((kind for depth, kind in reversed(found) if depth == deepest), "")  # a later mount hides earlier ones


def _mount(line: str) -> tuple[Path, str]:
    """Return folder and type from a line of /proc/self/mounts, in which \\040 is a blank."""
    folder, kind = line.split(" ")[1:3]
    return Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), folder)), kind


def is_network_file_system(kind: str) -> bool:
    """Return whether another machine serves such files: locks are slow or missing there, which breaks SQLite."""
    return kind in _NETWORK_FILE_SYSTEMS or kind.startswith("fuse.")
