"""The kernels of a compiled block can be compiled for a GPU, which this machine need not have."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tests.support.paths import ROOT

CAN_COMPILE = torch.backends.cuda.is_built() and find_spec("triton") is not None and not torch.cuda.is_available()
SMALL = "--seg-len 128 --mem-len 128 --lanes 1 --d-model 64 --num-heads 1 --d-inner 64"


@pytest.mark.nightly
@pytest.mark.skipif(not CAN_COMPILE, reason="needs torch's CUDA build with Triton, and no GPU")
@pytest.mark.parametrize("case", ["block of none", "block of transformer_xl"])
def test_fused_attention_of_a_compiled_block_has_kernels(case: str) -> None:
    command = [sys.executable, "benchmarks/kernels.py", *SMALL.split(), "--cases", case]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "flex_attention_backward" in done.stdout
