"""Helpers of the tests of saving: faults when a file is written, and the names of the checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dist_mem.checkpoint import commit
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
