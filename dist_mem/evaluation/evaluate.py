"""The evaluate command: score a split with the model of a checkpoint or an export.

    dist-mem evaluate runs/demo --split test
    dist-mem evaluate runs/demo --split test --without-memory
    torchrun --nproc-per-node 4 -m dist_mem evaluate runs/demo/checkpoints/step-00001000 eval.batch_size=32

It runs the plain model (trained_model.py) on any number of ranks, and writes
RUN/evaluations/<split>-step-<step>.json and .csv; the metrics are added to the run in MLflow, except those of an
export. The test split is opened here and nowhere else.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from dist_mem.config import Config, load_config
from dist_mem.data.directory import open_index, refresh_on_all_ranks
from dist_mem.errors import EXIT_DONE, CutShortError, UnusableError, run_error
from dist_mem.estimate.memory import evaluated_lanes, refuse_what_cannot_fit, scoring_parts, surely_fits
from dist_mem.evaluation.cut_short import StopCheck, stop_check
from dist_mem.evaluation.kept_memory import states_and_inputs
from dist_mem.evaluation.memory_file import MemoryFile, read_memory_file
from dist_mem.evaluation.memory_gain import gain_beside, is_without_memory
from dist_mem.evaluation.other_data import data_tag
from dist_mem.evaluation.protocol import Protocol, protocol_of, report_name, tag_of
from dist_mem.evaluation.report import Report, to_table, write_report
from dist_mem.evaluation.scoring import score_split
from dist_mem.evaluation.trained_model import (
    Checkpoint,
    find_checkpoint,
    open_model,
    read_settings,
    tokenizer_of_data,
)
from dist_mem.runtime import distributed
from dist_mem.runtime.distributed import World, decided_by_rank0, gather_objects, on_all_ranks
from dist_mem.runtime.ranks import read_ranks
from dist_mem.runtime.signals import StopSignal
from dist_mem.supervision.findings import refuse
from dist_mem.supervision.rendezvous import wait_for_ranks
from dist_mem.tracking.mlflow.sync import log_to_run


def evaluate_checkpoint(
    checkpoint: Checkpoint,
    config: Config,
    *,
    split: str,
    world: World,
    check: StopCheck | None = None,
    without_memory: bool = False,
    memory: MemoryFile | None = None,
) -> Report:
    """Score a split with the model of a checkpoint; every rank calls it.

    Args:
        memory: memory of a text that every document continues; only with the layout `documents`.

    Raises:
        CutShortError: on every rank; raised by `check`.
        UnusableError: on every rank; another model has read `memory`.
    """
    refresh_on_all_ranks(config.data, [split])
    tokenizer = tokenizer_of_data(checkpoint, config)
    index = open_index(config.data, split)

    def see_that_it_fits(config: Config, vocab_size: int) -> None:
        num_lanes = evaluated_lanes(config, index)
        parts = []
        if not surely_fits(config, vocab_size, world, num_lanes=num_lanes):
            parts = scoring_parts(config, vocab_size, num_lanes=num_lanes, world_size=world.size)
        gather = gather_objects if world.size > 1 else lambda value: [value]  # a notebook has no process group
        refuse_what_cannot_fit(parts, world.device, gather=gather)

    trained = open_model(checkpoint, config, tokenizer, world.device, check=see_that_it_fits)
    if check is not None:
        trained.model.register_forward_pre_hook(check)
    return score_split(
        trained.model,
        *states_and_inputs(trained, memory),
        config=config,
        index=index,
        tokenizer=tokenizer,
        world=world,
        without_memory=without_memory,
    )


def run(
    path: Path,
    *,
    split: str | None = None,
    checkpoint: int | None = None,
    overrides: Sequence[str] = (),
    without_memory: bool = False,
    memory: Path | None = None,
    early: StopSignal | None = None,
) -> int:
    """Run the command `dist-mem evaluate`; return the exit code of the process.

    Args:
        path: a run directory, one checkpoint in it, or an export.
        split: None: eval.split.
        checkpoint: step of the checkpoint; None: the newest that verifies.
        overrides: `key=value`, of the keys in `trained_model.OVERRIDABLE`.
        without_memory: empty the memory at every segment, and report the gain of the memory.
        memory: a memory file; every document continues the text of which it is the memory.
        early: the handler that has received a scheduler's signals until now.

    Raises:
        UnusableError: checkpoint, data, overrides or memory cannot be used as they are.
    """

    def work(world: World, check: StopCheck) -> None:
        found = found_by_all(path, checkpoint, world)
        config = read_settings(found.directory, overrides, reads_data=True)
        use_threads(config)
        before = read_before(memory, config, world)
        tag = report_name(tag_of(config, without_memory=without_memory), before.tag if before else "")
        scored = split or config.eval.split
        report = evaluate_checkpoint(
            found, config, split=scored, world=world, check=check, without_memory=without_memory, memory=before
        )
        protocol = protocol_of(config, without_memory=without_memory)
        command = shlex.join(["dist-mem", "evaluate", str(path), "--split", scored, *overrides])
        command += "" if checkpoint is None else f" --checkpoint {checkpoint}"

        def publish() -> None:
            named = report_name(data_tag(found, config, scored), tag)
            written = _publish(report, found, config, protocol, tag=named, overrides=overrides, memory=before)
            _print_gain(report, written, command)

        written_by_rank0(publish, world, "writing the report")

    return as_job(work, overrides, early)


def _join(overrides: Sequence[str]) -> World:
    """Join the other ranks. Without the rendezvous, torch would wait half an hour for a missing rank without a message.

    Raises:
        UnfitError, UnusableError: on every rank present; names missing ranks, and nodes without a GPU.
    """
    given = [text for text in overrides if text.startswith("watchdog.")]
    seconds = load_config(["train.steps=1", *given]).watchdog.join_seconds
    with distributed.joining():
        rendezvous = wait_for_ranks(seconds=seconds) if read_ranks()[1] > 1 else None  # keeps rank 0's store alive
        if rendezvous is not None:
            refuse(rendezvous.findings, rendezvous.nodes)
        return distributed.initialize()


def as_job(
    work: Callable[[World, StopCheck], None], overrides: Sequence[str] = (), early: StopSignal | None = None
) -> int:
    """Run `work` on every rank of this job; return the exit code of the process, which is 0.

    Args:
        work: called with the world and a check; it must call the check before every forward, equally often on every
            rank.
        overrides: those of the command; `watchdog.join_seconds` is the time to wait for the next rank.
        early: a scheduler's signal on any rank ends the work on all ranks, with exit code 85.

    Raises:
        RunError: on every rank; the request cannot be carried out as it is, a rank is missing, or the work was cut
            short.
    """
    world = _join(overrides)
    all_end_here = False
    try:
        work(world, stop_check(lambda: early is not None and early.received is not None, world))
        all_end_here = True
    except CutShortError as error:
        gathered = gather_objects(f"{early.received} on rank {world.rank}" if early and early.received else None)
        names = ", ".join([text for text in gathered if text][:3])
        all_end_here = True
        raise CutShortError(f"stopped by {names}: no file is half written, the same command makes it again") from error
    except (OSError, ValueError) as error:
        raise run_error(error) from error
    finally:
        distributed.shut_down(agreed=all_end_here)
    return EXIT_DONE


def found_by_all(path: Path, step: int | None, world: World) -> Checkpoint:
    """Run `find_checkpoint` on rank 0, which also prints its remarks; return the checkpoint on every rank."""
    found = decided_by_rank0(lambda: find_checkpoint(path, step))
    for remark in found.remarks if world.rank == 0 else ():
        print(remark, file=sys.stderr)
    return found


def written_by_rank0(write: Callable[[], None], world: World, what: str) -> None:
    """Call `write` on rank 0; if it fails, all ranks raise with its message."""
    on_all_ranks(lambda: write() if world.rank == 0 else None, what)


def read_before(path: Path | None, config: Config, world: World) -> MemoryFile | None:
    """Read a memory file on every rank; None: none is given.

    Raises:
        UnusableError, UnfitError: on every rank; as `read_memory_file`, or a stream cannot continue it.
    """
    if path is None:
        return None
    if config.eval.layout == "stream":
        raise UnusableError(
            f"--memory {path}: eval.layout is stream, whose lanes begin within documents: set eval.layout=documents"
        )
    if world.size == 1:
        return read_memory_file(path)
    return on_all_ranks(lambda: read_memory_file(path), f"reading {path}")


def use_threads(config: Config) -> None:
    """Apply `train.threads`, which is known only now; `initialize` has divided the cores among the ranks."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)


def _publish(
    report: Report,
    checkpoint: Checkpoint,
    config: Config,
    protocol: Protocol,
    *,
    tag: str,
    overrides: Sequence[str] = (),
    memory: MemoryFile | None = None,
) -> Path:
    """Print the report, write its files, and add its metrics to the run in MLflow; return the path of the JSON.

    `tag` is part of their names, so that results of another protocol or of other data do not replace the run's own.
    """
    step = checkpoint.manifest["step"]
    print(f"{checkpoint.directory}, split {report.split}, {protocol}{f', {memory}' if memory else ''}")
    print(to_table(report))
    name = report_name(f"{report.split}-step-{step:08d}", tag)
    metadata = described(checkpoint, config, protocol, memory)
    files = write_report(report, checkpoint.run_dir / "evaluations", name, metadata=metadata)
    prefix = report_name(report.split, tag)
    metrics = {f"{prefix}{figure.removeprefix(report.split)}": value for figure, value in report.figures().items()}
    track(checkpoint, config, metrics, files, overrides)
    return files[1]


def described(
    checkpoint: Checkpoint, config: Config, protocol: Protocol, memory: MemoryFile | None = None
) -> dict[str, object]:
    """Return what a report's JSON says of the model, the protocol and the memory file."""
    step, directory = checkpoint.manifest["step"], str(checkpoint.directory)
    before = {"memory_file": {"path": str(memory.path), **memory.header}} if memory else {}
    return {"checkpoint": directory, "step": step, "config": config.name, "protocol": protocol._asdict(), **before}


def track(
    checkpoint: Checkpoint,
    config: Config,
    metrics: Mapping[str, float],
    files: Sequence[Path],
    overrides: Sequence[str],
) -> None:
    """Print the written files, and add them and the metrics to the run in MLflow, unless the model is an export."""
    print("\n".join(f"written: {path}" for path in files))
    if config.tracking.mlflow and not checkpoint.is_export:
        step = checkpoint.manifest["step"]
        complaint = log_to_run(
            config, run_dir=checkpoint.run_dir, step=step, metrics=metrics, files=files, overrides=overrides
        )
        if complaint:
            print(complaint, file=sys.stderr)


def _print_gain(report: Report, path: Path, command: str) -> None:
    """Print the gain of the memory if both evaluations, with and without memory, have been run.

    Args:
        path: the report's JSON file.  command: the command that evaluates with memory.
    """
    try:
        gain = gain_beside(report, path)
    except ValueError as error:
        print(f"gain of the memory: {error}", file=sys.stderr)
        return
    if gain is not None:
        print(gain)
    elif is_without_memory(path):
        print(f"gain of the memory: not known without the evaluation with memory; run: {command}")
