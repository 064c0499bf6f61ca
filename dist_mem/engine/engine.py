"""The interface to DeepSpeed: its configuration, its start, and one update.

This module handles behaviour of DeepSpeed that would surprise: it divides the loss by the accumulation steps on top of
our division; it silently skips an update if a gradient is not finite (and in fp32 without ZeRO corrupts every parameter
instead); it clips at norm 1 by default; it ignores unknown top-level keys (refused in the configuration).
"""

from __future__ import annotations

import copy
import io
import logging
import math
import re
import sys
import warnings
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.cpp_extension import _get_build_directory

from dist_mem.config import Config, TrainConfig
from dist_mem.engine import zero_restore, zero_state
from dist_mem.engine.cpu_op import CPU_OP, building
from dist_mem.engine.gradient_norms import GradientNorms, Norms
from dist_mem.engine.optimizer import build_optimizer
from dist_mem.engine.zero_restore import Counters, ReadSlice
from dist_mem.engine.zero_state import DeepSpeedEngine, Slice
from dist_mem.errors import run_error
from dist_mem.model import LMOutput, LMState, MemoryLM
from dist_mem.nn.layers import DTYPES
from dist_mem.runtime.distributed import announced, print_on_rank0

try:
    # DeepSpeed's autotuner imports mlflow if it can, on every rank: 1.7 s, 115 MB and a telemetry client. A None here
    # makes that import fail, which the autotuner handles; mlflow_run.py imports mlflow later, on rank 0 only.
    cast(dict[str, Any], sys.modules).setdefault("mlflow", None)
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime import compiler as deepspeed_compiler
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.config import DeepSpeedConfigError
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.utils import logger as deepspeed_logger
finally:
    if sys.modules["mlflow"] is None:
        del sys.modules["mlflow"]

# DeepSpeed 0.19 calls collectives by names that torch 2.13 deprecates: a warning at every step that no user can fix.
warnings.filterwarnings("ignore", r".*`torch.distributed.\w+` is deprecated", FutureWarning)


def deepspeed_config(
    block: dict[str, Any], train: TrainConfig, *, world_size: int, accumulation: int
) -> dict[str, Any]:
    """Return the user's `deepspeed:` block with the keys that this project sets.

    Args:
        block: the block as the user wrote it, without those keys.
        accumulation: forward and backward passes of one rank in one update.
    """
    owned = {
        "train_micro_batch_size_per_gpu": train.micro_lanes,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": train.micro_lanes * accumulation * world_size,
        "gradient_clipping": train.max_grad_norm or 0.0,  # DeepSpeed's default is 1.0
        "zero_allow_untested_optimizer": True,  # torch's optimizers, which our tests check
        "zero_force_ds_cpu_optimizer": False,  # offloading works with torch's Adam too
        "steps_per_print": None,
    }
    merged = copy.deepcopy(block)
    for precision in ("bf16", "fp16"):
        merged[precision] = {**merged.get(precision, {}), "enabled": train.precision == precision}
    return {**merged, **owned}


def _import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon, whose class ZeRO checks every optimizer against, without compiling it.

    Its decorators would load torch's compiler, 0.8 s and 43 MB on every rank.
    """
    decorator = deepspeed_compiler.compile
    deepspeed_compiler.compile = lambda: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        deepspeed_compiler.compile = decorator


def _refuse_what_cannot_be_saved(zero: dict[str, Any]) -> None:
    """Raise ValueError for options of `zero_optimization` whose state zero_state.py cannot find."""
    for key in ("offload_optimizer", "offload_param"):
        if (zero.get(key) or {}).get("device") == "nvme":
            raise ValueError(
                f"deepspeed.zero_optimization.{key}.device=nvme: dist_mem cannot save what is on an NVMe drive; set cpu"
            )
    for key in ("zenflow", "zero_quantized_nontrainable_weights"):
        if zero.get(key):
            raise ValueError(f"deepspeed.zero_optimization.{key}: dist_mem cannot save what it keeps; leave it out")


def _start_deepspeed(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> DeepSpeedEngine:
    _refuse_what_cannot_be_saved(config.get("zero_optimization") or {})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _import_muon_uncompiled()
    try:
        engine, _, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, model_parameters=trained, config=config
        )
    except (AssertionError, DeepSpeedConfigError, NotImplementedError) as error:
        raise ValueError(f"deepspeed: DeepSpeed refuses this block: {error}") from error
    if isinstance(engine.optimizer, BF16_Optimizer):
        raise ValueError(
            "deepspeed.data_types.grad_accum_dtype: with bf16 at ZeRO stage 1 DeepSpeed takes an optimizer that cannot "
            "be saved here; set deepspeed.zero_optimization.stage=2, or leave the key out"
        )
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer) and engine.fp16_enabled():
        raise ValueError(
            "train.precision=fp16: without ZeRO DeepSpeed divides gradients by a loss scale with which it has not "
            "multiplied the loss, and nothing is learnt; set deepspeed.zero_optimization.stage=1"
        )
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        # Half precision without ZeRO: it made a step without gradients, which decays weights and counts in Adam.
        engine.optimizer.refresh_fp32_params()
        engine.optimizer.optimizer.state.clear()
    return engine


def start_communication() -> None:
    """Start DeepSpeed's communication; on CPUs load its op, compiled at the first start on a machine.

    Raises:
        ValueError: the op could not be compiled; names the reason and the fix.
    """
    try:
        if torch.distributed.get_backend() == "gloo":
            directory = Path(_get_build_directory(CPU_OP, False))
            announcement: AbstractContextManager[None] = announced(
                f"waiting for {CPU_OP}: another job loads or compiles it"
            )
            if not (directory / f"{CPU_OP}.so").exists():
                print_on_rank0("compiling DeepSpeed's CPU communication op, once for this environment: 1 to 3 minutes")
                announcement = nullcontext()
            with announcement, building(directory), redirect_stdout(io.StringIO()):
                get_accelerator().create_op_builder("ShareMemCommBuilder").load()
        with redirect_stdout(io.StringIO()):  # it prints its success on every rank
            deepspeed.init_distributed(torch.distributed.get_backend())
    except (ImportError, OSError, RuntimeError) as error:  # ImportError: another rank's compiler failed
        reasons = re.findall(r"^.*(?:not found|[Ee]rror: ).*$", str(error).partition("\n")[2], re.MULTILINE)
        message = (
            f"DeepSpeed could not compile its CPU communication op ({reasons[0] if reasons else error}): install a C++ "
            "compiler ('apt-get install g++'), and see that TORCH_EXTENSIONS_DIR (default: in "
            "~/.cache/torch_extensions) can be written"
        )
        raise run_error(error if isinstance(error, OSError) else ValueError(error), message) from error


class Engine:
    """A model under DeepSpeed: call it for a forward, then `backward`, and `step` once an update."""

    def __init__(
        self,
        model: MemoryLM,
        config: Config,
        block: dict[str, Any],
        *,
        world_size: int,
        accumulation: int,
        auxiliary_parameters: Collection[str] = (),
    ) -> None:
        """`auxiliary_parameters`: names of parameters whose gradient norm is logged separately."""
        deepspeed_logger.setLevel(logging.WARNING)  # dozens of lines per start without use to the user
        optimizer = build_optimizer(model, config.optimizer)
        self.config = deepspeed_config(block, config.train, world_size=world_size, accumulation=accumulation)
        self._engine = _start_deepspeed(model, optimizer, self.config)
        self.lr = self._lr = config.optimizer.lr  # of the last update, for groups that set none
        self._peak_lrs = [group["lr"] for group in self._engine.optimizer.param_groups]
        self.dtype = DTYPES[config.train.precision]
        self.device = self._engine.device
        self.stage: int = self._engine.zero_optimization_stage()
        self._unguarded = self.stage == 0 and self.dtype == torch.float32
        self._gradient_norm_before: float | None = None  # of the last update before clipping, if `_unguarded`
        self._norms = GradientNorms(self._engine, auxiliary_parameters) if auxiliary_parameters else None

    def __call__(self, *args: Tensor, state: LMState) -> LMOutput:
        return self._engine(*args, state=state)

    @property
    def module(self) -> MemoryLM:
        """The model as DeepSpeed holds it; under ZeRO-3 its parameters are empty outside a forward."""
        return self._engine.module

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's optimizer, for tests that compare its moments."""
        return self._engine.optimizer

    def train(self, mode: bool = True) -> None:
        """Switch dropout on or off."""
        self._engine.train(mode)

    def init_state(self, document_ids: Tensor) -> LMState:
        """Return empty memories of lanes that begin these documents, (B,) int64, with the engine's device and dtype."""
        return self.module.init_state(document_ids.to(self.device), self.device, self.dtype)

    def backward(self, loss: Tensor) -> None:
        """Run the backward of a normalized micro-loss, which DeepSpeed must not divide by the accumulation steps."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def end_micro_batch(self) -> None:
        """Count a micro-batch that is not the last of its update."""
        self._engine.step()

    def gradients_finite(self) -> bool:
        """Return whether it is safe to `step`.

        Only fp32 without ZeRO needs the check; in all other cases DeepSpeed skips the update.
        """
        return not self._unguarded or math.isfinite(self._norm_of_gradients())

    def step(self, lr_factor: float) -> bool:
        """Update with each group's peak learning rate times `lr_factor`; return False if DeepSpeed skipped it."""
        for group, peak in zip(self._engine.optimizer.param_groups, self._peak_lrs, strict=True):
            group["lr"] = peak * lr_factor
        self.lr = self._lr * lr_factor
        self._end_update()
        return self._engine.was_step_applied()

    def discard(self) -> None:
        """End an update without applying it: parameters and optimizer are unchanged; an fp16 loss scale is updated."""
        optimizer: Any = zero_state.base_optimizer(self._engine)
        optimizer.step = lambda *_, **__: None  # DeepSpeed runs its whole step, and clears the accumulated gradients
        try:
            self._end_update()
        finally:
            del optimizer.step

    def _end_update(self) -> None:
        self._gradient_norm_before = self._norm_of_gradients() if self._unguarded else None
        if self._norms is not None:
            self._norms.begin()
        self._engine.step()

    def _norm_of_gradients(self) -> float:
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def gradient_norm(self) -> float:
        """Return the global gradient norm of the last update before clipping; nan if DeepSpeed does not know it."""
        norm = self._gradient_norm_before if self._unguarded else self._engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def gradient_norms(self) -> Norms | None:
        """Return the gradient norms of the model and of its `auxiliary_parameters`, None without these; collective."""
        return None if self._norms is None else self._norms.norms(self.gradient_norm())

    def held(self) -> list[Slice]:
        """Return this rank's master weights and optimizer state, as live views."""
        return zero_state.held(self._engine)

    def owned(self) -> list[Slice]:
        """Return the part of `held` that this rank saves: the ranks together own every element exactly once."""
        return zero_state.owned(self._engine)

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
        zero_restore.restore(self._engine, read, counters)
