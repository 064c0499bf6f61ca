"""How DeepSpeed is imported and started, with what is private in it."""

from __future__ import annotations

import io
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import BaseModel, ValidationError
from torch import nn
from torch.utils.cpp_extension import _get_build_directory

from dist_mem.block import Block
from dist_mem.config.check import Problem, format_value, stop_on, suggest
from dist_mem.engine.cpu_op import CPU_OP, building, load
from dist_mem.engine.fused_checks import fuse_checks
from dist_mem.engine.zero_state import DeepSpeedEngine, loss_scaler
from dist_mem.errors import RunError, run_error

try:
    # DeepSpeed's autotuner imports mlflow if it can, on every rank: 1.7 s, 115 MB and a telemetry client. A None here
    # makes that import fail, which the autotuner handles; tracking/mlflow/ imports mlflow later, on rank 0 only.
    cast(dict[str, Any], sys.modules).setdefault("mlflow", None)
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime import compiler as deepspeed_compiler
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.config import DeepSpeedConfigError
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from deepspeed.utils import logger as deepspeed_logger
finally:
    if sys.modules["mlflow"] is None:
        del sys.modules["mlflow"]

# DeepSpeed 0.19 calls collectives by names that torch 2.13 deprecates: a warning at every step that no user can fix.
warnings.filterwarnings("ignore", r".*`torch.distributed.\w+` is deprecated", FutureWarning)
# It warns of every optimizer of torch's but Adam; ours are tested at every stage.
deepspeed_logger.addFilter(lambda record: "untested optimizer" not in record.getMessage())


_MODELS: dict[str, type[BaseModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "comms_logger": CommsLoggerConfig,
    "tensorboard": TensorBoardConfig,
    "csv_monitor": CSVConfig,
    "wandb": WandbConfig,
    "comet": CometConfig,
}


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


def gather_whole_blocks(model: nn.Module) -> None:
    """Let ZeRO-3 gather the parameters of a whole block at once, so that its hooks are in no compiled graph."""
    deepspeed.utils.set_z3_leaf_modules(model, [Block])


def check_blocks(block: Mapping[str, Any]) -> None:
    """Check the blocks of DeepSpeed's configuration that DeepSpeed has models of.

    Args:
        block: the user's `deepspeed:` block, resolved.

    Raises:
        ConfigError: unknown keys and wrong values, all at once.
    """
    problems = []
    for name, model in _MODELS.items():
        try:
            model.model_validate(block.get(name, {}))
        except ValidationError as error:
            problems += [_problem(name, model, found) for found in error.errors()]
    stop_on(problems)


def _problem(block: str, model: type[BaseModel], found: Any) -> Problem:
    key = ".".join(("deepspeed", block, *map(str, found["loc"])))
    if found["type"] != "extra_forbidden":
        return Problem(key, f"is {format_value(found['input'])}, but DeepSpeed says: {found['msg']}")
    if len(found["loc"]) > 1:
        return Problem(key, "unknown key; leave it out")
    known = [name for field, info in model.model_fields.items() for name in (field, info.alias or field)]
    return Problem(key, f"unknown key; {suggest(found['loc'][0], f'deepspeed.{block}', known, ())}")


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


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn DeepSpeed's errors about its configuration into a ValueError."""
    try:
        yield
    except (AssertionError, DeepSpeedConfigError, NotImplementedError) as error:
        raise ValueError(f"deepspeed: DeepSpeed refuses this block: {error}") from error


def partition(parameters: Sequence[nn.Parameter], partitioner: Any) -> None:
    """Divide whole parameters, equal on all ranks, among the ranks, as stage 3 does; collective."""
    partitioner._convert_to_zero_parameters(parameters)


def make_partitioner(config: dict[str, Any], dtype: torch.dtype) -> Any:
    """Return DeepSpeed's object that partitions parameters for stage 3; to be used as it is with a whole model.

    Raises:
        ValueError: as `start_deepspeed`.
    """
    deepspeed_logger.setLevel(logging.WARNING)
    _refuse_what_cannot_be_saved(config["zero_optimization"])
    with _refusals():
        partitioner = deepspeed.zero.Init(config_dict_or_path=config, dtype=dtype)
    if partitioner.mem_efficient_linear:
        partitioner._enable_mem_efficient_linear()  # a linear map that does not keep its gathered weight
    return partitioner


def start_deepspeed(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> DeepSpeedEngine:
    """Return DeepSpeed's engine for a model and torch's optimizer.

    Raises:
        ValueError: DeepSpeed refuses the configuration, or what it would keep cannot be saved here.
    """
    deepspeed_logger.setLevel(logging.WARNING)  # dozens of lines per start without use to the user
    _refuse_what_cannot_be_saved(config.get("zero_optimization") or {})
    accelerator = get_accelerator()
    if config.get("fp16", {}).get("enabled") and not accelerator.is_fp16_supported():
        name = accelerator.device_name()
        raise ValueError(f"train.precision: is fp16, but DeepSpeed does not train in it on {name}; set bf16 or fp32")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    _import_muon_uncompiled()
    with _refusals():
        engine, _, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, model_parameters=trained, config=config
        )
    if isinstance(engine.optimizer, BF16_Optimizer):
        raise ValueError(
            "deepspeed.data_types.grad_accum_dtype: with bf16 at ZeRO stage 1 DeepSpeed takes an optimizer that cannot "
            "be saved here; set deepspeed.zero_optimization.stage=2, or leave the key out"
        )
    if scaler := loss_scaler(engine):
        scaler.raise_error_at_min_scale = False  # a divergence, which training handles
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        # Half precision without ZeRO: it made a step without gradients, which decays weights and counts in Adam.
        engine.optimizer.refresh_fp32_params()
        engine.optimizer.optimizer.state.clear()
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer) and not engine.optimizer.cpu_offload:
        fuse_checks(engine.optimizer)
    return engine


def start_communication(check: Callable[[], None] = lambda: None) -> None:
    """Start DeepSpeed's communication; on CPUs load its op, compiled at the first start on a machine.

    Args:
        check: called while the op is compiled, here or by another process; raises what ends the start, as a signal.

    Raises:
        ValueError: the op could not be compiled; names the reason and the fix.
    """
    try:
        if not torch.cuda.is_available():  # GPUs may be joined by gloo too
            directory = Path(_get_build_directory(CPU_OP, False))
            with building(directory, check), redirect_stdout(io.StringIO()):
                load(directory, lambda: get_accelerator().create_op_builder("ShareMemCommBuilder").load(), check)
        with redirect_stdout(io.StringIO()):  # it prints its success on every rank
            deepspeed.init_distributed(torch.distributed.get_backend())
    except RunError:  # of the waits: says all
        raise
    except (ImportError, OSError, RuntimeError) as error:  # ImportError: another rank's compiler failed
        reasons = re.findall(r"^.*(?:not found|[Ee]rror: ).*$", str(error).partition("\n")[2], re.MULTILINE)
        message = (
            f"DeepSpeed could not compile its CPU communication op ({reasons[0] if reasons else error}): install a C++ "
            "compiler ('apt-get install g++'), and see that TORCH_EXTENSIONS_DIR (default: in "
            "~/.cache/torch_extensions) can be written"
        )
        raise run_error(error if isinstance(error, OSError) else ValueError(error), message) from error
