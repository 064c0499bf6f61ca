"""A folder of a model, a run or a checkpoint runs nothing, whatever its files say."""

from __future__ import annotations

import ast
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_mem import load_model
from dist_mem.checkpoint import manifest
from dist_mem.checkpoint.manifest import CheckpointError, describe_file, read_manifest

PACKAGE = Path(__file__).parent.parent / "dist_mem"
GOLDEN = Path(__file__).parent / "golden" / "formats"
DATA = f"data.path={GOLDEN / 'data'}"
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


class Marker:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (str(self.path), 0o777, True)


def rewrite_manifest(directory: Path, **changes: Any) -> None:
    """A manifest that fits the files as they are now, with the hash that it must have."""
    kept = {key: value for key, value in read_manifest(directory).items() if key != "sha256"}
    kept["files"] = {
        path.relative_to(directory).as_posix(): describe_file(path) for path in manifest.files_in(directory)
    }
    body = {**kept, **changes}
    text = json.dumps({**body, "sha256": manifest._fingerprint(body)}, indent=1)
    (directory / "manifest.json").write_text(text)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of somebody else, in the run directory run."""
    directory = tmp_path / "run" / "checkpoints" / "step-00000003"
    shutil.copytree(GOLDEN / "format-3" / "step-00000003", directory)
    return directory


@pytest.mark.parametrize("version", [1, 2])
def test_a_pickle_in_a_folder_that_calls_itself_old_is_not_loaded(
    checkpoint: Path, tmp_path: Path, version: int
) -> None:
    marker = tmp_path / "marker"
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save({"module": {}, "optimizer": Marker(marker)}, checkpoint / "engine" / name)
    rewrite_manifest(checkpoint, format_version=version)
    with suppress(Exception):  # whatever it ends with: first of all nothing may run
        load_model(checkpoint, DATA)
    assert not marker.exists(), "the pickle was loaded"
    with pytest.raises(CheckpointError, match=rf"format_version {version} .* pickles, which are not loaded"):
        load_model(checkpoint, DATA)


def test_nothing_in_the_package_can_load_a_pickle() -> None:
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
                assert not names & UNPICKLERS, where
            if isinstance(node, ast.Call):
                for keyword in node.keywords:
                    is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                    assert keyword.arg != "weights_only" or not is_false, where
                    assert keyword.arg != "allow_pickle" or is_false, where
                called = ast.unparse(node.func)
                assert called not in {"torch.load", "yaml.load", "yaml.unsafe_load", "eval", "exec"}, where
                assert not called.endswith(".load_checkpoint"), where
