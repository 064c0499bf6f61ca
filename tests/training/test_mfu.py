"""Model FLOPs utilisation: what it counts, and what it is compared with."""

from __future__ import annotations

import pytest
import torch

from dist_mem.estimate.counting import Flops
from dist_mem.runtime.distributed import World
from dist_mem.training.mfu import Utilisation, measured_flops, peak_flops
from tests.support.tiny import tiny_config

GPU_WORLD = World(0, 1, 0, 1, torch.device("cuda"))
CPU_WORLD = World(0, 1, 0, 1, torch.device("cpu"))


def test_tokens_without_a_backward_count_as_scored() -> None:
    """10 tokens are read, 4 of them with a backward: 6 x 2 + 4 x 6 FLOPs of 100 in a second, in 2 s."""
    assert Utilisation(Flops(2, 6), 100.0).share(num_tokens=10, num_learned=4, seconds=2.0) == 36 / 200


@pytest.mark.parametrize(
    ("name", "precision", "tf32", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", False, 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp32", False, 66.9e12),
        ("NVIDIA H100 80GB HBM3", "fp32", True, 494.7e12),
        ("Tesla V100-SXM2-32GB", "fp32", True, 15.7e12),
        ("Tesla V100-SXM2-32GB", "bf16", False, None),
        ("Some GPU of 2030", "bf16", False, None),
    ],
)
def test_peak_of_a_gpu_is_that_of_its_name_and_precision(
    monkeypatch: pytest.MonkeyPatch, name: str, precision: str, tf32: bool, expected: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high" if tf32 else "highest")
    assert peak_flops(tiny_config({"train": {"precision": precision}}).train, GPU_WORLD) == pytest.approx(expected)
    given = tiny_config({"train": {"precision": precision, "peak_tflops": 2.5}})
    assert peak_flops(given.train, GPU_WORLD) == peak_flops(given.train, CPU_WORLD) == 2.5e12


def test_peak_of_a_processor_is_measured_once_without_drawing_random_numbers() -> None:
    before = torch.get_rng_state()
    first = measured_flops(torch.float32, 1)
    assert first > 1e8 and measured_flops(torch.float32, 1) == first
    assert torch.equal(torch.get_rng_state(), before)
