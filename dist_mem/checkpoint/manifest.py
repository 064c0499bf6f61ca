"""The manifest of a checkpoint: written last, it lists every file with its size and SHA-256.

A directory `step-00001000` with a manifest whose files all match is complete; anything else is not a checkpoint. The
manifest also has a SHA-256 of itself, because its lanes and steps matter as much as the files.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from dist_mem.checkpoint.schemas import manifest_problems
from dist_mem.errors import CheckpointError
from dist_mem.runtime.file_schema import check, read_json
from dist_mem.runtime.files import sha256_of, write_text

FORMAT_VERSION = 3
OLDEST_FORMAT = 3  # older formats store weights as pickles, which can run any code when loaded
TOKENIZER_DIR = "tokenizer"  # in a checkpoint; older checkpoints have none
_NAME = "manifest.json"
_STEP_DIR = re.compile(r"step-(\d{8})")


class NewerFormatError(CheckpointError):
    """A checkpoint of a newer dist_mem. Resuming from an older checkpoint instead would undo its steps."""


def step_dir(run_dir: Path, step: int) -> Path:
    """Return the directory of the checkpoint of `step`."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def run_of(directory: Path) -> Path:
    """Return the run directory of a checkpoint, whatever the checkpoint is called."""
    return directory.absolute().parent.parent


def list_steps(run_dir: Path) -> list[int]:
    """Return the steps that have a checkpoint directory, verified or not, oldest first."""
    found = (_STEP_DIR.fullmatch(path.name) for path in (run_dir / "checkpoints").glob("step-*"))
    return sorted(int(match.group(1)) for match in found if match)


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
    try:
        if not directory.is_dir():
            raise CheckpointError(f"{directory}: there is no such checkpoint")
        if not path.exists():
            raise CheckpointError(f"{directory}: no {_NAME}, so this save never finished")
        manifest = read_json(path, CheckpointError)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if not isinstance(manifest, dict) or type(manifest.get("format_version")) is not int:
        raise CheckpointError(f"{path}: not a manifest: it has no format_version (damaged)")
    if manifest.get("sha256") != _fingerprint(manifest):
        raise CheckpointError(f"{path}: SHA-256 differs from the one in the file (damaged)")
    if manifest["format_version"] < OLDEST_FORMAT:
        raise CheckpointError(
            f"{path}: format_version {manifest['format_version']} has its weights in pickles, which are not loaded "
            f"because they can run any code; give a checkpoint of format {OLDEST_FORMAT} or newer"
        )
    if manifest["format_version"] > FORMAT_VERSION:
        raise NewerFormatError(
            f"{path}: format_version {manifest['format_version']} is newer than {FORMAT_VERSION}, the newest that this "
            "dist_mem reads; update dist_mem"
        )
    check(manifest, manifest_problems, path, CheckpointError)
    named = _STEP_DIR.fullmatch(directory.name)
    if named and int(named[1]) != manifest["step"]:
        raise CheckpointError(f"{path}: step is {manifest['step']}, but its folder is {directory.name} (renamed?)")
    return manifest


def verify(directory: Path) -> dict[str, Any]:
    """Compare the size and SHA-256 of every file with the manifest; return the manifest.

    Raises:
        CheckpointError: names the first file that is missing or different.
    """
    manifest = read_manifest(directory)
    for name, entry in manifest["files"].items():
        verify_file(directory, name, entry)
    return manifest


def verify_file(directory: Path, name: str, entry: dict[str, Any]) -> None:
    """Compare a file with its entry in the manifest.

    Raises:
        CheckpointError: the file is missing, cut short, altered, or cannot be read.
    """
    verify_size(directory, name, entry)
    path = directory / name
    try:
        found = sha256_of(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if found != entry["sha256"]:
        raise CheckpointError(f"{path}: SHA-256 differs from the manifest (damaged)")


def verify_size(directory: Path, name: str, entry: dict[str, Any]) -> None:
    """Compare the size of a file with its entry in the manifest. Raises CheckpointError."""
    path = directory / name
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if size != entry["bytes"]:
        raise CheckpointError(f"{path}: {size} bytes, {entry['bytes']} expected (cut short?)")


def newest_verified(run_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that verifies, and the reasons why newer ones were passed over.

    Raises:
        CheckpointError: there are checkpoints, but none verifies (the run must not start over silently); or the
            newest has a newer format.
    """
    reasons: list[str] = []
    for step in reversed(list_steps(run_dir)):
        directory = step_dir(run_dir, step)
        try:
            verify(directory)
        except NewerFormatError:
            raise
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            return directory, reasons
    if reasons:
        raise nothing_verifies(run_dir, reasons)
    return None, reasons


def nothing_verifies(run_dir: Path, reasons: list[str]) -> CheckpointError:
    """Return the error for a run none of whose checkpoints verifies: it must not start over silently."""
    listed = "\n  ".join(reasons)
    return CheckpointError(
        f"{run_dir / 'checkpoints'}: no checkpoint verifies:\n  {listed}\n"
        "Restore one of them, or give the run a new run_dir to start over"
    )
