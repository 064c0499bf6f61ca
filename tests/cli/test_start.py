"""What a start does not load: help and typos need no torch, `--check` no DeepSpeed, and training no compiler."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

CHOOSE = "from dist_mem.runtime.distributed import choose_accelerator; choose_accelerator()"
START_ENGINE = f"{CHOOSE}; from dist_mem.engine import engine, start"
MAIN = "import shlex; from dist_mem.__main__ import main\ntry: main(shlex.split({!r}))\nexcept SystemExit: pass"
CHECK = "train configs/pg19_small.yaml train.global_batch_size=4 train.micro_batch_size=2 --check data.path=BOOKS"
PYTHON = """
import dist_mem
model = dist_mem.load("example")
memory = model.read("ba ko mi ru ten sol qua ver")
model.score("ba ko", memory=memory)
list(model.generate("ba", memory=memory, num_tokens=3))
"""
TORCH, HEAVY = {"torch", "mlflow", "sentencepiece", "webdataset"}, {"deepspeed", "mlflow", "webdataset"}


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        *((MAIN.format(command), TORCH) for command in ("--help", "train --help", "config", "train train.stps=1")),
        ("import dist_mem", {*TORCH, "numpy"}),
        (PYTHON, {"deepspeed", "mlflow"}),
        # torch._dynamo comes with the first operation on meta tensors
        pytest.param(MAIN.format(CHECK), HEAVY, marks=pytest.mark.core),
        ("from dist_mem.data import lanes", HEAVY),
        (f"{START_ENGINE}; start._import_muon_uncompiled()", {"torch._inductor.compile_fx", "mlflow"}),
    ],
)
def test_modules_that_are_not_needed_are_not_loaded(statement: str, unwanted: set[str], books: Path) -> None:
    """torch is a second, its compiler 0.8 s and 43 MB, mlflow a second; on every rank."""
    code = f"{statement}\nimport sys\nprint(sorted({unwanted} & sys.modules.keys()))"
    command = [sys.executable, "-W", "ignore", "-c", code.replace("BOOKS", str(books))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--check" not in statement or "vocabulary  257" in done.stdout
