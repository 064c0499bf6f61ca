"""Every memory computes forward and backward on a device that is not the CPU, without a tensor elsewhere.

Torch has no kernels for the device; the tensors are fake ones, which have shapes and devices only. Forwards alone also
run on fake CUDA tensors (test_fake_cuda.py); without CUDA, torch has no autograd thread for them. Torch cannot forget
the device, so each test runs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from dist_mem.contract.subject import Size, total_loss
from dist_mem.memory import memory_kinds
from dist_mem.memory.base import named_tensors
from dist_mem.memory.parts import basis
from dist_mem.model import MemoryLM
from dist_mem.nn import chunked_attention
from tests.support.contract_cases import CASES, LANES, MET_BY_ALL, SEG_LEN, accepted, subject
from tests.support.own_process import in_child

DEVICE = "pretend"
SIZE = Size(lanes=LANES, seg_len=SEG_LEN, segments=2, layers=2)


def compute_on_the_device(cases: Iterable[str]) -> None:
    """Compute two segments of every case by every back end, and the gradient of the second one's losses."""
    _setup_privateuseone_for_python_backend(DEVICE)
    chunked_attention.CHUNK = 3
    made = torch.tensor
    # Fake tensors with values exist on real devices only.
    torch.tensor = lambda *given, device=None, **options: made(*given, **options).to(device)
    models = {
        (case, back_end): replace(subject(case, attention=back_end), size=SIZE).model()
        for case in cases
        for back_end in ("simple", "chunked", "sdpa")
        if accepted(case, back_end)
    }
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # of weights, to make fake ones
    for key, fit in basis._SOLVED.items():  # by the models, on the CPU
        basis._SOLVED[key] = basis.Fit(*(mode.from_tensor(part) for part in fit))
    for name, model in models.items():
        with mode:
            check(name, model.to_empty(device=DEVICE))


def check(name: tuple[str, str], model: MemoryLM) -> None:
    tokens = torch.zeros(LANES, SEG_LEN, dtype=torch.int64, device=DEVICE)
    lanes = torch.zeros(LANES, dtype=torch.int64, device=DEVICE)
    output = model(tokens, tokens, lanes, state=model.init_state(lanes, DEVICE, torch.float32))
    output = model(tokens, tokens, lanes, state=output.state)
    total_loss(output).backward()
    parts = {**named_tensors(output.state), "nll": output.nll}
    parts |= {name: parameter.grad for name, parameter in model.named_parameters()}
    elsewhere = {name: part for name, part in parts.items() if part is None or part.device.type != DEVICE}
    assert not elsewhere, name


def test_forward_and_backward_stay_on_the_device() -> None:
    in_child(compute_on_the_device, memory_kinds())


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(MET_BY_ALL, id="met by all"),
        pytest.param(set(CASES) - MET_BY_ALL - set(memory_kinds()), id="others", marks=pytest.mark.nightly),
    ],
)
def test_forward_and_backward_of_further_variants_stay_on_the_device(cases: set[str]) -> None:
    in_child(compute_on_the_device, sorted(cases))
