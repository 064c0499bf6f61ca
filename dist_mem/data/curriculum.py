"""A curriculum: the data directories that a run reads before `data.path`, each up to a step (`data.curriculum`).

    stage 0 up to its last step -> stage 1 -> ... -> data.path up to the end of the run

Every stage has a plan of its own. In its first update every lane is at the beginning of that plan, where a document
(or a lane's part of the stream) begins, so the lane's memory is empty. The cursors of a checkpoint are those of the
stage that its last update has read. The stage of an update follows from its number and from the steps at which stages
have ended: their `until`, or with `data.until_accuracy` that of an earlier evaluation (training/evaluation.py). Those
steps are in every checkpoint and in the history of the run; `with_ends` puts them into the settings, and all else
reads the settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import NamedTuple

from torch import Tensor

from dist_mem.config import DataConfig, TrainConfig
from dist_mem.data.batch import Update
from dist_mem.data.directory import open_index, open_tokenizer
from dist_mem.data.lanes import LaneReader, check_tokenizer, training_reader
from dist_mem.data.mixture import MixturePart, source_names, source_settings, weighted_shares
from dist_mem.data.plan import Plan
from dist_mem.data.remote.fetch import show
from dist_mem.data.shard import Index, read_mask, read_recall
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.errors import UnusableError, run_error


class Stage(NamedTuple):
    """A part of a training that reads one data directory."""

    key: str  # of its path
    data: DataConfig  # that of the run, with the directory of the stage as `path`
    first: int  # updates made before it
    until: int | None  # updates made at its end; None: the last stage, that of data.path


def training_dirs(data: DataConfig) -> dict[str, DataConfig]:
    """Return every directory whose training split is read, by its key, as settings with it as `path`.

    They are those of all stages, that of data.path last, or those of the sources of a mixture.
    """
    if data.mixture:
        return {f"data.mixture[{number}].path": source for number, source in enumerate(source_settings(data))}
    return {stage.key: stage.data for stage in stages_of(data)}


def name_training_data(data: DataConfig, step: int, parts: Sequence[MixturePart]) -> str:
    """Return the names of the directories that a run has read in its first `step` updates.

    Args:
        data: as trained, with the steps at which stages have ended.
        parts: of a mixture, whose sources have their shares of the tokens.
    """
    if parts and step > 0:
        shares = zip(source_names(data), weighted_shares(parts, step), strict=True)
        return ", ".join(f"{name} {100 * share:.3g}%" for name, share in shares)
    read = [stage.data.path for stage in stages_of(data) if stage.first < max(step, 1)]
    return ", then ".join(PurePosixPath(show(path)).name for path in read)


def with_ends(data: DataConfig, ends: Sequence[int]) -> DataConfig:
    """Return the same settings where the first stages end at other steps.

    Args:
        ends: steps at which the first stages have ended, one each.
    """
    ended = [replace(stage, until=step) for stage, step in zip(data.curriculum, ends, strict=False)]
    return replace(data, curriculum=[*ended, *data.curriculum[len(ends) :]])


def stages_of(data: DataConfig) -> list[Stage]:
    """Return the stages of a training; without a curriculum there is one, that of data.path."""
    given = data.curriculum
    bounds = [0, *(stage.until for stage in given)]
    earlier = [
        Stage(f"data.curriculum[{number}].path", replace(data, path=stage.path), first, stage.until)
        for number, (stage, first) in enumerate(zip(given, bounds[:-1], strict=True))
    ]
    return [*earlier, Stage("data.path", data, bounds[-1], None)]


def stage_number(data: DataConfig, step: int) -> int:
    """Return the number of the stage that is read by the update after `step` updates."""
    return sum(stage.until <= step for stage in data.curriculum)


def training_splits(data: DataConfig, tokenizer: Tokenizer) -> list[Index]:
    """Open the training split of every stage, or of every source of a mixture.

    Args:
        tokenizer: of data.path.

    Raises:
        UnusableError: one has another tokenizer, or is missing or damaged.
    """
    splits = []
    for key, one in training_dirs(data).items():
        own = tokenizer if one.path == data.path else open_tokenizer(one)
        if own.fingerprint != tokenizer.fingerprint:
            raise UnusableError(
                f"{key} = {one.path}: its tokenizer is {own.fingerprint[:12]}, but that of data.path is "
                f"{tokenizer.fingerprint[:12]}; build all data of a run with the same one (--tokenizer-from)"
            )
        splits.append(open_index(one, one.train_split))
        check_tokenizer(splits[-1], own)
    return splits


def splits_at(data: DataConfig, splits: Sequence[Index], step: int) -> list[Index]:
    """Return those of `training_splits` that the update after `step` updates reads: all of a mixture, or one."""
    return list(splits) if data.mixture else [splits[stage_number(data, step)]]


def answers_of(stage: Stage, split: str) -> Index:
    """Open the split that says whether a stage ends before its last step (`data.until_accuracy`).

    Raises:
        UnusableError: the split is missing or damaged, or scores more than answers.
    """
    index = open_index(stage.data, split)
    mask, recall = (read(index, 0) if index.documents.has_recall else None for read in (read_mask, read_recall))
    if mask is None or recall is None or not (recall[mask] > 0).all():
        raise UnusableError(
            f"data.until_accuracy = {stage.data.until_accuracy}: {stage.key} = {stage.data.path}: its split {split} "
            "does not score answers alone: give data of a recall task (docs/howto/recall_tasks.md), or set "
            "data.until_accuracy to null"
        )
    return index


class CurriculumReader:
    """Endless iterator over the updates of one rank, stage after stage; iterate, then `close`."""

    def __init__(self, readers: Sequence[LaneReader], num_updates: Sequence[int]) -> None:
        """Read `num_updates` of each reader but the last. All are open from now on, so that no boundary waits."""
        self._readers = readers
        earlier = (islice(reader, count) for reader, count in zip(readers, num_updates, strict=False))
        self._updates = chain(*earlier, readers[-1])

    def __iter__(self) -> Iterator[Update]:
        return self

    def __next__(self) -> Update:
        return next(self._updates)

    @property
    def plan(self) -> Plan:
        """The plan of the last stage."""
        return self._readers[-1].plan

    @property
    def num_batches(self) -> int:
        """Number of micro-batches of an update."""
        return self._readers[-1].num_batches

    def close(self) -> None:
        """Close the readers of all stages; may be called more than once."""
        for reader in self._readers:
            reader.close()


def curriculum_reader(
    data: DataConfig,
    train: TrainConfig,
    *,
    world_size: int,
    rank: int,
    cursors: Tensor,
    step: int,
    pin: bool = False,
    parts: Sequence[MixturePart] = (),
) -> CurriculumReader:
    """Read this rank's lanes after `step` updates; `cursors` are those of the last of them.

    Args:
        parts: as for `training_plan`.

    Raises:
        ValueError: as `training_reader`, for any stage that is still to be read.
    """
    stages = stages_of(data)[stage_number(data, step) :]
    readers = []
    with ExitStack() as opened:
        for stage in stages:
            at = cursors if step > stage.first else None  # at a boundary they are those of the stage before
            try:
                place = {"world_size": world_size, "rank": rank}
                reader = training_reader(stage.data, train, **place, cursors=at, pin=pin, parts=parts)
            except ValueError as error:
                if stage.until is None:
                    raise
                raise run_error(error, f"{stage.key} = {stage.data.path}: {error}") from error
            readers.append(opened.enter_context(closing(reader)))
        opened.pop_all()
    return CurriculumReader(readers, [stage.until - max(step, stage.first) for stage in stages if stage.until])
