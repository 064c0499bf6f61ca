"""Evaluation as a command, and of a split inside training.

    dist-mem evaluate runs/demo --split test
    torchrun --nproc-per-node 4 -m dist_mem evaluate runs/demo/checkpoints/step-00001000 eval.lanes=32

The command reads the checkpoint of any ZeRO stage and world size through its consolidated fp32 weights, runs the plain
model on any number of ranks, and writes RUN/evaluations/<split>-step-<step>.json and .csv; the figures join the run in
MLflow. The test split is opened here and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem import distributed
from dist_mem.checkpoint import choose_checkpoint
from dist_mem.config import Config, ConfigError, load_config
from dist_mem.config_check import Problem
from dist_mem.data.shard import read_index
from dist_mem.data.tokenizer import Tokenizer, load_tokenizer
from dist_mem.distributed import EXIT_DONE, EXIT_FAILED, World, decided_by_rank0
from dist_mem.engine import DTYPES, consolidated_state_dict
from dist_mem.manifest import CheckpointError, read_manifest, step_dir, verify
from dist_mem.memory import memory_options
from dist_mem.model import MemoryLM
from dist_mem.report import Report, to_table, write_report
from dist_mem.scoring import EvaluationError, Forward, InitState, evaluate_documents
from dist_mem.tracking import log_to_run

OVERRIDABLE = ("eval.", "tracking.", "data.path", "train.micro_lanes", "train.threads")


def evaluate_split(
    forward: Forward, init_state: InitState, *, config: Any, split: str, tokenizer: Tokenizer, world: World
) -> Report:
    """Score a split as the configuration says; every rank calls it. Arguments and errors: `evaluate_documents`."""
    train, settings = config.train, config.eval
    lanes_per_rank = -(-settings.lanes // world.size)
    return evaluate_documents(
        forward,
        init_state,
        index=read_index(Path(config.data.path) / split),
        tokenizer=tokenizer,
        num_lanes=settings.lanes,
        micro_lanes=min(train.micro_lanes, lanes_per_rank),
        seg_len=settings.seg_len or train.seg_len,
        mem_len=short_term_len(config.memory),
        world=world,
        max_document_len=settings.max_document_len,
    )


def short_term_len(memory: Mapping[str, Any]) -> int:
    """M of a memory block, or of the memory it lies over; 0 if it has no short-term memory."""
    if "mem_len" in memory:
        return int(memory["mem_len"])
    return short_term_len(memory["over"]) if "over" in memory else 0


class Checkpoint(NamedTuple):
    """What is evaluated."""

    directory: Path
    run_dir: Path
    manifest: dict[str, Any]


def find_checkpoint(path: Path, step: int | None, world: World) -> Checkpoint:
    """The checkpoint at `path`, or in the run directory `path` that of `step` (None: the newest that verifies).

    Raises:
        CheckpointError: on every rank; there is none, or it is damaged.
    """
    if (path / "manifest.json").exists():
        directory = path
    elif step is not None:
        directory = step_dir(path, step)
    else:
        newest, passed_over = choose_checkpoint(path)
        for reason in passed_over:
            _say(f"passed over: {reason}", world)
        if newest is None:
            raise CheckpointError(
                f"{path / 'checkpoints'}: no checkpoint; give a run directory or one checkpoint in it"
            )
        return Checkpoint(newest, path, read_manifest(newest))
    return Checkpoint(
        directory, directory.absolute().parents[1], decided_by_rank0(lambda: verify(directory), CheckpointError)
    )


def read_settings(directory: Path, overrides: Sequence[str]) -> Config:
    """The configuration of a checkpoint with what may be changed for an evaluation.

    Raises:
        ConfigError: as `load_config`, or an override of a key that the weights depend on.
    """
    for override in overrides:
        key = override.split("=")[0]
        if not key.startswith(OVERRIDABLE):
            allowed = ", ".join(f"{name}*" if name.endswith(".") else name for name in OVERRIDABLE)
            raise ConfigError([Problem(key, f"is fixed by the checkpoint; an evaluation may set {allowed}")])
    return load_config([str(directory / "config.yaml"), *overrides], memory_options=memory_options)


def evaluate_checkpoint(checkpoint: Checkpoint, config: Any, *, split: str, world: World) -> Report:
    """Load the weights and score a split; every rank calls it."""
    tokenizer = load_tokenizer(Path(config.data.path))
    if tokenizer.fingerprint != checkpoint.manifest["tokenizer_fingerprint"]:
        raise ValueError(
            f"data.path = {config.data.path}: its tokenizer is {tokenizer.fingerprint[:12]}, but the model was trained "
            f"with {checkpoint.manifest['tokenizer_fingerprint'][:12]}; point data.path at data made with that one"
        )
    config.train.seg_len = config.eval.seg_len or config.train.seg_len  # what the memories are built for
    dtype = DTYPES[config.eval.precision]
    model = MemoryLM(config, tokenizer.vocab_size)
    model.load_state_dict(consolidated_state_dict(checkpoint.directory))
    model.to(world.device, dtype).eval()

    def init_state(document_ids: Tensor) -> Any:
        return model.init_state(document_ids.to(world.device), world.device, dtype)

    return evaluate_split(model, init_state, config=config, split=split, tokenizer=tokenizer, world=world)


def run(path: Path, *, split: str | None = None, checkpoint: int | None = None, overrides: Sequence[str] = ()) -> int:
    """The command. Returns the exit code of the process.

    Args:
        path: a run directory, or one checkpoint in it.
        split: None: eval.split.
        checkpoint: step of the checkpoint; None: the newest that verifies.
        overrides: `key=value`, of the keys in OVERRIDABLE.

    Raises:
        ConfigError: checkpoint, data or overrides cannot be used as they are.
    """
    world = distributed.initialize()
    code = EXIT_FAILED
    try:
        found = find_checkpoint(path, checkpoint, world)
        config = read_settings(found.directory, overrides)
        if config.train.threads:  # known only now; `initialize` has divided the cores among the ranks
            torch.set_num_threads(config.train.threads)
        report = evaluate_checkpoint(found, config, split=split or config.eval.split, world=world)
        if world.rank == 0:
            _publish(report, found, config)
        code = EXIT_DONE
    except ConfigError:
        raise
    except (CheckpointError, ValueError) as error:
        raise ConfigError([Problem("", str(error))]) from error
    except EvaluationError as error:
        if world.rank == 0:
            print(f"error: {error}", file=sys.stderr)
    finally:
        distributed.shut_down(agreed=code == EXIT_DONE)
    return code


def _publish(report: Report, checkpoint: Checkpoint, config: Any) -> None:
    """Print the report, write its files, and add its figures to the run in MLflow."""
    step = checkpoint.manifest["step"]
    print(f"{checkpoint.directory}, split {report.split}, T {report.seg_len}, M {report.mem_len}")
    print(to_table(report))
    facts: dict[str, object] = {"checkpoint": str(checkpoint.directory), "step": step, "config": config.name}
    name = f"{report.split}-step-{step:08d}"
    files = write_report(report, checkpoint.run_dir / "evaluations", name, facts=facts)
    print(f"written: {', '.join(str(path) for path in files)}")
    if config.tracking.mlflow:
        complaint = log_to_run(config, run_dir=checkpoint.run_dir, step=step, metrics=report.figures(), files=files)
        if complaint:
            print(complaint, file=sys.stderr)


def _say(text: str, world: World) -> None:
    if world.rank == 0:
        print(text, file=sys.stderr)
