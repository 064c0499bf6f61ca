"""Norms of the rows of a block: layer norm, and Llama's root-mean-square norm (Zhang & Sennrich 2019).

Called with `frozen`, a norm gives its input a gradient, and its weights none.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dist_mem.nn.layer_spec import LayerSpec


class Norm(nn.LayerNorm):
    """Layer norm, with gain and bias."""

    def forward(self, x: Tensor, frozen: bool = False) -> Tensor:
        gain, bias = (self.weight.detach(), self.bias.detach()) if frozen else (self.weight, self.bias)
        return F.layer_norm(x, self.normalized_shape, gain, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """Division by the root mean square, with a gain only."""

    def forward(self, x: Tensor, frozen: bool = False) -> Tensor:
        assert self.weight is not None
        return F.rms_norm(x, self.normalized_shape, self.weight.detach() if frozen else self.weight, self.eps)


class ExactNorm(nn.RMSNorm):
    """Root-mean-square norm in the precision of its input, which is at least float32."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(d_model: int, *, rms_eps: float | None) -> Norm | RMSNorm:
    """Return the norm of a model; `rms_eps` None: layer norm."""
    return Norm(d_model) if rms_eps is None else RMSNorm(d_model, eps=rms_eps)


def input_norm(spec: LayerSpec) -> nn.Module:
    """Return the norm of a memory's input; with post-norm there is none."""
    return make_norm(spec.d_model, rms_eps=spec.rms_eps) if spec.norm == "pre" else nn.Identity()
