"""The back end of a linear memory (`memory.kernels`), and what is said of the choice; no kernel is run here."""

from typing import Any

import pytest
import torch

from dist_mem.memory.base import describe_back_ends
from dist_mem.memory.parts import linear_check
from dist_mem.memory.parts.linear_check import choose
from dist_mem.nn.attention import BackEndChoice
from tests.support.contract_cases import CASES, small_block, small_model, subject
from tests.support.messages import refused, said

SIZES: dict[str, Any] = {"d_key": 64, "d_value": 128, "delta": True, "by_row": False}


def chosen(
    kernels: str = "auto", device_type: str = "cuda", dtype: torch.dtype = torch.bfloat16, **more: Any
) -> BackEndChoice:
    return choose(kernels, device_type, dtype, **{**SIZES, **more})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_check, "why_not", lambda: None)


@pytest.mark.usefixtures("installed")
def test_auto_takes_the_kernels_on_gpus_and_says_why_it_does_not() -> None:
    assert chosen().back_end == "fla"
    assert chosen("torch") == BackEndChoice("torch", "memory.kernels")
    unsuited: dict[str, dict[str, Any]] = {
        "run on GPUs": {"device_type": "cpu"},
        "float64": {"dtype": torch.float64},
        "train.tf32": {"dtype": torch.float32},
        "memory.d_key": {"d_key": 257},
    }
    for word, given in unsuited.items():
        choice = chosen(**given)
        assert choice.back_end == "torch" and word in choice.reason


@pytest.mark.usefixtures("installed")
def test_kernels_that_differ_on_the_device_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` says so and takes PyTorch; who asks for the kernels gets an error, with both numbers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    said: list[str | None] = [None, "the matrix of the kernel is 1 where the recurrence's is 2"]
    monkeypatch.setattr(linear_check, "difference", lambda *sizes: said[0])
    monkeypatch.setattr(linear_check, "spreads_decays", lambda: True)
    assert "decays per head as decays per row" in chosen("fla").reason
    assert "per row" not in chosen(by_row=True).reason
    said.reverse()
    assert chosen() == BackEndChoice("torch", "the matrix of the kernel is 1 where the recurrence's is 2")
    with refused(ValueError, "memory.kernels is fla", "is 1", "is 2", "auto or torch"):
        chosen("fla")


def test_kernels_that_cannot_run_are_an_error_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(ValueError, "memory.kernels is fla", "this device is cpu", "auto or torch"):
        describe_back_ends(subject_with("fla"), "cpu", torch.float32)
    assert chosen("fla").back_end == "fla"  # plans need no package
    monkeypatch.setattr(linear_check, "why_not", lambda: "fla-core is not installed (pip install 'dist-mem[fla]')")
    assert chosen().back_end == "torch"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with refused(ValueError, "memory.kernels is fla", "pip install 'dist-mem[fla]'"):
        chosen("fla")


def subject_with(kernels: str) -> torch.nn.Module:
    case = subject("linear")
    block = {**case.block(case.size.seg_len), "kernels": kernels}
    return type(case)(lambda seg_len: block, case.size).model()


def test_the_start_says_what_computes_a_memory() -> None:
    assert describe_back_ends(subject_with("torch"), "cpu", torch.float32) == [
        "memory of 3 of 3 layers: torch (memory.kernels)"
    ]
    (line,) = describe_back_ends(small_model("linear"), "cpu", torch.float32)
    assert line.startswith("memory of 3 of 3 layers: torch (flash-linear-attention's kernels run on GPUs")
    assert describe_back_ends(small_model("transformer_xl"), "cpu", torch.float32) == []


@pytest.mark.parametrize("below", [{"kind": "causal"}, {"kind": "linear", "over": {"kind": "linear"}}])
def test_memories_of_one_layer_are_counted_once(below: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "here", small_block("linear", over=below))
    (line,) = describe_back_ends(small_model("here"), "cpu", torch.float32)
    said(line, "of 3 of 3 layers")
