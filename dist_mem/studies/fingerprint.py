"""Fingerprint of the inputs of a results folder, so that it never mixes figures of different definitions.

`made_from.txt` contains the hash of the table, the scale, the overrides, and a hash of every configuration file.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from dist_mem.config.sources import COMMAND_LINE, read_sources
from dist_mem.errors import UnusableError
from dist_mem.runtime.files import sha256_of, write_text
from dist_mem.studies.runs import RESULTS
from dist_mem.studies.tables import Scale, Table

_NAME = "made_from.txt"


def keep_settings(table: Table, scale: Scale, out: Path, extra: Sequence[str]) -> None:
    """Check the folder's fingerprint, and write it.

    Args:
        extra: overrides for every training.

    Raises:
        UnusableError: the folder has figures made from other inputs, or a configuration file is missing.
    """
    head = [sha256_of(Path(table.path)), scale.name, shlex.join(extra)]
    lines = [*head, *_files(scale)]
    path = out / _NAME
    is_used = (out / "runs").exists() or (out / RESULTS).exists()  # otherwise an earlier call produced nothing
    if is_used and path.exists():
        kept = path.read_text(encoding="utf-8").splitlines()
        if kept[: len(head)] != head:
            _refuse(out, Path(table.path).stem, "its definition, the scale or the overrides have changed since")
        changed = [line.partition(" ")[2] for line in lines[len(head) :] if line not in kept]
        if changed and len(kept) > len(head):  # earlier versions recorded no files
            has = "has" if len(changed) == 1 else "have"
            _refuse(out, Path(table.path).stem, f"{' and '.join(changed)} {has} changed since")
    write_text(path, "".join(f"{line}\n" for line in lines))


def _files(scale: Scale) -> list[str]:
    """Return a line per configuration file of any row: the hash of its content without comments, and its path."""
    contents: dict[str, str] = {}
    for row in scale.rows.values():
        for point in scale.points.values():
            for source in read_sources([*scale.train, *row, *point.train]):
                contents[source.where] = json.dumps(source.tree, sort_keys=True, default=str)
    contents.pop(COMMAND_LINE, None)
    return [f"{hashlib.sha256(text.encode()).hexdigest()} {where}" for where, text in sorted(contents.items())]


def _refuse(out: Path, table: str, what: str) -> None:
    raise UnusableError(f"{out} holds runs of another {table}: {what}; give another --out, or remove the folder")
