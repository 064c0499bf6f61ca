"""The interface to DeepSpeed: one update.

This module handles behaviour of DeepSpeed that would surprise: it divides the loss by the accumulation steps on top of
our division; it silently skips an update if a gradient is not finite (and in fp32 without ZeRO corrupts every parameter
instead).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from dist_mem.block import any_compiled, compile_blocks_of
from dist_mem.config import OptimizerConfig, TrainConfig
from dist_mem.engine import zero_restore, zero_state
from dist_mem.engine.defaults import deepspeed_config
from dist_mem.engine.gradient_norms import GradientNorms, Norms
from dist_mem.engine.muon import MuonAdamW
from dist_mem.engine.optimizer import build_optimizer, describe_rules, num_trained
from dist_mem.engine.start import gather_whole_blocks, start_deepspeed
from dist_mem.engine.zero_restore import Counters, ReadSlice
from dist_mem.engine.zero_state import Slice
from dist_mem.model import DocumentStarts, LMOutput, LMState, MemoryLM
from dist_mem.nn.half_products import widen_half_products
from dist_mem.nn.layers import DTYPES


class Engine:
    """A model under DeepSpeed: call it for a forward, then `backward`, and `step` once an update."""

    def __init__(
        self,
        model: MemoryLM,
        train: TrainConfig,
        optimizer: OptimizerConfig,
        block: dict[str, Any],
        *,
        world_size: int,
        accumulation: int,
        auxiliary_parameters: Collection[str] = (),
    ) -> None:
        """`auxiliary_parameters`: names of parameters whose gradient norm is logged separately."""
        on_gpu = torch.cuda.is_available()
        torch_optimizer = build_optimizer(model, optimizer, fused=on_gpu)
        self.rules = describe_rules(torch_optimizer)  # messages, also of how products are computed
        self.config = deepspeed_config(
            block,
            train,
            world_size=world_size,
            accumulation=accumulation,
            num_parameters=num_trained(torch_optimizer),
            on_gpu=on_gpu,
        )
        if on_gpu and train.compile is None:
            compile_blocks_of(model, True)
        if any_compiled(model):
            gather_whole_blocks(model)
        self._engine = start_deepspeed(model, torch_optimizer, self.config)
        self.lr = self._lr = optimizer.lr  # of the last update, for groups that set none
        self._peak_lrs = [group["lr"] for group in self._engine.optimizer.param_groups]
        self.dtype = DTYPES[train.precision]
        self.device = self._engine.device
        if widen_half_products(self.device, self.dtype):
            reason = "this CPU has no instructions for it"
            self.rules.append(f"products in {train.precision} are computed in fp32: {reason}")
        self.stage: int = self._engine.zero_optimization_stage()
        if isinstance(torch_optimizer, MuonAdamW):
            where = zero_state.matrices_of(self._engine)
            torch_optimizer.bind(where, self.device, is_replicated=self.stage == 0)
        self._unguarded = self.stage == 0 and self.dtype == torch.float32
        self.restored_empty: list[str] = []  # parameters whose optimizer state `restore` did not find
        self._gradient_norm_before: Tensor | None = None  # before clipping, if `_unguarded`
        self._norms = GradientNorms(self._engine, auxiliary_parameters) if auxiliary_parameters else None

    def __call__(self, *args: Tensor, state: LMState, later: Sequence[DocumentStarts | None] = ()) -> LMOutput:
        return self._engine(*args, state=state, later=later)

    @property
    def module(self) -> MemoryLM:
        """The model as DeepSpeed holds it; under ZeRO-3 its parameters are empty outside a forward."""
        return self._engine.module

    def train(self, mode: bool = True) -> None:
        """Switch dropout on or off."""
        self._engine.train(mode)

    def init_state(self, document_ids: Tensor) -> LMState:
        """Return empty memories of lanes that begin these documents, (B,) int64, with the engine's device and dtype."""
        return self.module.init_state(document_ids.to(self.device), self.device, self.dtype)

    def backward(self, loss: Tensor) -> None:
        """Run the backward of a normalized micro-loss, which DeepSpeed must not divide by the accumulation steps."""
        self._engine.backward(loss, scale_wrt_gas=False)

    @property
    def loss_scale(self) -> float:
        """The factor of all gradients of a backward: of fp16, the present loss scale."""
        return float(self._engine.optimizer.loss_scaler.cur_scale) if self.dtype == torch.float16 else 1.0

    def end_micro_batch(self) -> None:
        """Count a micro-batch that is not the last of its update."""
        self._engine.step()

    def gradients_finite(self) -> bool:
        """Return whether it is safe to `step`, the same on all ranks; call it after the last backward.

        Only fp32 without ZeRO needs the check; in all other cases DeepSpeed skips the update.
        """
        if not self._unguarded:
            return True
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        self._gradient_norm_before = torch.nn.utils.get_total_norm(gradients)
        return math.isfinite(self._gradient_norm_before)

    def step(self, lr_factor: float, *, is_logged: bool = True) -> bool:
        """Update with each group's peak learning rate times `lr_factor`; return False if DeepSpeed skipped it.

        Args:
            is_logged: measure `gradient_norms`, about a thousand kernels for a large model.
        """
        for group, peak in zip(self._engine.optimizer.param_groups, self._peak_lrs, strict=True):
            group["lr"] = peak * lr_factor
        self.lr = self._lr * lr_factor
        self._end_update(is_logged)
        return self._engine.was_step_applied()

    def least_loss_scale(self) -> float | None:
        """Return the fp16 loss scale if an overflow can make it no smaller: it is constant, or at its minimum."""
        scaler = self._engine.optimizer.loss_scaler
        return None if scaler.dynamic and scaler.cur_scale > scaler.min_scale else float(scaler.cur_scale)

    def discard(self, *, is_logged: bool = True) -> None:
        """End an update without applying it: parameters and optimizer are unchanged; an fp16 loss scale is updated."""
        optimizer: Any = zero_state.base_optimizer(self._engine)
        optimizer.step = lambda *_, **__: None  # DeepSpeed runs its whole step, and clears the accumulated gradients
        try:
            self._end_update(is_logged)
        finally:
            del optimizer.step

    def _end_update(self, is_logged: bool) -> None:
        if self._norms is None:
            self._engine.step()
            return
        with self._norms.measuring(is_logged):
            self._engine.step()

    def gradient_norm(self) -> float:
        """Return the global gradient norm of the last update before clipping; nan if DeepSpeed does not know it."""
        norm = self._gradient_norm_before if self._unguarded else self._engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def gradient_norms(self) -> Norms | None:
        """Return the gradient norms of the model and of its `auxiliary_parameters`; collective.

        None without such parameters, and if the last update was not logged.
        """
        return None if self._norms is None else self._norms.norms(self.gradient_norm())

    def owned_slices(self) -> list[Slice]:
        """Return what this rank saves, as live views: the ranks together own every element exactly once."""
        return zero_state.owned_slices(self._engine)

    def metadata(self) -> dict[str, Any]:
        """Return the content of engine.json besides the ranks' ranges; the same on every rank."""
        return {"dtype": str(self.dtype).removeprefix("torch."), **zero_state.metadata(self._engine)}

    def restore(self, read: ReadSlice, counters: Counters) -> None:
        """Load a checkpoint of any ZeRO stage and number of ranks into this engine, fresh or already trained.

        Every rank calls it, between two updates. Learning rates and weight decay remain those of the configuration.

        Args:
            read: `EngineReader.read`.
            counters: `EngineReader.counters`.

        Raises:
            UnusableError: on every rank; the checkpoint lacks something, or does not fit this engine's partitions.
        """
        self.restored_empty = zero_restore.restore(self._engine, read, counters)
