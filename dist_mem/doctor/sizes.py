"""Estimates of a checkpoint's size, the number of checkpoints on disk, and the time of a save."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.checkpoint.manifest import list_steps
from dist_mem.data.batch_plan import batch_plan
from dist_mem.data.directory import local_dir
from dist_mem.data.tokenizers.registry import FILE_NAMES, JSON_NAME, read_tokenizer_metadata
from dist_mem.doctor.dry_run import ASSUMED_VOCAB_SIZE
from dist_mem.engine.optimizer import num_moments
from dist_mem.model import describe
from dist_mem.runtime.findings import Remark, fail, ok, warning

_FILES_PER_RANK, _OTHER_FILES = 3, 13  # engine, lanes, rng; manifest, configuration, tokenizer, folders
_BYTES_PER_RANK = 10_000  # random state, headers
_SAVES = 3  # saves that should fit into the time between signal and end: the first attempt may fail


class Checkpoint(NamedTuple):
    """The disk use of one checkpoint."""

    num_bytes: int
    num_files: int


def checkpoint_size(config: Any, world_size: int) -> Checkpoint:
    """Return the size of fp32 weights, optimizer state, memories of all lanes, and tokenizer."""
    path = local_dir(config.data)
    vocab_size = read_tokenizer_metadata(path)["vocab_size"] if (path / JSON_NAME).exists() else ASSUMED_VOCAB_SIZE
    sizes = describe(config, vocab_size)
    places = batch_plan(config.train, world_size).lanes_per_rank * world_size
    parameters = 4 * (1 + num_moments(config.optimizer)) * sizes["num_parameters"]
    lanes = sizes["state_bytes_per_lane"] * places
    tokenizer = sum((path / name).stat().st_size for name in (JSON_NAME, *FILE_NAMES) if (path / name).exists())
    num_bytes = parameters + lanes + tokenizer + _BYTES_PER_RANK * world_size
    return Checkpoint(num_bytes, _FILES_PER_RANK * world_size + _OTHER_FILES)


def checkpoints_to_come(config: Any) -> int:
    """Return how many more will exist at once: those that `checkpoint.keep_last` keeps, and the one being written."""
    rules = config.checkpoint
    kept = 2 if rules.keep_last is None else rules.keep_last + (rules.keep_best or 0) + 1
    return max(1, kept - len(list_steps(Path(config.run_dir))))


def check_stop_time(config: Any, *, num_bytes: int, rate: float) -> Iterator[Remark]:
    """Check that a save fits between the signal and the end of the job.

    Args:
        num_bytes: size of a checkpoint.
        rate: write rate of all ranks together, in bytes per second.
    """
    seconds, lead = num_bytes / rate, config.launch.signal_seconds
    time = f"about {seconds:,.0f} s" if seconds >= 1 else "less than a second"
    text = f"a save takes {time} ({rate / 1e6:,.0f} MB/s), the signal comes {lead} s before the end"
    fix = f"launch.signal_seconds={10 * math.ceil(_SAVES * seconds / 10 + 3)}"
    if seconds > lead:
        yield fail("time to stop", text, fix)
    elif _SAVES * seconds > lead:
        yield warning("time to stop", text, fix)
    else:
        yield ok("time to stop", text)
