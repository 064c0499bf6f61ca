"""From which checkpoint a job goes on: what `resume` means, by default the newest that verifies; on all ranks the same.

Rank 0 alone looks at directories and reads manifests; what it finds is sent to the others. The files are hashed by all
ranks together, each preferably by the rank that will read it. Whatever goes wrong on one rank, also a disk that does
not answer, is a reason that all ranks learn: the checkpoint is passed over, and stays for inspection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dist_mem.checkpoint.manifest import (
    NewerFormatError,
    list_steps,
    nothing_verifies,
    read_manifest,
    run_of,
    step_dir,
    verify_file,
)
from dist_mem.config import read_config
from dist_mem.config.check import ConfigError
from dist_mem.errors import CheckpointError
from dist_mem.runtime.distributed import World, decided_by_rank0, gather_objects

AUTO, NEVER = "auto", "never"
_RANK = re.compile(r"rank[-_](\d+)")  # in the names of files that one rank has written

ResultT = TypeVar("ResultT")


class Choice(NamedTuple):
    """What a job goes on from."""

    directory: Path
    manifest: dict[str, Any]
    passed_over: list[str]  # why better ones were not taken
    superseded: list[Path]  # the run's own checkpoints that are newer: an earlier one was asked for
    broken: list[Path]  # of the others of its own, those that were passed over


class ResumeRequest(NamedTuple):
    """The checkpoints that `resume` selects in a run directory."""

    candidates: list[Path]  # best first; the first that verifies is used
    run_checkpoints: list[Path]  # of the run itself, if those newer than the chosen one are to be set aside; else empty


def choose_checkpoint(resume: str, run_dir: Path, world: World) -> Choice | None:
    """What to go on from; None for a run that has no checkpoints. The same on every rank.

    Raises:
        CheckpointError: on every rank, when there are checkpoints but none can be used, or not the one asked for.
    """
    request = decided_by_rank0(lambda: readable(lambda: find_candidates(resume, run_dir)), CheckpointError)
    reasons: list[str] = []
    for number, directory in enumerate(request.candidates):
        try:
            manifest = verify_together(directory, world)
        except NewerFormatError:
            raise  # going on from an older one would undo what that one did
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            newer = [path for path in request.run_checkpoints if path.name > directory.name]
            own = [path for path in request.candidates[:number] if run_of(path).resolve() == run_dir.resolve()]
            return Choice(directory, manifest, reasons, newer, [path for path in own if path not in newer])
    if reasons:
        raise nothing_verifies(run_of(request.candidates[-1]), reasons)
    return None


def verify_together(directory: Path, world: World) -> dict[str, Any]:
    """The manifest of a checkpoint whose files are what was written; every rank hashes a share of them.

    Raises:
        CheckpointError: on every rank, naming the rank that found something, and what.
    """
    manifest = decided_by_rank0(lambda: readable(lambda: read_manifest(directory)), CheckpointError)
    told = gather_objects(_first_problem(directory, manifest["files"], world))
    for rank, problem in enumerate(told):
        if problem is not None:
            raise CheckpointError(f"{problem} (seen by rank {rank} of {world.size})" if world.size > 1 else problem)
    return manifest


def readable(read: Callable[[], ResultT]) -> ResultT:
    """What `read` returns; a disk that does not answer makes a checkpoint as useless as a damaged file."""
    try:
        return read()
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be read: {error}") from error


def _first_problem(directory: Path, files: dict[str, Any], world: World) -> str | None:
    try:
        for name in _share(sorted(files), world):
            verify_file(directory, name, files[name])
    except Exception as error:  # whatever it is: the other ranks wait for an answer
        return str(error) if isinstance(error, CheckpointError) else f"{directory}: {type(error).__name__}: {error}"
    return None


def _share(names: Sequence[str], world: World) -> Iterator[str]:
    """The files of this rank's number, which it will read if the world is as it was; the rest is dealt out."""
    for position, name in enumerate(names):
        written_by = _RANK.search(name)
        if (int(written_by[1]) if written_by else position) % world.size == world.rank:
            yield name


def find_candidates(resume: str, run_dir: Path) -> ResumeRequest:
    """Which checkpoints `resume` allows, the best one first.

    Raises:
        CheckpointError: there is none of that step or at that path, or the run has checkpoints that speak against it.
    """
    own = [step_dir(run_dir, step) for step in reversed(list_steps(run_dir))]
    if resume == AUTO:
        return ResumeRequest(own, [])
    if resume == NEVER:
        if own:
            raise CheckpointError(
                f"resume = never, but {run_dir} has {_listed(own)}: a run with checkpoints goes on from them, it never "
                "starts over silently. Give this run another run_dir, or leave resume out"
            )
        return ResumeRequest([], [])
    asked = _asked_for(resume, run_dir, own)
    # A job that was asked for this and started again: it goes on from what it has saved since.
    since = list(takewhile(lambda path: path not in asked and _has_request(path, resume), own))
    if not since and not asked[0].exists():  # checkpoint.keep_last may have deleted it since
        raise CheckpointError(f"resume = {resume}: there is no {asked[0]}; {run_dir} has {_listed(own)}")
    is_own = run_of(asked[0]).resolve() == run_dir.resolve()
    if not is_own and len(since) < len(own):
        raise CheckpointError(
            f"resume = {resume}, but {run_dir} has {_listed(own)} of its own: give the run that goes on from there "
            "another run_dir, or leave resume out"
        )
    return ResumeRequest([*since, *asked], own if is_own else [])


def _asked_for(resume: str, run_dir: Path, own: Sequence[Path]) -> list[Path]:
    """The checkpoint of a step, at a path, or those of the run at a path, newest first."""
    if resume.isdecimal():
        return [step_dir(run_dir, int(resume))]
    path = Path(resume)
    of_run = [step_dir(path, step) for step in reversed(list_steps(path))]
    mine = [known for known in own if known.exists() and path.exists() and known.samefile(path)]
    return of_run or mine or [path]


def _has_request(directory: Path, resume: str) -> bool:
    """Whether a job with this `resume` wrote the checkpoint; also if it cannot be read, it will be passed over then."""
    try:
        return read_config(directory / "config.yaml").resume == resume
    except (ConfigError, OSError):
        return True


def _listed(directories: Sequence[Path]) -> str:
    return f"checkpoints {', '.join(path.name for path in reversed(directories))}" if directories else "no checkpoints"
