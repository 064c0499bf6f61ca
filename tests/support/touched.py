"""Which tests a change touches: those of its folder, and of every folder that imports it (layers are strict).

The folder tests/NAME tests dist_mem/NAME.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import PurePath

from tests.support.paths import PACKAGE, ROOT

ITSELF, ITS_FOLDER, ABOVE, ELSEWHERE = range(4)  # how near a test is to a change
_IMPORT = re.compile(r"^\s*(?:from|import) dist_mem\.(\w+)", re.MULTILINE)


def changed_files(since: str) -> list[str]:
    """Return the files that differ from a commit, relative to the root.

    Raises:
        subprocess.CalledProcessError: there is no such commit.
    """
    command = ["git", "diff", "--name-only", since, "HEAD"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def number_of_commits() -> int:
    """Return how many commits lead to this one; 0 outside of a repository."""
    command = ["git", "rev-list", "--count", "HEAD"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return int(found.stdout or 0)


def imports_of_folders() -> dict[str, set[str]]:
    """Return the folders, and modules outside of folders, that each one imports."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        name = PurePath(path.relative_to(PACKAGE).parts[0]).stem
        found.setdefault(name, set()).update(_IMPORT.findall(path.read_text(encoding="utf-8")))
    return found


def users_of(folders: Iterable[str], imports: dict[str, set[str]]) -> set[str]:
    """Return the folders that import one of these, also through others."""
    found, new = set[str](), set(folders)
    while new:
        found |= new
        new = {name for name, imported in imports.items() if imported & new} - found
    return found


class Touched:
    """How near every test is to what has changed since a commit."""

    def __init__(self, files: Iterable[str], imports: dict[str, set[str]]) -> None:
        self.files = set(files)
        places = [PurePath(file).parts for file in self.files if file.startswith("dist_mem/")]
        self.folders = {PurePath(parts[1]).stem for parts in places}
        self.above = users_of(self.folders, imports)

    def nearness(self, path: str) -> int:
        """Return one of the four constants for a test's file, relative to the root."""
        folder = PurePath(path).parts[1]
        if path in self.files:
            return ITSELF
        if folder in self.folders:
            return ITS_FOLDER
        return ABOVE if folder in self.above else ELSEWHERE
