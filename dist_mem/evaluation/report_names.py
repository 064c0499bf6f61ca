"""The names of result files, [COMMAND-]SPLIT-step-STEP[-TAG]: nothing else writes or reads them.

    test-step-00000800.json                                    # dist-mem evaluate
    test-step-00000800-mqar_b54a2c-M640-without-memory.json    # ... other data, another protocol
    dialogue-test-step-00000800-limit100.json

The tag has what differs from an evaluation of the run's own data with the protocol of its training, so that no result
replaces another: the data first, then the protocol (`protocol.tag_of`), then what else was asked for. Names of metrics
are SPLIT[-TAG]/METRIC.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dist_mem.data.shard import Index

FOLDER = "evaluations"  # in a run directory
WITHOUT_MEMORY = "without-memory"  # the last part of a tag
_NAME = re.compile(r"(?:(?P<command>dialogue|inspect)-)?(?P<split>.+?)-step-(?P<step>\d{1,18})(?:-(?P<tag>.+))?")
_FINGERPRINT = 6  # characters


class ReportName(NamedTuple):
    """The name of a result file, without suffix, in its parts."""

    split: str  # of `inspect`, also the document
    step: int  # of the checkpoint
    tag: str = ""
    command: str = ""  # "" for evaluate

    def __str__(self) -> str:
        return join_parts(self.command, f"{self.split}-step-{self.step:08d}", self.tag)


def join_parts(*parts: str) -> str:
    """Join the non-empty parts of a name with hyphens."""
    return "-".join(part for part in parts if part)


def list_reports(run_dir: Path, command: str = "") -> dict[Path, ReportName]:
    """Return the JSON reports of a command in a run directory, "" for evaluate, by split, step and tag."""
    names = {}
    for path in (run_dir / FOLDER).glob("*-step-*.json"):
        found = _NAME.fullmatch(path.stem)
        if found and (found["command"] or "") == command:
            names[path] = ReportName(found["split"], int(found["step"]), found["tag"] or "", command)
    return dict(sorted(names.items(), key=lambda item: item[1]))


def tag_in(path: Path) -> str:
    """Return the tag in the name of a result file; "" if it has none, or another name."""
    found = _NAME.fullmatch(path.stem)
    return (found["tag"] or "") if found else ""


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the names of runs, or of their reports without suffix, or whole paths if two are equal."""
    names = [path.resolve().name.removesuffix(".json") for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def data_part(index: Index) -> str:
    """Return the part of a tag that names data: "mqar_b54a2c"."""
    return f"{re.sub(r'[^a-zA-Z0-9_.]', '_', index.name)}_{index.fingerprint[:_FINGERPRINT]}"


def digest_part(text: str) -> str:
    """Return the part of a name that stands for a text, as a path or a content: two texts have two names."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_FINGERPRINT]


def without_data(tag: str, fingerprint: str) -> str:
    """Return a tag without its first part if that names data of this fingerprint."""
    first, _, rest = tag.partition("-")
    return rest if first.endswith(f"_{fingerprint[:_FINGERPRINT]}") else tag


def is_without_memory(path: Path) -> bool:
    """Return whether this is the file of an evaluation without memory."""
    return path.stem.endswith(f"-{WITHOUT_MEMORY}")


def counterpart(path: Path) -> Path:
    """Return the path of the same evaluation's report without memory; for one without memory, that with memory."""
    if is_without_memory(path):
        return path.with_stem(path.stem.removesuffix(f"-{WITHOUT_MEMORY}"))
    return path.with_stem(join_parts(path.stem, WITHOUT_MEMORY))
