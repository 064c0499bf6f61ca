"""Separate gradient norms of the model and of parameters with an auxiliary loss, such as a compression.

One clip at the norm of all gradients serves model and compression, which Rae et al. 2020 do not specify: a large
gradient of one shortens the steps of the other. So both norms are logged. They are computed from the gradients that
torch's optimizer receives, flat and partitioned by ZeRO, and scaled to the norm before the clip.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dist_mem.engine.zero_state import DeepSpeedEngine, Span, base_optimizer, flats


class Norms(NamedTuple):
    """Gradient norms of the last update before clipping; their squares add up to the square of the global norm."""

    model: float
    auxiliary: float  # of the parameters with an auxiliary loss


class GradientNorms:
    """Measures gradient norms in a hook on the steps of torch's optimizer under a DeepSpeed engine."""

    def __init__(self, engine: DeepSpeedEngine, auxiliary_parameters: Collection[str]) -> None:
        """`auxiliary_parameters`: names of the parameters with an auxiliary loss."""
        self._auxiliary = frozenset(auxiliary_parameters)
        self._is_cut = engine.zero_optimization_stage() > 0  # otherwise every rank has all gradients
        self._spans: dict[torch.Tensor, list[Span]] = {flat.key: flat.spans for flat in flats(engine)}
        self._squares = torch.zeros(2, device=engine.device)
        self._num_steps = 0  # of torch's optimizer in the last update
        self._optimizer = base_optimizer(engine)
        self._is_measured = False  # the last update

    @contextmanager
    def measuring(self, is_logged: bool) -> Iterator[None]:
        """Measure the update in the block, which at stage 3 is many steps of the optimizer; not if it is not logged."""
        self._is_measured = is_logged
        if not is_logged:
            yield
            return
        self._squares.zero_()
        self._num_steps = 0
        hook = self._optimizer.register_step_pre_hook(self._note)
        try:
            yield
        finally:
            hook.remove()

    def _note(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._num_steps += 1
        for group in optimizer.param_groups:
            for key in group["params"]:
                if key.grad is None:
                    continue
                for name, start, stop, offset in self._spans[key]:
                    part = key.grad.view(-1)[offset : offset + stop - start]
                    self._squares[int(name in self._auxiliary)] += part.float().square().sum().to(self._squares.device)

    def norms(self, total: float) -> Norms | None:
        """Divide the global norm `total` into its two parts, None if they were not measured; every rank calls it.

        An update that is discarded, or that DeepSpeed skips, makes no step of torch's optimizer, which is measured.
        """
        if not self._is_measured:
            return None
        sums = torch.cat([self._squares, self._squares.new_tensor([self._num_steps])])
        if self._is_cut:
            dist.all_reduce(sums)
        model, auxiliary, num_steps = sums.tolist()
        if not num_steps:
            return None
        scale = total / math.sqrt(model + auxiliary) if model + auxiliary else 0.0
        return Norms(scale * math.sqrt(model), scale * math.sqrt(auxiliary))
