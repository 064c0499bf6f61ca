"""A snapshot of the code and of the files of a configuration, from which every start of a job runs.

    RUN/slurm/JOB/snapshot/code/dist_mem     the package; PYTHONPATH names code/
                          /code/configs/     and launch/: what comes with dist_mem, if the package does not contain it
                          /code/git.json     git's description of it, as a copy is no checkout
                          /files/home/...    YAML, ds_config.json, files of memories; DIST_MEM_SNAPSHOT names snapshot/

So an edit of either takes effect in the next submitted job, not at the next restart of this one. Data, weights and the
Python environment are not copied.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_mem.config import load_config
from dist_mem.config.sources import files_of
from dist_mem.errors import run_error
from dist_mem.runtime.environment import SNAPSHOT_FILES
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.files import new_folder, write_text
from dist_mem.runtime.outside_code import source_of
from dist_mem.runtime.shipped_files import shipped_root
from dist_mem.tracking.provenance import to_keep

PACKAGE = Path(__file__).parent.parent
_CONFIGURATIONS = ("configs", "launch")


def make_for(folder: Path, commands: Iterable[Sequence[str]]) -> None:
    """Copy the running package and the files of the configurations of some trainings, as `make`.

    Args:
        commands: what `dist-mem train` takes, of each training.
    """
    from dist_mem.memory import memory_options  # torch
    from dist_mem.memory.outside import files_of as files_of_memory

    files: set[Path] = set()
    for words in commands:
        config = load_config(words, memory_options=memory_options)
        files |= {*files_of(words), *files_of_memory(config.memory), *map(source_of, config.tracking.sinks)}
    make(folder, sorted(files), to_keep())


def make(folder: Path, files: Iterable[Path], git: Mapping[str, Any]) -> None:
    """Copy the running package and some files; the folder appears once it is complete.

    Args:
        folder: the snapshot; if it exists, nothing is done.
        files: of the configuration.
        git: git's description of the running code.

    Raises:
        RunError: the folder cannot be written.
    """
    if folder.is_dir():
        return
    try:
        with new_folder(folder) as partial:
            shutil.copytree(PACKAGE, partial / "code" / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
            for name in _CONFIGURATIONS:
                beside = PACKAGE.parent / name  # not in a wheel, whose package has them, nor with the package alone
                if shipped_root() == PACKAGE.parent and beside.is_dir():
                    shutil.copytree(beside, partial / "code" / name)
            write_text(partial / "code" / "git.json", json_text(git))
            for path in files:
                copy = partial / SNAPSHOT_FILES / Path(os.path.normpath(path.absolute())).relative_to("/")
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.touch(stat.S_IMODE(path.stat().st_mode) | stat.S_IWUSR)  # first: a file of 0600 may hold secrets
                shutil.copyfile(path, copy)
                shutil.copymode(path, copy)
    except FileExistsError:
        return  # another launch of the same code
    except OSError as error:
        raise run_error(error, f"{folder} cannot be made: {error}; launch.snapshot=false goes without it") from error
