"""A run that is finished: a start of it ends before it opens data or DeepSpeed.

Job arrays and chains are submitted many times. `RUN/finished.json` is valid only for a configuration that
`find_resumption` has compared with the checkpoint's.
"""

from __future__ import annotations

from pathlib import Path

from dist_mem.checkpoint.finished_file import read_finished
from dist_mem.checkpoint.manifest import step_dir
from dist_mem.checkpoint.resume_choice import AUTO
from dist_mem.checkpoint.resume_source import Resumption
from dist_mem.config import Config
from dist_mem.data.curriculum import training_dirs
from dist_mem.runtime.distributed import World, decide_on_rank0


def is_finished(config: Config, world: World, resumption: Resumption) -> bool:
    """Whether the checkpoint is the last one of a run that needs no more steps; collective."""
    run_dir, choice = Path(config.run_dir), resumption.choice
    paths, before = ([one.path for one in training_dirs(each.data).values()] for each in (config, resumption.saved))
    if config.resume != AUTO or paths != before:
        return False  # data at another path are compared with those of the run only when the job is opened
    end = decide_on_rank0(lambda: read_finished(run_dir))
    if end is None or (end.steps, end.epochs) != (config.train.steps, config.train.epochs):
        return False
    if choice.directory != step_dir(run_dir, end.step):
        return False
    if world.rank == 0:
        print(f"{run_dir} is finished: step {end.step} was the last one; to train on, set train.steps higher")
    return True
