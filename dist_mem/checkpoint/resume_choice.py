"""Choose the checkpoint that a job resumes from, the same on all ranks: by `resume`, or the newest that verifies.

Only rank 0 lists directories and reads manifests; it sends the result to the other ranks. All ranks hash the files
together, each file preferably on the rank that will read it. Any error on one rank, even a disk that does not answer,
is reported to all ranks: the checkpoint is passed over and kept for inspection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dist_mem.checkpoint.manifest import (
    first_verified,
    list_steps,
    rank_of,
    read_manifest,
    run_of,
    step_dir,
    unreadable_error,
    verify_file,
)
from dist_mem.config import ConfigError, read_config
from dist_mem.errors import CheckpointError
from dist_mem.runtime.distributed import World, decide_on_rank0, gather_objects

AUTO, NEVER = "auto", "never"

ResultT = TypeVar("ResultT")


class ResumeChoice(NamedTuple):
    """The checkpoint that a job resumes from."""

    directory: Path
    manifest: dict[str, Any]
    passed_over: list[str]  # reasons why better checkpoints were not chosen
    superseded: list[Path]  # newer checkpoints of the run, where an earlier one was requested
    broken: list[Path]  # other checkpoints of the run that were passed over


class ResumeRequest(NamedTuple):
    """The checkpoints that `resume` selects in a run directory."""

    candidates: list[Path]  # best first; the first that verifies is used
    run_checkpoints: list[Path]  # of the run itself, if those newer than the chosen one are to be set aside; else empty


def choose_checkpoint(
    resume: str, run_dir: Path, world: World, set_aside: Collection[Path] = ()
) -> ResumeChoice | None:
    """Return the checkpoint to resume from, the same on every rank; None for a run that has no checkpoints.

    Args:
        set_aside: checkpoints that the running job has passed over, and does not choose any more.

    Raises:
        CheckpointError: on every rank; no checkpoint verifies, or `resume` selects none that can be used.
    """
    requests: list[ResumeRequest] = []

    def find() -> list[Path]:
        request = decide_on_rank0(lambda: read_or_refuse(lambda: find_candidates(resume, run_dir)))
        requests.append(request._replace(candidates=[path for path in request.candidates if path not in set_aside]))
        return requests[-1].candidates

    found = first_verified(find, lambda directory: verify_together(directory, world))
    if found is None:
        return None
    (directory, manifest, reasons), (candidates, run_checkpoints) = found, requests[-1]
    newer = [path for path in run_checkpoints if path.name > directory.name]
    skipped = [path for path in candidates[: len(reasons)] if run_of(path).resolve() == run_dir.resolve()]
    return ResumeChoice(directory, manifest, reasons, newer, [path for path in skipped if path not in newer])


def verify_together(directory: Path, world: World) -> dict[str, Any]:
    """Verify a checkpoint on all ranks, each of which hashes a share of the files; return the manifest.

    Raises:
        CheckpointError: on every rank; names the first problem, and the rank that found it.
    """
    manifest = decide_on_rank0(lambda: read_or_refuse(lambda: read_manifest(directory)))
    problems = gather_objects(_first_problem(directory, manifest["files"], world))
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise type(problem)(f"{problem} (seen by rank {rank} of {world.size})" if world.size > 1 else str(problem))
    return manifest


def read_or_refuse(read: Callable[[], ResultT]) -> ResultT:
    """Return the result of `read`. An OSError becomes a CheckpointError, as `unreadable_error` chooses it."""
    try:
        return read()
    except OSError as error:
        raise unreadable_error(error, f"checkpoints cannot be read: {error}") from error


def _first_problem(directory: Path, files: dict[str, Any], world: World) -> CheckpointError | None:
    try:
        for name in _share(sorted(files), world):
            verify_file(directory, name, files[name])
    except Exception as error:  # of any kind: the other ranks wait for this result
        named = f"{directory}: {type(error).__name__}: {error}"
        return error if isinstance(error, CheckpointError) else unreadable_error(error, named)
    return None


def _share(names: Sequence[str], world: World) -> Iterator[str]:
    """Yield this rank's files, which it will read if the world size is unchanged, and a share of the common files."""
    for position, name in enumerate(names):
        written_by = rank_of(name)
        if (position if written_by is None else written_by) % world.size == world.rank:
            yield name


def find_candidates(resume: str, run_dir: Path) -> ResumeRequest:
    """Return the checkpoints that `resume` selects, best first.

    Raises:
        CheckpointError: there is no checkpoint of that step or at that path, or the run's checkpoints conflict with
            `resume`.
    """
    existing = [step_dir(run_dir, step) for step in reversed(list_steps(run_dir))]
    if resume == AUTO:
        return ResumeRequest(existing, [])
    if resume == NEVER:
        if existing:
            raise CheckpointError(
                f"resume = never, but {run_dir} has {_name_checkpoints(existing)}: a run with checkpoints resumes from "
                "them, it never starts over silently. Give this run another run_dir, or leave resume out"
            )
        return ResumeRequest([], [])
    requested = _find_requested(resume, run_dir, existing)
    # The request may be repeated, as by a requeue: the job then resumes from what it has saved since the first start.
    since = list(takewhile(lambda path: path not in requested and _has_request(path, resume), existing))
    if not since and not requested[0].exists():  # since the first request, checkpoint.keep_last may have deleted it
        raise CheckpointError(
            f"resume = {resume}: there is no {requested[0]}; {run_dir} has {_name_checkpoints(existing)}"
        )
    is_own = run_of(requested[0]).resolve() == run_dir.resolve()
    if not is_own and len(since) < len(existing):
        raise CheckpointError(
            f"resume = {resume}, but {run_dir} has {_name_checkpoints(existing)} of its own: give the run that resumes "
            "from there another run_dir, or leave resume out"
        )
    return ResumeRequest([*since, *requested], existing if is_own else [])


def _find_requested(resume: str, run_dir: Path, existing: Sequence[Path]) -> list[Path]:
    """Return the checkpoint of a step, the one at a path, or those of the run at a path, newest first."""
    if resume.isdecimal():
        return [step_dir(run_dir, int(resume))]
    path = Path(resume)
    of_run = [step_dir(path, step) for step in reversed(list_steps(path))]
    same = [known for known in existing if known.exists() and path.exists() and known.samefile(path)]
    return of_run or same or [path]


def _has_request(directory: Path, resume: str) -> bool:
    """Whether a job with this `resume` wrote the checkpoint; True if that cannot be read: it will be passed over."""
    try:
        return read_config(directory / "config.yaml").resume == resume
    except (ConfigError, OSError):
        return True


def _name_checkpoints(directories: Sequence[Path]) -> str:
    return f"checkpoints {', '.join(path.name for path in reversed(directories))}" if directories else "no checkpoints"
