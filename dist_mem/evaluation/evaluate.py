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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dist_mem.block import ModelSpec
from dist_mem.config import Config, DataConfig, TrackingConfig, deepspeed_block
from dist_mem.data.directory import open_index, refresh_on_all_ranks
from dist_mem.data.shard import Index
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.errors import UnusableError
from dist_mem.estimate.counting import NotCountedError
from dist_mem.estimate.memory import evaluated_lanes, fits_without_counting, refuse_what_cannot_fit, scoring_parts
from dist_mem.estimate.zero import TrainingJob
from dist_mem.evaluation.job import (
    StopCheck,
    data_tag,
    describe_evaluation,
    find_checkpoint_together,
    hold_on_rank0,
    read_memory_file_of,
    run_on_ranks,
    track,
    use_threads,
    write_on_rank0,
)
from dist_mem.evaluation.kept_memory import states_and_inputs
from dist_mem.evaluation.memory_file import MemoryFile
from dist_mem.evaluation.memory_gain import read_gain
from dist_mem.evaluation.position import plot_positions, position_bins, positions_to_csv, positions_to_table
from dist_mem.evaluation.protocol import protocol_of, tag_of
from dist_mem.evaluation.report_names import FOLDER, ReportName, is_without_memory, join_parts
from dist_mem.evaluation.scores import Report, to_table, write_report
from dist_mem.evaluation.scoring import score_split
from dist_mem.evaluation.trained_model import Checkpoint, open_model, read_settings, tokenizer_of_data
from dist_mem.runtime.distributed import World, decide_on_rank0
from dist_mem.runtime.files import write_text
from dist_mem.runtime.signals import StopSignal


def evaluate_checkpoint(
    checkpoint: Checkpoint,
    config: Config,
    *,
    split: str,
    world: World,
    check: StopCheck | None = None,
    without_memory: bool = False,
    memory: MemoryFile | None = None,
    by_position: bool = False,
) -> Report:
    """Score a split with the model of a checkpoint; every rank calls it.

    Args:
        memory: memory of a text that every document continues; only with the layout `documents`.
        by_position: as in `score_split`.

    Raises:
        CutShortError: on every rank; raised by `check`.
        UnusableError: on every rank; another model has read `memory`.
    """
    refresh_on_all_ranks(config.data, [split])
    tokenizer, index = world.agree(lambda: _open_split(checkpoint, config.data, split), f"opening split {split}")

    def see_that_it_fits(spec: ModelSpec) -> None:
        num_lanes, on_gpu = evaluated_lanes(config.eval, index), world.device.type == "cuda"
        job = TrainingJob(spec, config.optimizer, deepspeed_block(config), world.size, on_gpu)
        parts = []
        if not fits_without_counting(job, world, num_lanes=num_lanes):
            with suppress(NotCountedError):  # then nobody knows what it needs
                parts = scoring_parts(spec, config.eval, num_lanes=num_lanes, on_gpu=on_gpu, world_size=world.size)
        refuse_what_cannot_fit(parts, world.device, gather=world.gather)

    trained = open_model(checkpoint, config, tokenizer, world.device, check=see_that_it_fits)
    if check is not None:
        trained.model.register_forward_pre_hook(check)
    return score_split(
        trained.model,
        *states_and_inputs(trained, memory),
        config=trained.config,
        index=index,
        tokenizer=tokenizer,
        world=world,
        without_memory=without_memory,
        by_position=by_position,
    )


def _open_split(checkpoint: Checkpoint, data: DataConfig, split: str) -> tuple[Tokenizer, Index]:
    return tokenizer_of_data(checkpoint, data), open_index(data, split)


def run(
    path: Path,
    *,
    split: str | None = None,
    checkpoint: int | None = None,
    overrides: Sequence[str] = (),
    without_memory: bool = False,
    memory: Path | None = None,
    by_position: bool = False,
    sources: bool = False,
    early: StopSignal | None = None,
) -> int:
    """Run the command `dist-mem evaluate`; return the exit code of the process.

    Args:
        path: a run directory, one checkpoint in it, or an export.
        split: None: eval.split.
        checkpoint: step of the checkpoint; None: the newest that verifies.
        overrides: `key=value`, of keys that an evaluation may set.
        without_memory: empty the memory at every segment, and report the gain of the memory.
        memory: a memory file; every document continues the text of which it is the memory.
        by_position: report the loss by position in the document too, as a table, a CSV and a picture.
        sources: score the split of every source of `data.mixture` too, each with results of its own.
        early: the handler that has received a scheduler's signals until now.

    Raises:
        UnusableError: checkpoint, data, overrides or memory cannot be used as they are.
    """

    def work(world: World, check: StopCheck) -> None:
        found = find_checkpoint_together(path, checkpoint, world)
        data = settings_of(world, found, overrides).data
        if sources and not data.mixture:
            raise UnusableError(f"--sources: {found.directory} was trained without data.mixture; leave it out")
        others = [f"data.path={one.path}" for one in data.mixture if sources and one.path != data.path]
        for more in [[], *([other] for other in others)]:
            evaluate_one(world, check, found, [*overrides, *more])

    def settings_of(world: World, found: Checkpoint, overrides: Sequence[str]) -> Config:
        return world.agree(lambda: read_settings(found.directory, overrides, reads_data=True), "reading config.yaml")

    def evaluate_one(world: World, check: StopCheck, found: Checkpoint, overrides: Sequence[str]) -> None:
        config = settings_of(world, found, overrides)
        use_threads(config.train)
        before = read_memory_file_of(memory, config.eval, world)
        tag = join_parts(tag_of(config, without_memory=without_memory), before.tag if before else "")
        scored = split or config.eval.split
        whole_tag = decide_on_rank0(lambda: join_parts(data_tag(found, config.data, scored), tag))
        name = ReportName(scored, found.manifest["step"], whole_tag)
        protocol = protocol_of(config, without_memory=without_memory)
        if by_position and (protocol.layout == "stream" or protocol.blocks):
            key = "eval.layout=documents" if protocol.layout == "stream" else "eval.blocks=false"
            raise UnusableError(f"--by position needs tokens in whole documents; set {key}")
        command = shlex.join(["dist-mem", "evaluate", str(path), "--split", scored, *overrides])
        command += "" if checkpoint is None else f" --checkpoint {checkpoint}"

        def publish() -> None:
            print(f"{found.directory}, split {scored}, {protocol}{f', {before}' if before else ''}")
            metadata = describe_evaluation(found, config.name, protocol, before)
            written = _publish(report, found, config.tracking, metadata, name=name, overrides=overrides)
            _print_gain(report, written, command)

        with hold_on_rank0(found.run_dir / FOLDER / str(name)):
            report = evaluate_checkpoint(
                found,
                config,
                split=scored,
                world=world,
                check=check,
                without_memory=without_memory,
                memory=before,
                by_position=by_position,
            )
            write_on_rank0(publish, world, "writing the report")

    return run_on_ranks(work, overrides, early)


def _publish(
    report: Report,
    checkpoint: Checkpoint,
    tracking: TrackingConfig,
    metadata: dict[str, object],
    *,
    name: ReportName,
    overrides: Sequence[str] = (),
) -> Path:
    """Write the report's files, add its metrics to the run in MLflow, print it, and return the path of the JSON."""
    bins = position_bins(report)
    try:
        files = write_report(report, checkpoint.run_dir / FOLDER, str(name), metadata=metadata)
        prefix = join_parts(report.split, name.tag)
        metrics = {f"{prefix}{metric.removeprefix(report.split)}": value for metric, value in report.metrics().items()}
        if bins:
            stem = checkpoint.run_dir / FOLDER / f"{name}.position"
            files += [stem.with_name(f"{stem.name}.{ending}") for ending in ("csv", "png")]
            write_text(files[-2], positions_to_csv(bins))
            plot_positions(bins, files[-1])
        track(checkpoint, tracking, metrics, files, overrides)
    finally:  # after the names of the files; also if the disk is full
        print(to_table(report))
        if bins:
            print(f"\n{positions_to_table(bins)}")
    return files[1]


def _print_gain(report: Report, path: Path, command: str) -> None:
    """Print the gain of the memory if both evaluations, with and without memory, have been run.

    Args:
        path: the report's JSON file.  command: the command that evaluates with memory.
    """
    try:
        gain = read_gain(report, path)
    except ValueError as error:
        print(f"gain of the memory: {error}", file=sys.stderr)
        return
    if gain is not None:
        print(gain)
    elif is_without_memory(path):
        print(f"gain of the memory: needs an evaluation with memory too; run: {command}")
