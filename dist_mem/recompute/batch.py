"""`dist-mem batch RUN --step S`: documents, positions and text that every lane read at a step.

    history.jsonl -> configuration and ranks of the step
    nearest checkpoint before it -> cursors -> plan.advance -> read_lane -> the segments of the step

Neither a model nor DeepSpeed is needed. The plan does not depend on ranks, and skipped or rolled back updates advance
the cursors too, so the segments of a step follow from its number alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dist_mem.checkpoint.lane_states import read_cursors
from dist_mem.checkpoint.manifest import first_verified, list_steps, read_manifest, step_dir
from dist_mem.checkpoint.resume_source import check_data
from dist_mem.config import Config, DataConfig, TrainConfig
from dist_mem.data.batch_plan import total_steps
from dist_mem.data.curriculum import splits_at, stage_number, stages_of, training_splits
from dist_mem.data.directory import open_tokenizer, refresh
from dist_mem.data.documents import Documents, find_document
from dist_mem.data.lanes import training_plan
from dist_mem.data.mixture import MixturePart, source_names
from dist_mem.data.plan import START, Cursor, Plan, StreamPlan, lanes_of_rank
from dist_mem.data.segments import Segment, read_lane
from dist_mem.data.shard import Index
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.errors import UnusableError, run_error
from dist_mem.recompute.settings import point_at, read_part, read_recorded
from dist_mem.runtime.terminal import count_noun, make_printable, span
from dist_mem.training.history import RunPart, part_of, read_history

_EXCERPT = 160  # characters of a segment that are shown, its beginning and its end


class LaneRead(NamedTuple):
    """The segments that a lane read for one update."""

    rank: int
    lane: int
    micro_batches: list[int]  # of its rank, one for each segment
    cursors: list[Cursor]  # at which each segment begins
    segments: list[Segment]


class StepRead(NamedTuple):
    """What a run read for one update."""

    part: RunPart
    config: Config
    splits: list[Index]  # all sources of a mixture, or one
    tokenizer: Tokenizer
    plan: Plan
    lanes: list[LaneRead]  # of all ranks, without idle lanes


def read_step(run_dir: Path, step: int, overrides: Sequence[str] = ()) -> StepRead:
    """Return what the update that made `step` read.

    Raises:
        RunError: the run has no such step, or its data or checkpoints cannot be used.
    """
    try:
        parts = read_history(run_dir)
        part = part_of(parts, step)
        config = read_part(run_dir, part, overrides)
        refresh(config.data, [] if config.data.mixture else [config.data.train_split])
        tokenizer = open_tokenizer(config.data)
        all_splits, number = training_splits(config.data, tokenizer), stage_number(config.data, step - 1)
        splits, first = splits_at(config.data, all_splits, step - 1), stages_of(config.data)[number].first
        mixture = [MixturePart(**one) for one in part.mixture]
        plan = training_plan(config.data, config.train, splits, mixture)
        if step > (last := total_steps(config.train, config.schedule, plan)):
            raise UnusableError(f"--step {step}: the run has {last} steps")
        documents = Documents(
            splits[0], plan.lengths, bos_id=tokenizer.bos_id, on_corrupt=config.data.on_corrupt, others=splits[1:]
        )
        cursors = _cursors_before(
            run_dir, parts, step, documents, plan, overrides, splits=all_splits, data=config.data, first=first
        )
        lanes = list(_read_lanes(config.train, part, documents, plan, cursors))
        return StepRead(part, config, splits, tokenizer, plan, lanes)
    except (ValueError, OSError) as error:
        raise run_error(error) from error


def _cursors_before(
    run_dir: Path,
    parts: Sequence[RunPart],
    step: int,
    documents: Documents,
    plan: Plan,
    overrides: Sequence[str],
    *,
    splits: Sequence[Index],
    data: DataConfig,
    first: int,
) -> list[Cursor]:
    """Return the cursor of each lane before a step, from those of the nearest checkpoint.

    Args:
        splits: the training split of every stage or source.  data: settings of this step.
        first: updates before the stage of this step.
    """
    known, cursors = parts[0].step, [START] * plan.num_lanes
    candidates = [step_dir(run_dir, known) for known in reversed(list_steps(run_dir)) if known < step]
    if found := first_verified(lambda: candidates, read_manifest):
        directory, manifest, _ = found
        check_data(directory, manifest, splits, data)
        known, cursors = manifest["step"], [Cursor(*row) for row in read_cursors(directory, manifest, plan.num_lanes)]
    elif known > first:
        begins = f"the run begins at step {known}, with a checkpoint of another run"
        raise UnusableError(f"--step {step}: {begins}, and has none of its own before this step")
    if known <= first:  # the cursors are those of an earlier stage
        known, cursors = first, [START] * plan.num_lanes
    for lane, cursor in enumerate(cursors):
        plan.check_cursor(lane, cursor)
    configs = {part.step: read_part(run_dir, part, overrides) for part in parts}
    between = [configs[part_of(parts, earlier).step] for earlier in range(known + 1, step)]
    num_segments = sum(config.train.segments_per_update for config in between)
    if any(config.data.on_corrupt == "skip" for config in between):  # only reading shows which documents are damaged
        read = [list(islice(read_lane(documents, plan, lane=lane, cursor=cursor), num_segments))[-1:]
                for lane, cursor in enumerate(cursors)]  # fmt: skip
        return [last[0].after if last else cursor for last, cursor in zip(read, cursors, strict=True)]
    return [plan.advance(lane, cursor, num_segments) for lane, cursor in enumerate(cursors)]


def _read_lanes(
    train: TrainConfig, part: RunPart, documents: Documents, plan: Plan, cursors: Sequence[Cursor]
) -> Iterator[LaneRead]:
    for rank in range(part.ranks):
        lanes = lanes_of_rank(
            train.global_batch_size, world_size=part.ranks, rank=rank, micro_lanes=train.micro_batch_size
        )
        num_groups = len(lanes) // train.micro_batch_size
        for place, lane in enumerate(lanes):
            if lane >= train.global_batch_size:
                continue
            reader = read_lane(documents, plan, lane=lane, cursor=cursors[lane])
            segments = list(islice(reader, train.segments_per_update))
            group = place // train.micro_batch_size
            numbers = [index * num_groups + group for index in range(len(segments))]
            begins = [cursors[lane], *(segment.after for segment in segments)][:-1]
            yield LaneRead(rank, lane, numbers, begins, segments)


def run(run_dir: Path, step: int, *, rank: int | None = None, full: bool = False, overrides: Sequence[str] = ()) -> int:
    """Print what every lane read at a step; return the exit code of the process.

    Args:
        rank: print only the lanes of this rank.
        full: print the whole text of each segment, not an excerpt.

    Raises:
        RunError: as `read_step`; the step has no such rank.
    """
    read = read_step(run_dir, step, overrides)
    if rank is not None and rank >= read.part.ranks:
        raise UnusableError(f"--rank {rank}: step {step} was made on {count_noun(read.part.ranks, 'rank')}, from 0 on")
    print("\n".join(_heading_lines(run_dir, step, read)))
    for lane in read.lanes:
        if rank in (None, lane.rank):
            print("\n".join(_lane_lines(read, lane, full=full)))
    return 0


def _heading_lines(run_dir: Path, step: int, read: StepRead) -> Iterator[str]:
    train, data = read.config.train, read.config.data
    segments = count_noun(train.segments_per_update, "segment")
    size = f"{count_noun(train.global_batch_size, 'lane')} x {segments} of {train.seg_len} tokens"
    ranks = count_noun(read.part.ranks, "rank")
    names = ", ".join(source_names(data)) or read.splits[0].name
    where = f", {read.splits[0].split_dir}" if data.curriculum else ""
    yield f"{run_dir}, step {step}: {size}, on {ranks}; {data.train_split} of {names}{where}"
    point = point_at(read_recorded(run_dir), step)
    loss = f"loss {point.metrics['loss']:.4f} at {point}" if point else "no loss"
    of_lanes = f"losses of lanes are not logged, they come from: dist-mem recompute {run_dir} --step {step}"
    yield f"recorded: {loss}; {of_lanes}"


def _lane_lines(read: StepRead, lane: LaneRead, *, full: bool) -> Iterator[str]:
    parts = zip(lane.micro_batches, lane.cursors, lane.segments, strict=True)
    for number, cursor, segment in parts:
        yield f"rank {lane.rank}, lane {lane.lane}, micro-batch {number}: {_place(read, lane.lane, cursor, segment)}"
        text = make_printable(read.tokenizer.decode(segment.tokens[1:])).replace("\n", "\\n")
        yield f"    {text if full else _excerpt(text)}"


def _place(read: StepRead, lane: int, cursor: Cursor, segment: Segment) -> str:
    """Describe documents and positions of a segment; the positions are those of its own tokens, counted from 0."""
    if isinstance(read.plan, StreamPlan):
        begin = read.plan.span(lane)[0] + cursor.offset
        first, final = (int(read.plan.document_at(position)) for position in (begin, begin + segment.length - 1))
        starts = [begin - int(read.plan.starts[first]), begin + segment.length - 1 - int(read.plan.starts[final])]
        where = f"{_document(read, first)} token {starts[0]:,} to {_document(read, final)} token {starts[1]:,}"
        begun = " (the lane's part begins, memory empty)"
    else:
        length = int(read.plan.lengths[segment.document])
        begin = (segment.after.offset or length) - segment.length
        where = f"{_document(read, segment.document)}, tokens {span(begin, begin + segment.length)} of {length:,}"
        begun = " (the document begins, memory empty)"
    scored = "" if segment.scored is None else f", {int(segment.scored.sum())} of {segment.length} tokens scored"
    skipped = f", after {segment.num_skipped} damaged documents" if segment.num_skipped else ""
    return f"{where}, epoch {cursor.epoch}{scored}{skipped}{begun if segment.is_new_document else ''}"


def _document(read: StepRead, number: int) -> str:
    split, own = find_document(read.splits, number)
    entry, names = read.splits[split].documents[own], source_names(read.config.data)
    source = f"{names[split]} " if names else ""
    return f"{source}document {own} ({entry.id}{f', {entry.title}' if entry.title != entry.id else ''})"


def _excerpt(text: str) -> str:
    half = _EXCERPT // 2
    return text if len(text) <= _EXCERPT else f"{text[:half]} ... {text[-half:]}"
