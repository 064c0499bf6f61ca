"""Files of a source: every entry of a folder is taken, or passed over and counted, or refused; for every builder.

Taken are files with one of the builder's suffixes, in upper or lower case. Passed over are hidden entries and other
suffixes. Refused is what cannot be either without losing a text in silence: a link to nothing, and a pipe, a device or
an empty folder with the name of a text.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dist_mem.errors import UnusableError
from dist_mem.runtime.names import is_hidden
from dist_mem.runtime.terminal import count_noun, some

SHOWN_NAMES = 3  # of hidden entries
FOLDER = "folder"


class TreeFiles(NamedTuple):
    """What a walk found."""

    files: dict[str, Path]  # path under the folder with slashes -> path, in the order of the keys
    hidden: list[str]  # hidden files and folders, likewise
    others: Counter[str]  # other suffix, or kind of entry -> entries


def suffix_of(name: str, suffixes: Collection[str]) -> str | None:
    """Return the longest of the suffixes with which a name ends, in upper or lower case; None if it has none."""
    return max((suffix for suffix in suffixes if name.lower().endswith(suffix)), key=len, default=None)


def walk(folder: Path, suffixes: Collection[str], *, is_deep: bool = True) -> TreeFiles:
    """Classify every entry under a folder, through links to folders too.

    Args:
        suffixes: of files to take.
        is_deep: False: folders in the folder are counted, not read.

    Raises:
        UnusableError: an entry is refused; names it and the fix.
        OSError: a folder cannot be read.
    """
    found = TreeFiles({}, [], Counter())
    _walk(folder, "", [], found, suffixes=suffixes, is_deep=is_deep)
    return TreeFiles(dict(sorted(found.files.items())), sorted(found.hidden), found.others)


def listed_files(folder: Path, suffix: str) -> dict[str, Path]:
    """Return the files of one suffix in a folder by their names without it; print what was passed over.

    Raises:
        UnusableError: as `walk`; or there are none, or two have one name.
    """
    found = walk(folder, (suffix,), is_deep=False) if folder.is_dir() else TreeFiles({}, [], Counter())
    print_passed_over(folder.name, found)
    files: dict[str, Path] = {}
    for name, path in found.files.items():
        stem = name[: -len(suffix)]
        if stem in files:
            raise UnusableError(f"{files[stem]} and {path} have one name, {stem}: rename one")
        files[stem] = path
    if not files:
        raise UnusableError(f"{folder} has no {suffix} files: check --source")
    return files


def print_passed_over(where: str, *found: TreeFiles) -> None:
    """Print one line with the number of entries that were passed over, if there are any."""
    if text := describe_passed_over(*found):
        print(f"{where}: passed over {text}", flush=True)


def describe_passed_over(*found: TreeFiles) -> str:
    """Return what was passed over, by suffix, as a text; empty if nothing was."""
    hidden = [name for each in found for name in each.hidden]
    parts = [f"{len(hidden):,} hidden ({some(map(printable_name, hidden), SHOWN_NAMES)})"] if hidden else []
    others = sum((each.others for each in found), Counter())
    for kind, count in sorted(others.items(), key=lambda other: (-other[1], other[0])):
        parts.append(count_noun(count, FOLDER) if kind == FOLDER else f"{count:,} {printable_name(kind)}")
    return ", ".join(parts)


def printable_name(name: str | Path) -> str:
    """Return a name as text that can be printed; bytes that are not UTF-8 as `\\xe9`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def kind_of(name: str) -> str:
    """Return the suffix by which a file is counted: the last one, and .txt or .json before it."""
    *stems, last = name.lower().split(".")
    if not stems:
        return "without suffix"
    return f".{stems[-1]}.{last}" if stems[-1] in ("txt", "json", "jsonl", "ndjson") and len(stems) > 1 else f".{last}"


def check_name(path: Path, name: str) -> None:
    """Raise UnusableError if the name of a file is not UTF-8: it becomes the document's title and id."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        byte = os.fsencode(name[error.start])[0]
        raise UnusableError(
            f"{printable_name(path)}: its name is not UTF-8 (it has the byte 0x{byte:02x}): rename it, for example "
            "with convmv -f latin1 -t utf-8"
        ) from error


def _walk(
    folder: Path,
    prefix: str,
    above: Sequence[tuple[int, int]],
    found: TreeFiles,
    *,
    suffixes: Collection[str],
    is_deep: bool,
) -> None:
    status = folder.stat()
    if (status.st_dev, status.st_ino) in above:
        raise UnusableError(f"{printable_name(folder)} is a link to a folder that contains it: remove the link")
    for entry in _entries(folder):
        name, path = f"{prefix}{entry.name}", folder / entry.name
        is_named = suffix_of(entry.name, suffixes) is not None
        if is_hidden(entry.name):
            found.hidden.append(name)
        elif entry.is_dir():
            if not is_deep and is_named:
                raise UnusableError(f"{printable_name(path)} is a folder, not a file: remove or rename it")
            if not is_deep:
                found.others[FOLDER] += 1
                continue
            before = len(found.files)
            inside = [*above, (status.st_dev, status.st_ino)]
            _walk(path, f"{name}/", inside, found, suffixes=suffixes, is_deep=True)
            if is_named and len(found.files) == before:
                raise UnusableError(f"{printable_name(path)} is a folder, and no text is in it: remove or rename it")
        elif entry.is_symlink() and not path.exists():
            raise UnusableError(
                f"{printable_name(path)} is a link to nothing: restore {printable_name(path.readlink())}, or remove it"
            )
        elif is_named and not entry.is_file():
            raise UnusableError(
                f"{printable_name(path)} is a pipe, a socket or a device, not a file: remove or rename it"
            )
        elif is_named:
            check_name(path, name)
            found.files[name] = path
        else:
            found.others[kind_of(entry.name)] += 1


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from sorted(entries, key=lambda entry: entry.name)
