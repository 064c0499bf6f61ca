"""Every memory computes on other devices than the CPU without a tensor elsewhere: on CUDA, and on one without kernels.

The tensors are fake ones, which have shapes and devices only. On CUDA a forward takes the paths of a GPU; its backward
would need a device, so the private one has it. A torch that is built without CUDA refuses even fake CUDA tensors,
because it has nothing that switches between devices; a C++ file of three lines gives it something that does not switch.
Torch cannot forget what was registered, so each test runs in a process of its own.
"""

import ctypes
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from dist_mem.contract.subject import SubjectSize, total_loss
from dist_mem.memory import memory_kinds
from dist_mem.memory.base import named_tensors
from dist_mem.memory.parts import basis
from dist_mem.model import MemoryLM
from dist_mem.nn import chunked_attention
from dist_mem.nn.attention import BACK_ENDS
from dist_mem.nn.stepping import Places
from dist_mem.runtime.compilers import cpp_compiler
from tests.support.contract_cases import CASES, LANES, MET_BY_ALL, SEG_LEN, accepted, subject
from tests.support.own_process import in_child

PRIVATE, ON_PRIVATE = "pretend", ["simple", "chunked", "sdpa"]
SIZE = SubjectSize(lanes=LANES, seg_len=SEG_LEN, segments=2, layers=2)
SWITCH = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""


def device_switch(folder: Path) -> Path:
    """Compile the library that lets torch work with fake CUDA tensors; it needs torch's smallest headers only."""
    source, library = folder / "switch.cpp", folder / "switch.so"
    source.write_text(SWITCH)
    torch_dir, compiler = Path(torch.__file__).parent, cpp_compiler()
    assert compiler, "no C++ compiler: apt-get install g++"
    options = ["-std=c++20", "-shared", "-fPIC", f"-I{torch_dir / 'include'}", f"-L{torch_dir / 'lib'}", "-lc10"]
    subprocess.run([compiler, str(source), "-o", str(library), *options], check=True)
    return library


def compute_on_cuda(library: Path | None, cases: Iterable[tuple[str, str]]) -> None:
    if library is not None:
        ctypes.CDLL(str(library))
    compute("cuda", cases)


def compute_on_the_private_device(cases: Iterable[tuple[str, str]]) -> None:
    _setup_privateuseone_for_python_backend(PRIVATE)
    made = torch.tensor
    # Fake tensors with values exist on real devices only.
    torch.tensor = lambda *given, device=None, **options: made(*given, **options).to(device)
    compute(PRIVATE, cases)


def compute(device: str, cases: Iterable[tuple[str, str]]) -> None:
    """Compute two segments of every case by its back end, and not on CUDA the gradient of the second one's losses."""
    chunked_attention.CHUNK = 3
    for case, back_end in cases:
        model = replace(subject(case, attention=back_end), size=SIZE).model()
        mode = FakeTensorMode(allow_non_fake_inputs=True)  # of weights, to make fake ones
        solved = dict(basis._SOLVED)
        for key, fit in solved.items():  # by the model, on the CPU
            basis._SOLVED[key] = basis.Fit(*(mode.from_tensor(part) for part in fit))
        with mode, torch.set_grad_enabled(device != "cuda"):
            elsewhere = parts_elsewhere(device, model.to_empty(device=device))
        assert not elsewhere, (case, back_end)
        basis._SOLVED.clear()
        basis._SOLVED.update(solved)


def parts_elsewhere(device: str, model: MemoryLM) -> list[str]:
    tokens = torch.zeros(LANES, SEG_LEN, dtype=torch.int64, device=device)
    lanes = torch.zeros(LANES, dtype=torch.int64, device=device)
    output = model(tokens, tokens, lanes, state=model.init_state(lanes, device, torch.float32))
    output = model(tokens, tokens, lanes, state=output.state)
    parts = {**named_tensors(output.state), "nll": output.nll}
    if torch.is_grad_enabled():
        total_loss(output).backward()
        parts |= {name: parameter.grad for name, parameter in model.named_parameters()}
    elif model.can_step:
        row = lanes[:, None]
        places = Places(row, num_real=lanes, end=1, behind=row, seg_len=SEG_LEN)
        parts["row"], opened = model.step_rows(tokens[:, :1], model.open(output.state, lanes), places)
        parts |= named_tensors(opened)
    return [name for name, part in parts.items() if part is None or part.device.type != device]


def pairs(cases: Iterable[str], back_ends: Iterable[str]) -> list[tuple[str, str]]:
    return [(case, back_end) for case in cases for back_end in back_ends if accepted(case, back_end)]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(pairs(memory_kinds(), ["simple"]), id="every memory"),
        pytest.param(pairs(["transformer_xl"], BACK_ENDS[2:]), id="every back end"),
        pytest.param(pairs(memory_kinds(), BACK_ENDS[2:]), id="all of both"),
    ],
)
def test_forward_stays_on_fake_cuda(cases: list[tuple[str, str]], tmp_path: Path) -> None:
    built_with_cuda = torch.backends.cuda.is_built()
    in_child(compute_on_cuda, None if built_with_cuda else device_switch(tmp_path), cases)


def test_forward_and_backward_stay_on_the_device() -> None:
    in_child(compute_on_the_private_device, pairs(memory_kinds(), ON_PRIVATE))


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(MET_BY_ALL, id="met by all"),
        pytest.param(set(CASES) - MET_BY_ALL - set(memory_kinds()), id="others", marks=pytest.mark.nightly),
    ],
)
def test_forward_and_backward_of_further_variants_stay_on_the_device(cases: set[str]) -> None:
    in_child(compute_on_the_private_device, pairs(sorted(cases), ON_PRIVATE))
