"""One save, from the copy of the state to the rename: nothing aliased, few files, one message, one writer."""

import copy
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from dist_mem.checkpoint.lane_states import Lanes
from dist_mem.checkpoint.manifest import describe_file
from dist_mem.checkpoint.rank_file import safetensors_parts
from dist_mem.checkpoint.saver import Saver
from dist_mem.checkpoint.snapshot import Snapshot, take_snapshot
from dist_mem.config import CheckpointConfig
from dist_mem.errors import TakenOverError
from dist_mem.runtime.distributed import World
from dist_mem.runtime.files import write_hashed
from dist_mem.supervision.lease import Lease
from tests.support.ranks import Pools
from tests.support.saving import FACTS, before_writing, names
from tests.support.tiny import run_steps, tiny_config, tiny_job

NEEDED = {key: fact for key, fact in FACTS.items() if key not in ("world_size", "versions", "lanes")}


def snapshot_of(job: Any, metadata: dict[str, Any] | None = None) -> Snapshot:
    lanes, small_files = Lanes(job.lane_ids, job.cursors, job.states), {"config.yaml": b"a: 1\n"}
    return take_snapshot(
        step=job.step, engine=job.engine, lanes=lanes, small_files=small_files, metadata={**NEEDED, **(metadata or {})}
    )


def test_a_file_is_the_library_s_own_to_the_last_byte(tmp_path: Path) -> None:
    dtypes = [torch.uint8, torch.float16, torch.int64, torch.bool, torch.float32, torch.bfloat16, torch.float64]
    dtypes += [torch.int32, torch.int16, torch.int8, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]
    dtypes += [torch.uint16, torch.uint32, torch.uint64]
    tensors = {f"kind/{number}.weight": torch.arange(number + 1).to(dtype) for number, dtype in enumerate(dtypes)}
    tensors |= {"none": torch.zeros(0, 3), "scalar": torch.tensor(7.0), "matrix \u00e9": torch.rand(3, 5)}
    entry = write_hashed(tmp_path / "ours", safetensors_parts(tensors))
    assert (tmp_path / "ours").read_bytes() == save(tensors)
    assert entry == describe_file(tmp_path / "ours")
    described = {"format": "pt"}
    assert b"".join(safetensors_parts(tensors, metadata=described)) == save(tensors, metadata=described)


def snapshots_around_training(world: World, stage: int) -> None:
    config = tiny_config({"optimizer": {"kind": "adamw", "lr": 0.1}, "train": {"precision": "bf16"}})
    job = tiny_job(config, world, stage=stage)
    run_steps(job, first=0, last=1)
    losses = [5.0]
    snapshot = snapshot_of(job, {"losses": losses})
    losses.append(4.0)
    assert snapshot.metadata == {**NEEDED, "losses": [5.0]}
    before = {kind: {name: tensor.clone() for name, tensor in found.items()} for kind, found in snapshot.parts.items()}
    counters = copy.deepcopy(snapshot.engine)
    torch.rand(1)
    run_steps(job, first=1, last=2)
    later = snapshot_of(job)
    assert snapshot.engine == counters != later.engine
    for kind, tensors in before.items():
        assert all(torch.equal(tensor, snapshot.parts[kind][name]) for name, tensor in tensors.items())
        assert any(not torch.equal(tensor, later.parts[kind][name]) for name, tensor in tensors.items()), kind


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_snapshot_does_not_move_with_the_training(rank_pool: Pools, stage: int) -> None:
    rank_pool(2).run(snapshots_around_training, stage)


def count_of_one_save(world: World, run_dir: Path, num_layers: int) -> tuple[int, int, int]:
    """Files and fsyncs as reported, and the fsyncs that this rank really made."""
    job = tiny_job(tiny_config({"model": {"num_layers": num_layers}}), world, stage=2)
    snapshot = snapshot_of(job)
    saver = Saver(run_dir, world, CheckpointConfig(background=False))
    made, fsync = list[None](), os.fsync
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: made.append(fsync(descriptor)))
        saver.save(snapshot, began=time.perf_counter())
    saver.close()
    [saved] = saver.take_finished()
    return saved.written.num_files, saved.written.num_fsyncs, len(made)


def test_there_is_one_file_a_rank_whatever_the_model(tmp_path: Path, rank_pool: Pools) -> None:
    reported = {}
    for world_size in (1, 2):
        for num_layers in (1, 3):
            run_dir = tmp_path / f"{world_size}-{num_layers}"
            counts = rank_pool(world_size).run(count_of_one_save, run_dir, num_layers)
            [(num_files, num_fsyncs)] = {(files, fsyncs) for files, fsyncs, _ in counts}
            assert num_files == sum(path.is_file() for path in (run_dir / "checkpoints").rglob("*"))
            assert num_fsyncs == sum(made for _, _, made in counts)
            reported[world_size, num_layers] = num_files, num_fsyncs
    assert reported == {(1, 1): (5, 9), (1, 3): (5, 9), (2, 1): (6, 10), (2, 3): (6, 10)}


def save_after_a_takeover(world: World, run_dir: Path) -> str:
    """The other job takes the directory over while rank 1 of this one still writes."""
    lease = Lease(run_dir) if world.rank == 0 else None
    saver = Saver(run_dir, world, CheckpointConfig(background=False))

    def take_over(path: Path) -> None:
        if path.parent.name == "ranks":
            holder = {"format_version": 1, "host": os.uname().nodename, "pid": 1}
            (run_dir / "lease.json").write_text(json.dumps(holder))

    with before_writing(take_over), pytest.raises(TakenOverError) as caught:
        saver.save(snapshot_of(tiny_job(tiny_config(), world, stage=2)), began=time.perf_counter())
    saver.close()
    if lease is not None:
        lease.release()
    return str(caught.value)


def test_a_job_that_has_lost_its_lease_commits_nothing(tmp_path: Path, rank_pool: Pools) -> None:
    """And removes nothing: the directory with that name may be the other job's."""
    first, second = rank_pool(2).run(save_after_a_takeover, tmp_path)
    assert first == second
    assert f"process 1 on {os.uname().nodename} has taken the run directory over; leave it to that job" in first
    assert names(tmp_path) == [".step-00000000.partial"]
