"""Evaluation as a command, and of a split inside training.

    dist-mem evaluate runs/demo --split test
    torchrun --nproc-per-node 4 -m dist_mem evaluate runs/demo/checkpoints/step-00001000 eval.lanes=32

The command runs the plain model of a checkpoint or an export (trained.py) on any number of ranks, and writes
RUN/evaluations/<split>-step-<step>.json and .csv; the figures join the run in MLflow, those of an export do not. The
test split is opened here and nowhere else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dist_mem import distributed
from dist_mem.checkpoint.manifest import CheckpointError
from dist_mem.data.directory import open_index, refresh_on_all_ranks
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.distributed import AgreedError, World, agree_all_well, decided_by_rank0
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, UnusableError
from dist_mem.evaluation.report import Report, to_table, write_report
from dist_mem.evaluation.scoring import EvaluationError, Forward, InitState, evaluate_documents
from dist_mem.evaluation.trained import (
    Checkpoint,
    find_checkpoint,
    init_state,
    open_model,
    read_settings,
    tokenizer_of_data,
)
from dist_mem.tracking.start import log_to_run


def evaluate_split(
    forward: Forward, init_state: InitState, *, config: Any, split: str, tokenizer: Tokenizer, world: World
) -> Report:
    """Score a split as the configuration says; every rank calls it. Arguments and errors: `evaluate_documents`."""
    train, settings = config.train, config.eval
    lanes_per_rank = -(-settings.lanes // world.size)
    return evaluate_documents(
        forward,
        init_state,
        index=open_index(config.data, split),
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


def evaluate_checkpoint(checkpoint: Checkpoint, config: Any, *, split: str, world: World) -> Report:
    """Score a split with the model of a checkpoint; every rank calls it."""
    refresh_on_all_ranks(config.data, [split])
    trained = open_model(checkpoint, config, tokenizer_of_data(checkpoint, config), world.device)
    return evaluate_split(
        trained.model,
        partial(init_state, trained),
        config=config,
        split=split,
        tokenizer=trained.tokenizer,
        world=world,
    )


def run(path: Path, *, split: str | None = None, checkpoint: int | None = None, overrides: Sequence[str] = ()) -> int:
    """The command. Returns the exit code of the process.

    Args:
        path: a run directory, one checkpoint in it, or an export.
        split: None: eval.split.
        checkpoint: step of the checkpoint; None: the newest that verifies.
        overrides: `key=value`, of the keys in `trained.OVERRIDABLE`.

    Raises:
        UnusableError: checkpoint, data or overrides cannot be used as they are.
    """
    world = distributed.initialize()
    code = EXIT_FAILED
    try:
        found = decided_by_rank0(lambda: find_checkpoint(path, checkpoint), CheckpointError)
        for remark in found.remarks if world.rank == 0 else ():
            print(remark, file=sys.stderr)
        config = read_settings(found.directory, overrides)
        if config.train.threads:  # known only now; `initialize` has divided the cores among the ranks
            torch.set_num_threads(config.train.threads)
        report = evaluate_checkpoint(found, config, split=split or config.eval.split, world=world)
        unwritten: OSError | None = None
        try:
            if world.rank == 0:
                _publish(report, found, config)
        except OSError as error:
            unwritten = error
        agree_all_well(unwritten, "writing the report")
        code = EXIT_DONE
    except UnusableError:
        raise
    except (OSError, ValueError) as error:
        raise UnusableError(str(error)) from error
    except (AgreedError, EvaluationError) as error:
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
    if config.tracking.mlflow and not checkpoint.is_export:
        complaint = log_to_run(config, run_dir=checkpoint.run_dir, step=step, metrics=report.figures(), files=files)
        if complaint:
            print(complaint, file=sys.stderr)
