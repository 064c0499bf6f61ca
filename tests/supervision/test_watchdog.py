"""Nothing moves any more: every live rank tells where it stands, the suspects are named, and the job ends in time."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_mem.__main__ import main
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, EXIT_HUNG, EXIT_REQUEUE
from dist_mem.runtime.environment import node_name
from dist_mem.runtime.ranks import read_ranks
from dist_mem.supervision import watchdog
from dist_mem.supervision.hang_report import Position, failed_nodes, read_positions, report, suspects, write_position
from dist_mem.supervision.watchdog import beat
from dist_mem.tracking.log import METRICS_FILE, find_entries
from dist_mem.training import loop, run
from dist_mem.training import step as update
from dist_mem.training.agreement import Agreed, Agreement
from dist_mem.training.feed import Feed
from tests.support.fork_server import fork_server
from tests.support.forked_ranks import Ended, Program, Ranks
from tests.support.jobs import build_books, logged_steps, start_ranks, write_config
from tests.support.limits import limit, wait_until

pytestmark = pytest.mark.ranks

ENDLESS = {"train": {"steps": 10**6, "global_batch_size": 12}, "checkpoint": {"every": 50}}


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fork_server()
    return build_books(tmp_path_factory.mktemp("books"))


def config_of(folder: Path, books: Path, *changes: dict[str, Any], seconds: float) -> Path:
    """An endless run in FOLDER/run."""
    return write_config(
        folder / "run.yaml", books, folder / "run", ENDLESS, {"watchdog": {"seconds": seconds}}, *changes
    )


def the_hang(folder: Path) -> Path:
    (found,) = (folder / "run" / "hangs").iterdir()
    return found


def end_stopped(processes: list[Program]) -> None:
    """Whatever is left of a job; what killed processes of DeepSpeed leave in memory too."""
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize(("size", "stopped"), [(2, 1), (3, 0)])
def test_a_rank_that_is_stopped_is_named_and_the_job_ends_within_five_seconds_of_the_time_out(
    tmp_path: Path, books: Path, size: int, stopped: int
) -> None:
    tracked = {"tracking": {"mlflow": True, "uri": f"sqlite:///{tmp_path}/mlflow.db", "system_metrics": False}}
    config = config_of(tmp_path, books, tracked, seconds=5)
    processes = start_ranks(["train", str(config)], world_size=size, cwd=tmp_path)
    try:
        wait_until(lambda: 4 in logged_steps(tmp_path / "run"), "step 4")
        processes[stopped].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        live = [rank for rank in range(size) if rank != stopped]
        texts = {rank: processes[rank].communicate(timeout=limit(60))[0] for rank in live}
        took = time.monotonic() - began
    finally:
        end_stopped(processes)
    assert [processes[rank].returncode for rank in live] == [EXIT_HUNG] * len(live), texts
    assert 4 < took < limit(5 + 5)
    text = (the_hang(tmp_path) / "report.txt").read_text()
    assert f"suspect: rank {stopped} ({node_name()}) has reported nothing" in text
    assert [rank for rank in live if text in texts[rank]] == live[:1], "the lowest live rank prints it, and no other"
    positions = read_positions(the_hang(tmp_path))
    assert [position.rank for position in positions] == live
    assert all(position.step is not None and position.step >= 4 for position in positions)
    for rank in live:
        stacks = (the_hang(tmp_path) / f"rank-{rank:05d}.txt").read_text()
        assert "MainThread" in stacks and 'step.py", line' in stacks and "prefetch.py" in stacks
    assert (tmp_path / "run" / "slurm" / "failed_nodes").read_text() == f"{node_name()}\n"
    statuses = [entry.body["status"] for entry in find_entries(tmp_path / "run" / METRICS_FILE, "status")]
    assert statuses == (["RUNNING"] if stopped == 0 else ["RUNNING", "FAILED"])


def test_a_job_that_was_suspended_as_a_whole_goes_on(tmp_path: Path, books: Path) -> None:
    config = config_of(tmp_path, books, seconds=3)
    processes = start_ranks(["train", str(config)], world_size=2, cwd=tmp_path)
    try:
        wait_until(lambda: 4 in logged_steps(tmp_path / "run"), "step 4")
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        time.sleep(7)  # a time that passes, not one in which something is to happen
        step = logged_steps(tmp_path / "run")[-1]
        for process in processes:
            process.send_signal(signal.SIGCONT)
        wait_until(lambda: logged_steps(tmp_path / "run")[-1] > step + 20, "20 steps more")
        time.sleep(3)
        processes[0].send_signal(signal.SIGTERM)
        texts = [process.communicate(timeout=limit(60))[0] for process in processes]
    finally:
        end_stopped(processes)
    assert [process.returncode for process in processes] == [EXIT_REQUEUE] * 2, texts
    assert not (tmp_path / "run" / "hangs").exists()


def test_the_others_end_with_an_error_when_a_rank_dies(tmp_path: Path, books: Path) -> None:
    """gloo tells them at once; where nobody does, the watchdog is there."""
    config = config_of(tmp_path, books, seconds=20)
    processes = start_ranks(["train", str(config)], world_size=3, cwd=tmp_path)
    try:
        wait_until(lambda: 4 in logged_steps(tmp_path / "run"), "step 4")
        processes[1].kill()
        for rank in (0, 2):
            processes[rank].communicate(timeout=limit(60))
    finally:
        end_stopped(processes)
    assert [processes[rank].returncode for rank in (0, 2)] == [EXIT_FAILED] * 2


def run_disturbed(config: str, what: str) -> int:
    """`dist-mem train CONFIG` on a rank to which something happens in step 5."""
    rank = read_ranks()[0]
    read_ahead, finish, begin_step = Feed.read_ahead, update.finish, loop.begin_step
    step = 0

    def begin(number: int) -> None:
        nonlocal step
        step = number
        begin_step(number)

    def read(feed: Feed) -> list[int]:
        if what == "stuck in its data" and rank == 1 and step == 5:
            time.sleep(600)
        if what == f"late on rank {1 - rank}" and step == 5:
            time.sleep(600)
        if what == "a slow first step" and step == 0:
            time.sleep(4)
        return read_ahead(feed)

    def agree(agreement: Agreement) -> Agreed:
        if what == "stuck in a collective" and step == 5:
            beat("agreeing")
            dist.recv(torch.zeros(1), src=1 - rank)  # each from the other one
        return finish(agreement)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Feed, "read_ahead", read)
        patch.setattr(loop, "begin_step", begin)
        if what == f"late on rank {rank}":  # it decides long after the others, as in a phase that may take longer
            watched = run.watched
            patch.setattr(run, "watched", lambda run_dir, world, seconds: watched(run_dir, world, 60.0))
        patch.setattr(update, "finish", agree)
        return main(["train", config])


def disturbed(folder: Path, config: Path, what: str) -> Ended:
    return Ranks(run_disturbed, [(str(config), what)] * 2, folder=folder).finish(patience=20)


def test_a_rank_that_is_stuck_alone_is_behind_the_others(tmp_path: Path, books: Path) -> None:
    ended = disturbed(tmp_path, config_of(tmp_path, books, seconds=3), "stuck in its data")
    assert ended.codes == [EXIT_HUNG] * 2, ended.texts
    text = (the_hang(tmp_path) / "report.txt").read_text()
    assert f"suspect: rank 1 ({node_name()}) is behind the others: step 5, reading data" in text
    assert "  waiting in step 5, " in text
    assert ", which rank 1 has not reached\n" in text, "the recorder of collectives agrees"
    assert ", in read\n" not in (the_hang(tmp_path) / "rank-00000.txt").read_text()
    assert " in read\n" in (the_hang(tmp_path) / "rank-00001.txt").read_text(), "the place where it is stuck"


def test_a_collective_in_which_all_are_stuck_suspects_nobody(tmp_path: Path, books: Path) -> None:
    ended = disturbed(tmp_path, config_of(tmp_path, books, seconds=3), "stuck in a collective")
    assert ended.codes == [EXIT_HUNG] * 2, ended.texts
    text = (the_hang(tmp_path) / "report.txt").read_text()
    assert f"all ranks wait in agreeing: a stuck collective, or the network between {node_name()}" in text
    assert "suspect" not in text
    assert not (tmp_path / "run" / "slurm").exists()


def test_a_run_directory_that_cannot_be_written_does_not_keep_a_hanging_job(tmp_path: Path, books: Path) -> None:
    config = config_of(tmp_path, books, seconds=3)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hangs").write_text("a file")
    ended = disturbed(tmp_path, config, "stuck in its data")
    assert ended.codes == [EXIT_HUNG] * 2, ended.texts
    for rank, text in enumerate(ended.texts):
        assert f"cannot be written; the stacks of rank {rank}:" in text
        assert "most recent call first" in text and "hang: nothing has moved for " in text


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("is_written", [True, False])
def test_a_rank_that_is_cut_off_by_the_end_of_a_hanging_one_has_hung_too(
    tmp_path: Path, books: Path, late: int, is_written: bool
) -> None:
    """Its connections break before its own watchdog has decided; the run directory may be out of order as well."""
    config = config_of(tmp_path, books, seconds=3)
    if not is_written:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "hangs").write_text("a file")
    ended = disturbed(tmp_path, config, f"late on rank {late}")
    assert ended.codes == [EXIT_HUNG] * 2, ended.texts


def test_the_first_step_may_take_three_times_as_long(tmp_path: Path, books: Path) -> None:
    """It sleeps twice `watchdog.seconds`."""
    ended = disturbed(tmp_path, config_of(tmp_path, books, {"train": {"steps": 3}}, seconds=2), "a slow first step")
    assert ended.codes == [EXIT_DONE] * 2, ended.texts


def position(rank: int, beats: int = 100, phase: str = "agreeing") -> Position:
    return Position(rank, f"node{rank // 2}", 1000 + rank, 7, phase, beats, 600.2)


NODES = [f"node{rank // 2}" for rank in range(8)]


def test_silent_ranks_are_suspected_before_those_that_are_behind() -> None:
    reported = [position(rank) for rank in range(8)]
    assert suspects(reported, NODES) == {}
    assert list(suspects([*reported[:3], position(3, 90), *reported[4:]], NODES)) == [3]
    assert list(suspects([*reported[:3], position(3, 90), *reported[6:]], NODES)) == [4, 5]
    ahead = [*(position(rank, 90) for rank in range(7)), position(7)]
    assert suspects(ahead, NODES) == {}, "seven of eight are behind one: they wait for something that it has got"


def test_report_is_a_few_lines_for_many_ranks(tmp_path: Path) -> None:
    nodes = [f"node{rank // 8}" for rank in range(512)]
    reported = [Position(rank, nodes[rank], 1, 7, "backward", 90, 600.2) for rank in range(512) if rank != 203]
    text = report(reported, nodes, seconds=600, folder=tmp_path)
    assert text.splitlines() == [
        "hang: nothing has moved for 600 s (watchdog.seconds = 600)",
        "suspect: rank 203 (node25) has reported nothing: it is stopped or dead, or its node is",
        "  waiting in step 7, backward: rank 0-202, 204-511",
        f"stacks of all threads: {tmp_path}",
    ]


def test_a_failed_node_is_listed_once_and_many_silent_ones_are_not(tmp_path: Path) -> None:
    """Rather the network than half of the nodes; a start without them would be one without most of the job."""
    for missing in ([4, 5, 6, 7], [2, 3], [3], [4]):
        failed_nodes(tmp_path, [position(rank) for rank in range(8) if rank not in missing], NODES)
        assert (tmp_path / "slurm" / "failed_nodes").exists() is (len(missing) < 4)
    assert (tmp_path / "slurm" / "failed_nodes").read_text() == "node1\nnode2\n"


def test_a_standing_comes_back_as_it_was_written(tmp_path: Path) -> None:
    before_the_first_step = position(2)._replace(step=None, phase="opening")
    for mine in (position(1), before_the_first_step):
        write_position(tmp_path / "hangs", mine)
    assert read_positions(tmp_path / "hangs") == [position(1), before_the_first_step]
    assert before_the_first_step.place == "opening"


def test_work_that_does_not_come_back_is_given_up() -> None:
    """As of a file system that does not answer."""
    began = time.monotonic()
    may_end = threading.Event()
    assert watchdog.quickly(may_end.wait, 0.2) is None
    may_end.set()
    assert time.monotonic() - began < limit(10)
    assert watchdog.quickly(lambda: 7, 10) == 7
    assert watchdog.quickly(Path("/no/such/place").stat, 10) is None


@pytest.mark.skipif(sys.platform != "linux", reason="counts microseconds of this machine")
def test_a_mark_costs_next_to_nothing() -> None:
    began = time.perf_counter()
    for _ in range(10_000):
        watchdog.beat("forward")
    assert (time.perf_counter() - began) / 10_000 < 20e-6
