"""What a start does not load: help needs no torch, and training no compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHOOSE = "from dist_mem.runtime.distributed import choose_accelerator; choose_accelerator()"
START_ENGINE = f"{CHOOSE}; from dist_mem.engine import engine, start"


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import dist_mem.__main__", {"torch", "mlflow", "sentencepiece", "webdataset"}),
        ("from dist_mem.data import lanes", {"deepspeed", "mlflow", "webdataset"}),
        (f"{START_ENGINE}; start._import_muon_uncompiled()", {"torch._inductor.compile_fx", "mlflow"}),
    ],
)
def test_modules_that_are_not_needed_are_not_loaded(statement: str, unwanted: set[str]) -> None:
    """torch is a second, its compiler 0.8 s and 43 MB, mlflow a second; on every rank."""
    code = f"{statement}\nimport sys\nprint(sorted({unwanted} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
