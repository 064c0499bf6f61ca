"""The history of a run, `RUN/history.jsonl`: from which step on it was trained with which configuration on which ranks.

A start, a rollback, and a stage that ends by `data.until_accuracy` each begin a part of the run: a line with the step
they continue from. A new line removes those of the same and of later steps, because their parts are made again. So step
s was made by the last line before it.

    {"step": 40, "ranks": 2, "threads": 1, "device": "cpu", "first_trained": 0, "config": "name: demo\\n..."}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dist_mem.data.mixture import MIXTURE_PART
from dist_mem.errors import UnusableError
from dist_mem.runtime.distributed import World
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.file_schema import integer, list_of, one_of, read_json_lines, record, text
from dist_mem.runtime.files import write_text
from dist_mem.training.state import TrainState

HISTORY = "history.jsonl"


class RunPart(NamedTuple):
    """A part of a run, from a start or a rollback on."""

    step: int  # of the state that it begins with; its first update makes step + 1
    ranks: int
    threads: int  # CPU threads of rank 0; sums of other numbers of threads may differ in the last bit
    device: str  # "cpu" or "cuda"
    first_trained: int  # as in `Divergence`: updates before it are read, and not trained on
    config: str  # YAML, as in config.yaml
    stage_ends: Sequence[int] = ()  # as in `TrainState`
    mixture: Sequence[Mapping[str, Any]] = ()  # likewise, each as `_asdict`
    num_metered: int = 0  # updates before it whose sums a start has restored: the next point is a mean over them too

    def is_like(self, other: RunPart) -> bool:
        """Whether both parts make updates in the same way; then a resume between them changes no bit."""
        first, second = (one._replace(step=0, stage_ends=(), mixture=(), num_metered=0) for one in (self, other))
        return first == second


_PART = record(
    {
        "step": integer(),
        "ranks": integer(1),
        "threads": integer(1),
        "device": one_of("cpu", "cuda"),
        "first_trained": integer(),
        "config": text,
    },
    {"stage_ends": list_of(integer()), "mixture": list_of(MIXTURE_PART), "num_metered": integer()},
    is_open=True,
)


def begin_part(
    run_dir: Path, config: str, world: World, state: TrainState, *, first_trained: int, num_metered: int = 0
) -> None:
    """Add the part that begins now to the history of a run, in place of those from its step on; on rank 0.

    Args:
        config: as YAML.

    Raises:
        UnusableError: the history is damaged.
        OSError: it cannot be written.
    """
    device, mixture = world.device.type, [part._asdict() for part in state.mixture]
    of_state = (state.stage_ends, mixture, num_metered)
    part = RunPart(state.step, world.size, torch.get_num_threads(), device, first_trained, config, *of_state)
    kept = [earlier for earlier in read_parts(run_dir) if earlier.step < part.step]
    write_text(run_dir / HISTORY, "".join(json_text(one._asdict()) + "\n" for one in [*kept, part]))


def read_history(run_dir: Path) -> list[RunPart]:
    """Return the parts of a run, in the order of their steps.

    Raises:
        UnusableError: the run has no history, or a damaged one; or this is a file, as its configuration.
    """
    if run_dir.is_file():
        raise UnusableError(f"{run_dir} is a file: give the directory of a run")
    parts = read_parts(run_dir)
    if not parts:
        path = run_dir / HISTORY
        raise UnusableError(f"{path} is missing: give the directory of a run; runs of an older dist_mem have none")
    return parts


def part_of(parts: Sequence[RunPart], step: int) -> RunPart:
    """Return the part whose update made this step.

    Raises:
        UnusableError: the run begins later.
    """
    before = [part for part in parts if part.step < step]
    if not before:
        first = parts[0].step
        begins = f"the run begins at step {first}, with a checkpoint of another run" if first else "steps count from 1"
        raise UnusableError(f"--step {step}: {begins}; give a step from {first + 1} on")
    return before[-1]


def read_parts(run_dir: Path) -> list[RunPart]:
    """Return the parts of a run, none for a new one. Raises UnusableError if the history is damaged."""
    bodies = read_json_lines(run_dir / HISTORY, _PART, UnusableError, "; remove the file")
    return [RunPart(**{name: body[name] for name in RunPart._fields if name in body}) for body in bodies]
