"""Matrix products of half precision on processors without instructions for it.

There torch multiplies bf16 and fp16 by a loop that is 3 to 80 times slower than float32's, depending on which operand
is transposed. Products are computed in float32 instead and rounded once, the precision that instructions for bf16 have.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import Library

HALF = {"_is_mkldnn_bf16_supported": torch.bfloat16, "_is_mkldnn_fp16_supported": torch.float16}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")  # those that `linear`, `matmul`, `einsum` and their gradients end in
_library: list[Library] = []  # what it registers ends with it


def widen_half_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Compute this process's products of `dtype` in float32 from now on, if the device is a CPU that lacks them.

    Args:
        dtype: of the operands; nothing changes for another.

    Returns:
        Whether they are computed so.
    """
    if device.type != "cpu" or dtype not in _find_lacking():
        return False
    if not _library:
        library = Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*previously registered kernel", category=UserWarning)
            for name in PRODUCTS:
                library.impl(name, _widen(getattr(torch, name)), "CPU")
        _library.append(library)
    return True


def _find_lacking() -> set[torch.dtype]:
    """Return the dtypes for which torch has no instructions of this processor; empty if it cannot tell."""
    return {dtype for name, dtype in HALF.items() if not getattr(torch.ops.mkldnn, name, lambda: True)()}


def _widen(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the kernel of a product, below autograd; torch's own one is reached by `out`, which is not replaced."""

    def kernel(*operands: Tensor, **factors: float) -> Tensor:
        dtypes = {operand.dtype for operand in operands}
        if len(dtypes) == 1 and (dtype := dtypes.pop()) in HALF.values():
            wide = product(*(operand.float() for operand in operands), **factors, out=torch.empty(0))
            return wide.to(dtype)
        return product(*operands, **factors, out=operands[0].new_empty(0))

    return kernel
