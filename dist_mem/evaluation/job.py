"""What commands that read a trained model share: their ranks, the checkpoint, threads, the results in MLflow.

Results of data that a model was not trained on have names of their own, so that they replace none of the run's. Data
are those of the training if `data.path` is the one in the checkpoint, or if their training split has the fingerprint of
the training's: a folder may move. An address of a server is not opened for this.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from dist_mem.checkpoint.resume_choice import verify_together
from dist_mem.config import DataConfig, EvalConfig, TrackingConfig, TrainConfig, WatchdogConfig, load_block
from dist_mem.data.directory import local_dir, open_index, refresh
from dist_mem.data.remote.fetch import is_remote
from dist_mem.data.shard import INDEX_NAME, read_index
from dist_mem.errors import EXIT_DONE, CutShortError, UnusableError, run_error
from dist_mem.evaluation.memory_file import MemoryFile, read_memory_file
from dist_mem.evaluation.protocol import Protocol
from dist_mem.evaluation.report_names import data_part
from dist_mem.evaluation.trained_model import Checkpoint, first_checkpoint, list_candidates
from dist_mem.runtime import distributed
from dist_mem.runtime.distributed import World, decide_on_rank0, gather_objects, on_all_ranks, sum_over_ranks
from dist_mem.runtime.figures import is_figure
from dist_mem.runtime.files import is_missing
from dist_mem.runtime.locks import hold_file
from dist_mem.runtime.ranks import read_ranks
from dist_mem.runtime.signals import StopSignal
from dist_mem.runtime.terminal import some
from dist_mem.supervision.findings import refuse
from dist_mem.supervision.rendezvous import wait_for_ranks
from dist_mem.tracking.mlflow.sync import log_to_run

_STOPPED = "stopped by {}: no file is half written, the same command makes it again"


def _join(overrides: Sequence[str], early: StopSignal | None) -> World:
    """Join the other ranks. Without the rendezvous, torch would wait half an hour for a missing rank without a message.

    Raises:
        UnfitError, UnusableError: on every rank present; names missing ranks, and nodes without a GPU.
        CutShortError: a signal was received.
    """

    def check() -> None:
        if early is not None and early.received is not None:
            raise CutShortError(_STOPPED.format(early.received))

    given = [text for text in overrides if text.startswith("watchdog.")]
    seconds = load_block(WatchdogConfig, "watchdog", given).join_seconds
    with distributed.joining():
        is_alone = read_ranks()[1] == 1
        rendezvous = None if is_alone else wait_for_ranks(seconds=seconds, check=check)  # keeps rank 0's store alive
        if rendezvous is not None:
            refuse(rendezvous.findings, rendezvous.nodes)
        return distributed.initialize()


def run_on_ranks(
    work: Callable[[World, StopCheck], None],
    overrides: Sequence[str] = (),
    early: StopSignal | None = None,
    *,
    alone: str = "",
) -> int:
    """Run `work` on every rank of this job; return the exit code of the process, which is 0.

    Args:
        work: called with the world and a check; it must call the check before every forward, equally often on every
            rank.
        overrides: those of the command; `watchdog.join_seconds` is the time to wait for the next rank.
        early: a scheduler's signal on any rank ends the work on all ranks, with exit code 85.
        alone: the command, if it runs on one process only.

    Raises:
        RunError: on every rank; the request cannot be carried out as it is, a rank is missing, or the work was cut
            short.
    """
    world = _join(overrides, early)
    all_end_here = False
    try:
        if alone and world.size > 1:
            fix = "start it without a launcher"
            raise UnusableError(f"dist-mem {alone} runs on one process, not on {world.size}: {fix}")
        work(world, stop_check(lambda: early is not None and early.received is not None, world))
        all_end_here = True
    except CutShortError as error:
        gathered = gather_objects(f"{early.received} on rank {world.rank}" if early and early.received else None)
        names = some([text for text in gathered if text], 3)
        all_end_here = True
        raise CutShortError(_STOPPED.format(names)) from error
    except (OSError, ValueError) as error:
        raise run_error(error) from error
    finally:
        distributed.shut_down(agreed=all_end_here)
    return EXIT_DONE


def find_checkpoint_together(path: Path, step: int | None, world: World) -> Checkpoint:
    """Return what `find_checkpoint` does, on every rank; each hashes a share of the files, and rank 0 prints remarks.

    Raises:
        CheckpointError: on every rank; there is none, or it is damaged.
    """
    found = first_checkpoint(
        lambda: decide_on_rank0(lambda: list_candidates(path, step)),
        lambda directory: verify_together(directory, world),
    )
    for remark in found.remarks if world.rank == 0 else ():
        print(remark, file=sys.stderr)
    return found


@contextmanager
def hold_on_rank0(target: Path) -> Iterator[None]:
    """Hold the files TARGET.* on rank 0 for the block, in which they are made.

    Raises:
        UnusableError: on every rank; another command makes them.
    """
    with ExitStack() as stack:

        def hold() -> None:
            with suppress(OSError):  # a run that only others may write into: what was found is shown all the same
                stack.enter_context(hold_file(target))

        decide_on_rank0(hold)
        yield


def write_on_rank0(write: Callable[[], None], world: World, what: str) -> None:
    """Call `write` on rank 0; if it fails, all ranks raise with its message."""
    on_all_ranks(lambda: write() if world.rank == 0 else None, what)


def read_memory_file_of(path: Path | None, eval_config: EvalConfig, world: World) -> MemoryFile | None:
    """Read a memory file on every rank; None: none is given.

    Raises:
        UnusableError, UnfitError: on every rank; as `read_memory_file`, or a stream cannot continue it.
    """
    if path is None:
        return None
    if eval_config.layout == "stream":
        raise UnusableError(
            f"--memory {path}: eval.layout is stream, whose lanes begin within documents: set eval.layout=documents"
        )
    return world.agree(lambda: read_memory_file(path), f"reading {path}")


def use_threads(train: TrainConfig) -> None:
    """Apply `train.threads`, which is known only now; `initialize` has divided the cores among the ranks."""
    if train.threads:
        torch.set_num_threads(train.threads)


def describe_evaluation(
    checkpoint: Checkpoint, name: str, protocol: Protocol, memory: MemoryFile | None = None
) -> dict[str, object]:
    """Return what a report's JSON says of the model, the protocol and the memory file."""
    step, directory = checkpoint.manifest["step"], str(checkpoint.directory)
    before = {"memory_file": {"path": str(memory.path), **memory.header}} if memory else {}
    return {"checkpoint": directory, "step": step, "config": name, "protocol": protocol._asdict(), **before}


def track(
    checkpoint: Checkpoint,
    tracking: TrackingConfig,
    metrics: Mapping[str, float],
    files: Sequence[Path],
    overrides: Sequence[str],
) -> None:
    """Print the written files, and add them and the metrics to the run in MLflow, unless the model is an export."""
    print("\n".join(f"written: {path}" for path in files))
    if tracking.mlflow and not checkpoint.is_export:
        step = checkpoint.manifest["step"]
        known = {name: value for name, value in metrics.items() if is_figure(value)}
        complaint = log_to_run(
            tracking, run_dir=checkpoint.run_dir, step=step, metrics=known, files=files, overrides=overrides
        )
        if complaint:
            print(complaint, file=sys.stderr)


LOOK_SECONDS = 1.0  # between two agreements, about: one per forward would keep a GPU waiting for the host

StopCheck = Callable[..., None]  # called before every forward, possibly as a forward hook; raises CutShortError


def stop_check(is_stopping: Callable[[], bool], world: World) -> StopCheck:
    """Return a check that raises CutShortError on every rank, before the same forward, once any rank `is_stopping`.

    All ranks run the same number of forwards. The number between two agreements follows from the time summed over all
    ranks, so it is the same on every rank.
    """
    every = left = 1
    last = time.monotonic()

    def agree() -> int:
        nonlocal last
        now = time.monotonic()
        num_stopping, seconds = sum_over_ranks([float(is_stopping()), now - last], world.device)
        last = now
        if num_stopping:
            raise CutShortError
        pace = seconds / world.size / LOOK_SECONDS
        return every * 2 if pace < 0.5 else max(1, every // 2) if pace > 1 else every

    def check(*_: Any) -> None:
        nonlocal every, left
        left -= 1
        if left == 0:
            every = left = agree()

    return check


def data_tag(checkpoint: Checkpoint, data: DataConfig, split: str) -> str:
    """Return a part of names of results: "", or name and fingerprint of other data, as "mqar_b54a2c".

    Args:
        data: of the evaluation.

    Raises:
        RemoteError: the index of other data cannot be fetched, and is not in the cache.
        ValueError: an index is missing or damaged.
    """
    if _is_own(checkpoint, data):
        return ""
    refresh(data, [split])
    index = open_index(data, split)
    return data_part(index)


def _is_own(checkpoint: Checkpoint, data: DataConfig) -> bool:
    if not checkpoint.is_export:  # which has no place of data
        saved = load_block(DataConfig, "data", [], saved=checkpoint.directory / "config.yaml")
        if saved.path == data.path:
            return True
        if saved.mixture:
            return False  # its sources are scored one by one
    trained = checkpoint.manifest.get("data_fingerprint", "").split()[-1:]  # of the last stage of a curriculum
    folder = local_dir(data) / data.train_split
    if is_remote(data.path) or is_missing(folder / INDEX_NAME):
        return False
    return read_index(folder).fingerprint in trained
