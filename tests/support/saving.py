"""Helpers of the tests of saving: faults when a file is written, names of checkpoints, changed manifests."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dist_mem.checkpoint import commit, manifest
from dist_mem.checkpoint.manifest import describe_file, files_in, first_verified, list_steps, step_dir, verify
from dist_mem.runtime.files import write_hashed

Hook = Callable[[Path], None]  # called with the path of every file before it is written


@contextmanager
def before_writing(hook: Hook, *, is_rehearsal: bool = False) -> Iterator[pytest.MonkeyPatch]:
    """Call the hook before a file of a checkpoint is written, or before one of the rehearsal at the start."""

    def write(path: Path, parts: Any) -> dict[str, Any]:
        if is_rehearsal == (".rehearsal.partial" in path.parts):
            hook(path)
        return write_hashed(path, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "write_hashed", write)
        yield patch


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def commit_small(run_dir: Path, step: int, validation: dict[str, Any] | None = None) -> Path:
    """Write a checkpoint of one file, `content`."""
    directory = step_dir(run_dir, step)
    directory.mkdir(parents=True)
    (directory / "content").write_text(f"all of step {step}")
    files = {"content": describe_file(directory / "content")}
    manifest.write_manifest(directory, {**FACTS, "step": step, "validation": validation, "files": files})
    return directory


def newest_verified(run_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint of a run that verifies, and why newer ones were not chosen; see `first_verified`."""
    found = first_verified(lambda: [step_dir(run_dir, step) for step in reversed(list_steps(run_dir))], verify)
    return (found[0], found[2]) if found else (None, [])


def rewrite_manifest(directory: Path, **changes: Any) -> None:
    """Write a manifest that fits the files as they are now, but for the changes, with the hash that it must have."""
    kept = json.loads((directory / "manifest.json").read_text())
    body = {key: value for key, value in kept.items() if key != "sha256"}
    body["files"] = {path.relative_to(directory).as_posix(): describe_file(path) for path in files_in(directory)}
    body |= changes
    text = json.dumps({**body, "sha256": manifest._fingerprint(body)}, indent=1)
    (directory / "manifest.json").write_text(text)


# Entries of every checkpoint manifest besides its step and files.
FACTS: dict[str, Any] = {
    "world_size": 1,
    "zero_stage": 0,
    "versions": {},
    "mlflow_run_id": None,
    "data_fingerprint": "",
    "tokenizer_fingerprint": "",
    "meter": {},
    "lanes": {},
}
