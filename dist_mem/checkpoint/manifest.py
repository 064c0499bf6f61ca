"""The manifest of a checkpoint: written last, it lists every file with its size and SHA-256.

A directory `step-00001000` with a manifest whose files all match is complete; anything else is not a checkpoint. The
manifest also has a SHA-256 of itself, because its lanes and steps matter as much as the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dist_mem.checkpoint.schemas import manifest_problems
from dist_mem.errors import EXIT_FAILED, CheckpointError, UnreadableError, run_error
from dist_mem.runtime.file_schema import check, read_json
from dist_mem.runtime.files import WrongFileError, is_missing, open_regular, sha256_of, write_text

FORMAT_VERSION = 4
_NAME = "manifest.json"
_STEP_DIR = re.compile(r"step-(\d{8})")
_RANK_FILE = re.compile(r"ranks/rank-(\d+)\.safetensors")


class NewerFormatError(CheckpointError):
    """A checkpoint of a newer dist_mem. Resuming from an older checkpoint instead would undo its steps."""


def step_dir(run_dir: Path, step: int) -> Path:
    """Return the directory of the checkpoint of `step`."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def run_of(directory: Path) -> Path:
    """Return the run directory of a checkpoint, whatever the checkpoint is called."""
    return directory.absolute().parent.parent


def rank_of(name: str) -> int | None:
    """Return the rank that wrote a file for itself; None: a file that rank 0 writes for all."""
    found = _RANK_FILE.fullmatch(name)
    return int(found[1]) if found else None


def list_steps(run_dir: Path) -> list[int]:
    """Return the steps that have a checkpoint directory, verified or not, oldest first."""
    found = (_STEP_DIR.fullmatch(path.name) for path in (run_dir / "checkpoints").glob("step-*"))
    return sorted(int(match.group(1)) for match in found if match)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise CheckpointError if `path` cannot be read: an unreadable checkpoint counts as damaged."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, WrongFileError) else error
        raise unreadable_error(error, f"{path}: cannot be read ({reason})") from error


def unreadable_error(error: Exception, message: str) -> CheckpointError:
    """Return the error for a checkpoint that cannot be read: an UnreadableError if another start may succeed."""
    may_pass = isinstance(error, OSError) and run_error(error).exit_code == EXIT_FAILED
    return UnreadableError(message) if may_pass else CheckpointError(message)


def files_in(directory: Path) -> list[Path]:
    """Return every file of a checkpoint except the manifest, in a fixed order."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / _NAME)


def describe_file(path: Path) -> dict[str, Any]:
    """Return the manifest entry of a file."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def write_manifest(directory: Path, content: dict[str, Any]) -> None:
    """Write the manifest, which makes the directory a checkpoint."""
    content = {"format_version": FORMAT_VERSION, **content}
    write_text(directory / _NAME, json.dumps({**content, "sha256": _fingerprint(content)}, indent=1) + "\n")


def _fingerprint(content: dict[str, Any]) -> str:
    hashed = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read and check the manifest of a checkpoint.

    Raises:
        CheckpointError: there is no checkpoint or no manifest, or the manifest is damaged or of another format.
    """
    path = directory / _NAME
    with reading(path):
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: there is no such checkpoint")
        if is_missing(path):
            raise CheckpointError(f"{directory}: no {_NAME}, so this save never finished")
        manifest = read_json(path, CheckpointError)
    if not isinstance(manifest, dict) or type(manifest.get("format_version")) is not int:
        raise CheckpointError(f"{path}: not a manifest: it has no format_version (damaged)")
    if manifest.get("sha256") != _fingerprint(manifest):
        raise CheckpointError(f"{path}: SHA-256 differs from the one in the file (damaged)")
    found = f"{path}: format_version {manifest['format_version']}"
    if manifest["format_version"] > FORMAT_VERSION:
        raise NewerFormatError(
            f"{found} is newer than {FORMAT_VERSION}, the newest that this dist_mem reads; update dist_mem"
        )
    if manifest["format_version"] < FORMAT_VERSION:
        raise CheckpointError(f"{found} is unknown; give a checkpoint of format {FORMAT_VERSION}")
    check(manifest, manifest_problems, path, CheckpointError)
    named = _STEP_DIR.fullmatch(directory.name)
    if named and int(named[1]) != manifest["step"]:
        raise CheckpointError(f"{path}: step is {manifest['step']}, but its folder is {directory.name} (renamed?)")
    return manifest


def verify_size(directory: Path, name: str, entry: dict[str, Any]) -> None:
    """Compare the size of a file with its entry in the manifest. Raises CheckpointError."""
    path = directory / name
    if is_missing(path):
        raise CheckpointError(f"{path}: missing")
    with reading(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != entry["bytes"]:
        longer = "edited, or of another version?): copy it again; set keys by key=value, not in this file"
        reason = "cut short?)" if size < entry["bytes"] else longer
        raise CheckpointError(f"{path}: {size} bytes, {entry['bytes']} expected ({reason}")


def verify_file(directory: Path, name: str, entry: dict[str, Any]) -> None:
    """Compare the size and SHA-256 of a file with its entry in the manifest. Raises CheckpointError."""
    verify_size(directory, name, entry)
    path = directory / name
    with reading(path):
        found = sha256_of(path)
    if found != entry["sha256"]:
        raise CheckpointError(f"{path}: SHA-256 differs from the manifest (damaged or edited)")


def verify(directory: Path, check: Callable[[Path, str, dict[str, Any]], None] = verify_file) -> dict[str, Any]:
    """Check every file in the manifest; return the manifest.

    Args:
        check: `verify_size` reads no file.

    Raises:
        CheckpointError: names the first file that is missing or different.
    """
    manifest = read_manifest(directory)
    for name, entry in manifest["files"].items():
        check(directory, name, entry)
    return manifest


def first_verified(
    find: Callable[[], Sequence[Path]], check: Callable[[Path], dict[str, Any]]
) -> tuple[Path, dict[str, Any], list[str]] | None:
    """Return the first checkpoint that verifies, its manifest, and why those before it were passed over.

    Args:
        find: returns the candidates; called again if none verifies, since a running job may have deleted them and saved
            newer ones meanwhile.
        check: verifies a checkpoint and returns its manifest.

    Returns:
        None if there are no candidates.

    Raises:
        NewerFormatError: resuming from another checkpoint would undo the steps of this one.
        CheckpointError: none verifies, and the run must not start over silently.
    """
    before, candidates, errors = None, find(), list[CheckpointError]()
    while candidates != before:
        errors.clear()
        for directory in candidates:
            try:
                return directory, check(directory), [str(error) for error in errors]
            except NewerFormatError:
                raise
            except CheckpointError as error:
                errors.append(error)
        if not errors:
            return None
        before, candidates = candidates, find()
    listed = "\n  ".join(map(str, errors))
    may_pass = any(isinstance(error, UnreadableError) for error in errors)
    raise (UnreadableError if may_pass else CheckpointError)(
        f"{candidates[-1].absolute().parent}: no checkpoint verifies:\n  {listed}\n"
        "Restore one of them, or give the run a new run_dir to start over"
    )
