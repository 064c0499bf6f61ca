"""The checks of all gradients at once say what DeepSpeed's of each say."""

from __future__ import annotations

import math

import pytest
import torch

from dist_mem.engine.fused_checks import has_not_finite, squared_norm

SIZES = (1, 7, 0, 1000)


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype) -> None:
    from deepspeed.runtime.utils import has_inf_or_nan

    for bad in (0.0, math.inf, -math.inf, math.nan):
        for place in (0, 1, 3):
            given = gradients(dtype)
            given[place][-1] = bad
            assert bool(has_not_finite(given)) is any(map(bool, map(has_inf_or_nan, given))) is (bad != 0.0)
    assert not has_not_finite([])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_has_the_bits_of_norms_of_float64(dtype: torch.dtype) -> None:
    given = [one for one in gradients(dtype) if one.numel()]
    expected = torch.stack([torch.linalg.vector_norm(one.double()) for one in given]).pow(2).sum().float()
    assert torch.equal(squared_norm(gradients(dtype)), expected)
    assert squared_norm([]) == 0.0
