"""Kills, signals, power losses and moves to other ranks, with every memory: the same bits, and all points once.

pytest -m nightly tests/training/test_nothing_lost.py -s      # prints what was counted
"""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.checkpoint.manifest import list_steps, step_dir
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, EXIT_REQUEUE
from dist_mem.memory import memory_kinds
from dist_mem.tracking.log import METRICS_FILE, find_entries, read_points
from dist_mem.tracking.mlflow.store import RUN_ID_FILE
from tests.support.contract_cases import CASES, SEG_LEN
from tests.support.curricula import make_data
from tests.support.fork_server import fork_server
from tests.support.forked_ranks import Ranks
from tests.support.jobs import build_books, checkpoint_content, difference, losses, train_here, write_config
from tests.support.limits import wait_until
from tests.support.power import Disk, disk_without_power
from tests.support.ranks import Pools
from tests.support.restoring import CHAINS, train_leg
from tests.support.saving import newest_verified
from tests.support.tracked import history, nested_runs, track_sync

# Of each memory: losses of power, kills and signals after a new checkpoint, and kills at any time of a start.
ENDS = {"power": 10, "SIGKILL": 20, "SIGTERM": 10, "at once": 5}
EVERY = 3  # steps between two checkpoints
SEED = 11


def config_of(path: Path, books: Path, run_dir: Path, memory: dict[str, Any], *changes: dict[str, Any]) -> Path:
    """An endless run of two ranks that keeps a log."""
    tracking = {"mlflow": True, "send": "never", "system_metrics": False}
    endless = {"train": {"steps": 10**6, "seg_len": SEG_LEN}, "schedule": {"kind": "constant"}, "tracking": tracking}
    checkpoint = {"checkpoint": {"every": EVERY, "keep_last": 2}}
    return write_config(path, books, run_dir, endless, checkpoint, *changes, memory=memory)


def last_saved(run_dir: Path) -> int:
    return max(list_steps(run_dir), default=0)


def last_logged(run_dir: Path) -> int:
    """The last step that MLflow is to get, of a job that was killed before it saved that step too."""
    points = find_entries(run_dir / METRICS_FILE, "point")
    return max(point.body["step"] for point in points)


def disturb(config: Path, run_dir: Path, disk: Disk, how: str, choose: random.Random) -> None:
    """Start the run, let it save, and end it at some instant by a loss of power, or by a signal to one rank."""
    had = last_saved(run_dir)
    job = Ranks(main, [[["train", str(config)]]] * 2, folder=config.parent)
    try:
        if how == "at once":
            time.sleep(choose.uniform(0, 4))
        else:
            wait_until(lambda: last_saved(run_dir) > had, "a checkpoint", seconds=240)
            time.sleep(choose.uniform(0, 0.5))
        if how == "power":
            disk.cut()
            for process in job.processes:
                process.kill()
        else:
            os.kill(choose.choice(job.processes).pid, signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
    finally:
        codes, texts = job.finish(patience=0.5 if how == "power" else 5.0)
        for process in job.processes:
            process.kill()
    assert how == "power" or set(codes) <= {-signal.SIGKILL, -signal.SIGTERM, EXIT_FAILED, EXIT_REQUEUE}, texts
    assert how == "power" or last_saved(run_dir) >= had, texts
    if how == "power":
        disk.restart()
        (run_dir / "lease.json").unlink(missing_ok=True)  # of a machine that is off: each start would wait a minute


def assert_every_point_once(run_dir: Path, last: int, uri: str, client: Any) -> int:
    """In metrics.jsonl and, after a sync, in MLflow; returns how many points those are."""
    assert [point.step for point in read_points(run_dir / METRICS_FILE)] == list(range(1, last + 1))
    assert track_sync([run_dir], [f"tracking.uri={uri}"]) == EXIT_DONE
    run_id = (run_dir / RUN_ID_FILE).read_text().strip()
    assert sorted(step for step, _ in history(client, run_id, "loss")) == list(range(1, last + 1))
    assert nested_runs(client, run_id) == []
    return last


# Of today's recipe: matrices by Muon, a rate that holds up to the last step, and two sources by weight.
RECIPE = "muon, wsd and a mixture"


def recipe_of(tmp_path: Path, books: Path) -> dict[str, Any]:
    chat = make_data(tmp_path / "chat", [24 + 5 * number for number in range(12)])
    return {
        "optimizer": {"kind": "muon", "groups": []},
        "schedule": {"kind": "wsd", "decay_steps": 1},
        "data": {"mixture": [{"path": str(books), "weight": 2}, {"path": str(chat), "weight": 1}]},
    }


@pytest.mark.nightly
@pytest.mark.parametrize("case", [*memory_kinds(), "infinite over lamemo", RECIPE])
def test_kills_and_power_losses_cost_neither_a_bit_nor_a_point(
    tmp_path: Path, rank_pool: Pools, sqlite_uri: str, client: Any, case: str
) -> None:
    """With dropout; the last memory samples what it has read, and remembers without end."""
    fork_server()
    books, choose = build_books(tmp_path), random.Random(SEED)
    ends = [how for how, number in ENDS.items() for _ in range(number)]
    choose.shuffle(ends)
    with disk_without_power(tmp_path / "disk") as disk:
        run_dir, alone = disk.folder / "run", tmp_path / "alone"
        memory, changes = CASES.get(case, CASES["transformer_xl"]), recipe_of(tmp_path, books) if case == RECIPE else {}
        configs = [config_of(tmp_path / f"{path.name}.yaml", books, path, memory, changes) for path in (run_dir, alone)]
        for how in ends:
            disturb(configs[0], run_dir, disk, how, choose)
            assert newest_verified(run_dir)[1] == [], "a checkpoint that has its name is whole"
        last = (last_logged(run_dir) // EVERY + 1) * EVERY  # a run that ended before would leave those points in MLflow
        for config in configs:
            assert rank_pool(2).run(train_here, config, [f"train.steps={last}"]) == [EXIT_DONE] * 2
        contents = [checkpoint_content(step_dir(path, last)) for path in (run_dir, alone)]
        assert difference(*contents) is None
        assert losses(run_dir) == losses(alone)
        num_points = assert_every_point_once(run_dir, last, sqlite_uri, client)
    print(f"\n{case}: {ENDS}, bits equal at step {last}, {num_points} points once")


@pytest.mark.nightly
@pytest.mark.parametrize("chain", [0, 1, 2])
@pytest.mark.parametrize("kind", memory_kinds())
def test_moves_to_other_ranks_cost_no_point(
    tmp_path: Path, rank_pool: Pools, sqlite_uri: str, client: Any, kind: str, chain: int
) -> None:
    """That a move is exact to the bit is shown in test_elastic.py; here training goes on, and points are counted."""
    books, run_dir = build_books(tmp_path), tmp_path / "run"
    small = {"model": {"dropout": 0.0}, "deepspeed": {"zero_optimization": {"sub_group_size": 500}}}
    config = config_of(tmp_path / "run.yaml", books, run_dir, CASES[kind], small)
    legs = [*CHAINS[chain], CHAINS[chain][0]]
    for number, leg in enumerate(legs, start=1):
        train_leg(rank_pool, config, leg, steps=number * EVERY)
    num_points = assert_every_point_once(run_dir, len(legs) * EVERY, sqlite_uri, client)
    moves = " -> ".join(f"{leg.world} (ZeRO {leg.stage})" for leg in legs)
    print(f"\n{kind}: ranks {moves}, {num_points} points once")
    shutil.rmtree(run_dir)
