"""The door to DeepSpeed: its configuration, its start, one update, its files.

DeepSpeed's habits this module exists for: it divides the loss by the accumulation steps on top of ours; it skips an
update silently when a gradient is not finite (and in fp32 without ZeRO poisons every parameter instead); it clips at
norm 1 unless told otherwise; it ignores unknown top-level keys (refused in the configuration).
"""

from __future__ import annotations

import copy
import io
import logging
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.cpp_extension import _get_build_directory

from dist_mem.layers import DTYPES
from dist_mem.optimizer import build_optimizer

try:
    # DeepSpeed's autotuner imports mlflow where it can, on every rank: 1.7 s, 115 MB and a telemetry client. A None
    # here makes that import fail, which it is prepared for; tracking.py imports mlflow later, on rank 0 alone.
    sys.modules.setdefault("mlflow", None)  # type: ignore[arg-type]
    import deepspeed
    from deepspeed.runtime import compiler as deepspeed_compiler
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.config import DeepSpeedConfigError
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.utils import logger as deepspeed_logger
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
finally:
    if sys.modules["mlflow"] is None:
        del sys.modules["mlflow"]

# DeepSpeed 0.19 calls collectives by names that torch 2.13 has renamed: nothing a user can change, said at every step.
warnings.filterwarnings("ignore", r".*`torch.distributed.\w+` is deprecated", FutureWarning)
_TAG = "engine"  # folder of DeepSpeed's files inside a checkpoint
_WHOLE_MODEL_FILE = "mp_rank_00_model_states.pt"  # written by stages 0 to 2
_CPU_OP = "deepspeed_shm_comm"  # compiled at the first start
_LONGEST_COMPILATION = 900.0  # seconds; it takes 30 to 150
_MASTERS = "names_of_fp32_masters"  # our key in DeepSpeed's file, see `_names_by_group`


def deepspeed_config(block: dict[str, Any], train: Any, *, world_size: int, accumulation: int) -> dict[str, Any]:
    """The user's `deepspeed:` block completed with the keys this project owns.

    Args:
        block: the block as the user wrote it, without the keys we own.
        train: `TrainConfig`.
        accumulation: forward and backward passes of one rank in one update.
    """
    owned = {
        "train_micro_batch_size_per_gpu": train.micro_lanes,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": train.micro_lanes * accumulation * world_size,
        "gradient_clipping": train.max_grad_norm or 0.0,  # left out, DeepSpeed clips at 1.0
        "zero_allow_untested_optimizer": True,  # torch's own optimizers, checked by our tests
        "zero_force_ds_cpu_optimizer": False,  # offloading works with torch's Adam too
        "steps_per_print": None,
    }
    merged = copy.deepcopy(block)
    for precision in ("bf16", "fp16"):
        merged[precision] = {**merged.get(precision, {}), "enabled": train.precision == precision}
    return {**merged, **owned}


def _names_by_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[list[str]]]:
    """All names of every trained parameter, in the order in which DeepSpeed keeps their fp32 copies, group by group."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def _import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon, for which ZeRO takes every optimizer in turn, without compiling what nobody will run.

    Its decorators would load torch's compiler, 0.8 s and 43 MB on every rank.
    """
    decorator = deepspeed_compiler.compile
    deepspeed_compiler.compile = lambda: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        deepspeed_compiler.compile = decorator


def _start_deepspeed(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
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
            "deepspeed.data_types.grad_accum_dtype: with bf16 at ZeRO stage 1 DeepSpeed writes checkpoints of which it "
            "cannot read the weights; set deepspeed.zero_optimization.stage=2, or leave the key out"
        )
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        # Half precision without ZeRO: it has made a step without gradients, which decays weights and counts in Adam.
        engine.optimizer.refresh_fp32_params()
        engine.optimizer.optimizer.state.clear()
    return engine


def _holding_back(write: Callable[..., None], errors: list[Exception]) -> Callable[..., None]:
    """`write`, which adds to `errors` what it would have raised; torch reports a full disk as RuntimeError."""

    def hold_back(*args: Any, **kwargs: Any) -> None:
        try:
            write(*args, **kwargs)
        except (OSError, RuntimeError) as error:
            errors.append(error)

    return hold_back


def start_communication() -> None:
    """Load what DeepSpeed communicates with: on CPUs an op, which it compiles at its first start on a machine.

    Raises:
        ValueError: it could not be compiled; names the reason and the fix.
    """
    try:
        if torch.distributed.get_backend() == "gloo":
            _refuse_stale_lock(Path(_get_build_directory(_CPU_OP, False)) / "lock")
        with redirect_stdout(io.StringIO()):  # it says on every rank that all is well
            deepspeed.init_distributed(torch.distributed.get_backend())
    except (ImportError, OSError, RuntimeError) as error:  # ImportError: a rank waited for another one's compiler
        reasons = re.findall(r"^.*(?:not found|[Ee]rror: ).*$", str(error).partition("\n")[2], re.MULTILINE)
        raise ValueError(
            f"DeepSpeed could not compile its CPU communication op ({reasons[0] if reasons else error}): install a C++ "
            "compiler ('apt-get install g++'), and see that TORCH_EXTENSIONS_DIR (default: ~/.cache/torch_extensions) "
            "can be written"
        ) from error


def _refuse_stale_lock(lock: Path) -> None:
    """Raise ValueError for the lock of a compilation that was killed: torch would wait for it without an end."""
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return
    if age > _LONGEST_COMPILATION:
        raise ValueError(f"{lock} is {age / 60:.0f} minutes old: a killed process has left it, remove it")


class Engine:
    """A model under DeepSpeed: call it for a forward, then `backward`, and `step` once an update."""

    def __init__(
        self, model: nn.Module, config: Any, block: dict[str, Any], *, world_size: int, accumulation: int
    ) -> None:
        deepspeed_logger.setLevel(logging.WARNING)  # dozens of lines a start that tell a user nothing
        optimizer = build_optimizer(model, config.optimizer)
        self._master_names = _names_by_group(model, optimizer)
        self.config = deepspeed_config(block, config.train, world_size=world_size, accumulation=accumulation)
        self._engine = _start_deepspeed(model, optimizer, self.config)
        self._errors: list[Exception] = []  # of writing, held back until a save is over
        files = self._engine.checkpoint_engine
        files.save = _holding_back(files.save, self._errors)
        self._engine._copy_recovery_script = _holding_back(self._engine._copy_recovery_script, self._errors)
        self.lr = self._lr = config.optimizer.lr  # of the last update, for groups that have none of their own
        self._peak_lrs = [group["lr"] for group in self._engine.optimizer.param_groups]
        self.dtype = DTYPES[config.train.precision]
        self.device = self._engine.device
        self.stage: int = self._engine.zero_optimization_stage()
        self._unguarded = self.stage == 0 and self.dtype == torch.float32
        self._gradient_norm_before: float | None = None  # of the last update, where `_unguarded`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    @property
    def module(self) -> Any:
        """The model as DeepSpeed holds it; under ZeRO-3 its parameters are empty outside a forward."""
        return self._engine.module

    @property
    def optimizer(self) -> Any:
        """DeepSpeed's optimizer, for tests that compare its moments."""
        return self._engine.optimizer

    def train(self, mode: bool = True) -> None:
        """Dropout on or off."""
        self._engine.train(mode)

    def init_state(self, document_ids: Tensor) -> Any:
        """Empty memories of lanes that begin these documents, (B,) int64, on the engine's device and in its dtype."""
        return self.module.init_state(document_ids.to(self.device), self.device, self.dtype)

    def backward(self, loss: Tensor) -> None:
        """Backward of a normalized micro-loss, which DeepSpeed must not divide by the accumulation steps again."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def end_micro_batch(self) -> None:
        """Count a micro-batch that is not the last of its update."""
        self._engine.step()

    def gradients_finite(self) -> bool:
        """Whether it is safe to `step`; only fp32 without ZeRO has to look, everything else skips by itself."""
        if not self._unguarded:
            return True
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        return bool(torch.isfinite(torch.nn.utils.get_total_norm(gradients)))

    def step(self, lr_factor: float) -> bool:
        """Update with each group's peak learning rate times `lr_factor`; False if DeepSpeed skipped it."""
        for group, peak in zip(self._engine.optimizer.param_groups, self._peak_lrs, strict=True):
            group["lr"] = peak * lr_factor
        self.lr = self._lr * lr_factor
        self._gradient_norm_before = self._norm_of_gradients() if self._unguarded else None
        self._engine.step()
        return self._engine.was_step_applied()

    def _norm_of_gradients(self) -> float:
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def gradient_norm(self) -> float:
        """Global gradient norm of the last update before clipping; nan where DeepSpeed does not know it."""
        norm = self._gradient_norm_before if self._unguarded else self._engine.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def save(self, directory: Path) -> None:
        """Write DeepSpeed's files under `directory`; every rank calls it. Its own `latest` is not crash-safe.

        Raises:
            OSError: this rank could not write its files. Only when all ranks are through: an error amid DeepSpeed's
                barriers would leave the others waiting.
        """
        names = {_MASTERS: self._master_names}  # the same on every rank: DeepSpeed keeps rank 0's
        self._errors.clear()
        self._engine.save_checkpoint(str(directory), tag=_TAG, client_state=names, save_latest=False)
        if self._errors:
            free = shutil.disk_usage(directory).free  # torch tells of a full disk in riddles
            first_line = str(self._errors[0]).partition("\n")[0]
            raise OSError(f"{directory / _TAG}: {first_line} ({free:,} bytes are free)") from self._errors[0]

    def load(self, directory: Path) -> None:
        """Restore parameters, optimizer and loss scale; every rank calls it, at the same world size."""
        path, _ = self._engine.load_checkpoint(str(directory), tag=_TAG, load_lr_scheduler_states=False)
        if path is None:
            raise FileNotFoundError(f"{directory / _TAG}: DeepSpeed found nothing to load")


def consolidated_state_dict(directory: Path) -> dict[str, Tensor]:
    """fp32 weights of a checkpoint written by any ZeRO stage on any number of ranks.

    DeepSpeed's files are pickles: load only checkpoints you trust.
    """
    whole_model = directory / _TAG / _WHOLE_MODEL_FILE
    saved = torch.load(whole_model, map_location="cpu", weights_only=False) if whole_model.exists() else {"module": {}}
    weights = dict(saved["module"])
    if any((directory / _TAG).glob("*zero_pp_rank_*_optim_states.pt")):
        # It prints its progress, on every rank; what goes wrong it raises. At stage 1 it leaves out what is frozen.
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            weights |= get_fp32_state_dict_from_zero_checkpoint(str(directory), tag=_TAG)
    else:
        weights |= _stage0_masters(saved)
    return {name: tensor.float() for name, tensor in weights.items()}


def _stage0_masters(saved: dict[str, Any]) -> dict[str, Tensor]:
    """The fp32 copies that an optimizer of half precision trains without ZeRO; none in fp32."""
    if "fp32_groups" not in saved["optimizer"]:
        return {}
    masters: dict[str, Tensor] = {}
    for names_of_group, group in zip(saved[_MASTERS], saved["optimizer"]["fp32_groups"], strict=True):
        for names, master in zip(names_of_group, group, strict=True):
            masters.update(dict.fromkeys(names, master.detach()))
    return masters
