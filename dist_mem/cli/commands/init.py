"""Make a folder with a first configuration, and the commands to use it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

from dist_mem.errors import UnusableError, run_error
from dist_mem.runtime.files import PARTIAL, make_folder, read_regular, write_text
from dist_mem.runtime.shipped_files import shipped_root

PLACE = ("start", 1)
EXAMPLE = "my_project"
# name in the project -> file among the shipped ones
_PROJECT = {
    "README.md": "examples/project/README.md",
    "config.yaml": "examples/project/config.yaml",
    "local.sh": "launch/local.sh",
    "site.yaml": "launch/sites/generic.yaml",
}


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("folder", type=Path, metavar="FOLDER", help="folder to make; one that exists must be empty")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    folder: Path = options.folder
    contents = {name: (shipped_root() / source).read_text(encoding="utf-8") for name, source in _PROJECT.items()}
    if folder.exists() and not (folder.is_dir() and _is_own_half(folder, contents)):
        raise UnusableError(f"{folder} is not an empty folder: give a new one, so that nothing is overwritten")
    try:
        make_folder(folder)
        for name, text in contents.items():
            write_text(folder / name, text)
    except OSError as error:
        for name in contents:
            (folder / name).unlink(missing_ok=True)
        raise run_error(error, f"{folder} cannot be made: {error}") from error
    print(f"{folder}: {', '.join(contents)}; {folder / 'README.md'} has the first commands")
    return 0


def _is_own_half(folder: Path, contents: Mapping[str, str]) -> bool:
    """Return whether a folder is empty, or has only a part of what this command writes, as a killed one leaves it."""
    found = [path for path in folder.iterdir() if not PARTIAL.fullmatch(path.name)]  # `write_text` removes those
    is_own = all(path.is_file() and read_regular(path) == contents.get(path.name, "").encode() for path in found)
    return is_own and len(found) < len(contents)
