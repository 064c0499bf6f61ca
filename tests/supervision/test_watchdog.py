"""Nothing moves any more: every live rank tells where it stands, the suspects are named, and the job ends in time."""

import json
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_mem.__main__ import main
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, EXIT_HUNG, EXIT_REQUEUE
from dist_mem.runtime import files
from dist_mem.runtime.distributed import World
from dist_mem.runtime.environment import node_name
from dist_mem.runtime.ranks import read_ranks
from dist_mem.supervision import flight_recorder, hang_report, watchdog
from dist_mem.supervision.flight_recorder import read_verdict, save
from dist_mem.supervision.hang_report import (
    Position,
    gather_positions,
    note_failed_nodes,
    read_positions,
    report,
    suspects,
    write_position,
)
from dist_mem.supervision.watchdog import beat
from dist_mem.tracking.log import METRICS_FILE, find_entries
from dist_mem.training import loop, run
from dist_mem.training import step as update
from dist_mem.training.agreement import AgreedUpdate, Agreement
from dist_mem.training.feed import Feed
from tests.support.forked_ranks import Program, Ranks
from tests.support.jobs import logged_steps, start_ranks, write_config
from tests.support.limits import limit, wait_until
from tests.support.ranks import Pools

ENDLESS = {"train": {"steps": 10**6, "global_batch_size": 12}, "checkpoint": {"every": 50}}


def config_of(folder: Path, books: Path, *changes: dict[str, Any], seconds: float) -> Path:
    """An endless run in FOLDER/run."""
    return write_config(
        folder / "run.yaml", books, folder / "run", ENDLESS, {"watchdog": {"seconds": seconds}}, *changes
    )


def the_hang(folder: Path) -> Path:
    (found,) = (folder / "run" / "hangs").iterdir()
    return found


@contextmanager
def in_step_4(config: Path, *, size: int) -> Iterator[list[Program]]:
    """The ranks of a job that has come to step 4; whatever is left of them is killed in the end."""
    processes = start_ranks(["train", str(config)], world_size=size, cwd=config.parent)
    try:
        wait_until(lambda: 4 in logged_steps(config.parent / "run"), "step 4")
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()  # removes what killed processes of DeepSpeed leave in memory too


@pytest.mark.parametrize(("size", "stopped"), [(2, 1), (3, 0)])
def test_a_rank_that_is_stopped_is_named_and_the_job_ends_within_five_seconds_of_the_time_out(
    tmp_path: Path, books: Path, size: int, stopped: int
) -> None:
    tracked = {"tracking": {"mlflow": True, "uri": f"sqlite:///{tmp_path}/mlflow.db", "system_metrics": False}}
    config = config_of(tmp_path, books, tracked, seconds=5)
    with in_step_4(config, size=size) as processes:
        processes[stopped].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        live = [rank for rank in range(size) if rank != stopped]
        texts = {rank: processes[rank].communicate(timeout=limit(60))[0] for rank in live}
        took = time.monotonic() - began
    assert [processes[rank].returncode for rank in live] == [EXIT_HUNG] * len(live), texts
    assert 4 < took < limit(5 + 5)
    text = (the_hang(tmp_path) / "report.txt").read_text()
    assert f"suspect: rank {stopped} ({node_name()}) has reported nothing" in text
    assert [rank for rank in live if text in texts[rank]] == live[:1], "the lowest live rank prints it, and no other"
    positions = read_positions(the_hang(tmp_path))
    assert [position.rank for position in positions] == live
    assert all(position.step is not None and position.step >= 4 for position in positions)
    assert re.search(r"\n  waiting in collective [\d,]+ of gloo group \d+.*, gloo:\w+ of ", text), text
    for rank in live:
        assert (the_hang(tmp_path) / f"collectives-{rank:05d}.json").is_file()
        stacks = (the_hang(tmp_path) / f"rank-{rank:05d}.txt").read_text()
        assert "MainThread" in stacks and 'step.py", line' in stacks and "prefetch.py" in stacks
    assert (tmp_path / "run" / "slurm" / "failed_nodes").read_text() == f"{node_name()}\n"
    statuses = [entry.body["status"] for entry in find_entries(tmp_path / "run" / METRICS_FILE, "status")]
    assert statuses == (["RUNNING"] if stopped == 0 else ["RUNNING", "FAILED"])


def test_a_job_that_was_suspended_as_a_whole_goes_on(tmp_path: Path, books: Path) -> None:
    with in_step_4(config_of(tmp_path, books, seconds=3), size=2) as processes:
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
    assert [process.returncode for process in processes] == [EXIT_REQUEUE] * 2, texts
    assert not (tmp_path / "run" / "hangs").exists()


def test_the_others_end_with_an_error_when_a_rank_dies(tmp_path: Path, books: Path) -> None:
    """gloo tells them at once; where nobody does, the watchdog is there."""
    with in_step_4(config_of(tmp_path, books, seconds=20), size=3) as processes:
        processes[1].kill()
        for rank in (0, 2):
            processes[rank].communicate(timeout=limit(60))
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
        if what == "an error alone" and rank == 1 and step == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return read_ahead(feed)

    def agree(agreement: Agreement) -> AgreedUpdate:
        if what == "stuck in a collective" and step == 5:
            beat("agreeing")
            dist.recv(torch.zeros(1), src=1 - rank)  # each from the other one
        return finish(agreement)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Feed, "read_ahead", read)
        patch.setattr(loop, "begin_step", begin)
        if what == f"late on rank {rank}":  # it decides long after the others, as in a phase that may take longer
            watched = run.watch
            patch.setattr(run, "watch", lambda run_dir, world, seconds: watched(run_dir, world, 60.0))
        patch.setattr(update, "finish", agree)
        if what == "an error alone" and rank == 1:  # as NCCL does while another rank is in a collective
            patch.setattr(dist, "destroy_process_group", lambda: time.sleep(600))
        return main(["train", config])


def disturbed(folder: Path, config: Path, what: str, code: int = EXIT_HUNG) -> list[str]:
    """What the ranks print of a job to which that happens; both end with this code."""
    ended = Ranks(run_disturbed, [(str(config), what)] * 2, folder=folder).finish(patience=20)
    assert ended.codes == [code] * 2, ended.texts
    return ended.texts


def test_a_rank_that_fails_alone_shows_its_error_and_ends_before_anybody_is_suspected(
    tmp_path: Path, books: Path
) -> None:
    texts = disturbed(tmp_path, config_of(tmp_path, books, seconds=3), "an error alone", EXIT_FAILED)
    assert "torch.OutOfMemoryError: CUDA out of memory" in texts[1]
    assert not (tmp_path / "run" / "hangs").exists() and not (tmp_path / "run" / "slurm").exists()


def test_a_rank_that_is_stuck_alone_is_behind_the_others(tmp_path: Path, books: Path) -> None:
    disturbed(tmp_path, config_of(tmp_path, books, seconds=3), "stuck in its data")
    text = (the_hang(tmp_path) / "report.txt").read_text()
    assert f"suspect: rank 1 ({node_name()}) is behind the others: step 5, reading data" in text
    assert "  waiting in step 5, " in text
    assert ", which rank 1 has not reached\n" in text, "the recorder of collectives agrees"
    assert ", in read\n" not in (the_hang(tmp_path) / "rank-00000.txt").read_text()
    assert " in read\n" in (the_hang(tmp_path) / "rank-00001.txt").read_text(), "the place where it is stuck"


def test_a_collective_in_which_all_are_stuck_suspects_nobody(tmp_path: Path, books: Path) -> None:
    disturbed(tmp_path, config_of(tmp_path, books, seconds=3), "stuck in a collective")
    text = (the_hang(tmp_path) / "report.txt").read_text()
    assert f"all ranks wait in agreeing: a stuck collective, or the network between {node_name()}" in text
    assert "suspect" not in text
    assert not (tmp_path / "run" / "slurm").exists()


def test_a_run_directory_that_cannot_be_written_does_not_keep_a_hanging_job(tmp_path: Path, books: Path) -> None:
    config = config_of(tmp_path, books, seconds=3)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "hangs").write_text("a file")
    for rank, text in enumerate(disturbed(tmp_path, config, "stuck in its data")):
        assert f"cannot be written; the stacks of rank {rank}:" in text
        assert "most recent call first" in text and "hang: nothing has moved for " in text
        assert "does not answer in time: what the other ranks have written there may name a suspect\n" in text
        assert text.count("suspect") == 1, "nobody knows who else has reported"


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
    disturbed(tmp_path, config, f"late on rank {late}")


def test_the_first_step_may_take_three_times_as_long(tmp_path: Path, books: Path) -> None:
    """It sleeps twice `watchdog.seconds`."""
    config = config_of(tmp_path, books, {"train": {"steps": 3}}, seconds=2)
    disturbed(tmp_path, config, "a slow first step", EXIT_DONE)


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
    text = report(reported, nodes, suspects(reported, nodes), seconds=600, folder=tmp_path)
    assert text.splitlines() == [
        "hang: nothing has moved for 600 s (watchdog.seconds = 600)",
        "suspect: rank 203 (node25) has reported nothing: it is stopped or dead, or its node is",
        "  waiting in step 7, backward: rank 0-202, 204-511",
        f"stacks of all threads: {tmp_path}",
    ]


def test_a_failed_node_is_listed_once_and_many_silent_ones_are_not(tmp_path: Path) -> None:
    """Rather the network than half of the nodes; a start without them would be one without most of the job."""
    for missing in ([4, 5, 6, 7], [2, 3], [3], [4]):
        note_failed_nodes(tmp_path, dict.fromkeys(NODES[rank] for rank in missing), NODES)
        assert (tmp_path / "slurm" / "failed_nodes").exists() is (len(missing) < 4)
    assert (tmp_path / "slurm" / "failed_nodes").read_text() == "node1\nnode2\n"


SIZE = 24  # ranks of which one reads the files of all


def gather(folder: Path, live: Sequence[int]) -> dict[int, list[int]]:
    """Let every live rank write its position and gather; return the ranks whose positions each of them got."""

    def of_rank(rank: int) -> list[int]:
        write_position(folder, Position(rank, "node0", 1, 7, "backward", 90, 600.0))
        return [position.rank for position in gather_positions(folder, rank=rank, num_ranks=SIZE)]

    with ThreadPoolExecutor(len(live)) as ranks:
        return dict(zip(live, ranks.map(of_rank, live), strict=True))


@pytest.mark.parametrize("silent", [[5], [0, 1, 2, 9]])
def test_only_the_lowest_live_rank_reads_the_files(
    tmp_path: Path, silent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_report, "_GATHER_SECONDS", limit(0.5))
    read_positions, num_readers = hang_report.read_positions, 0

    def read(folder: Path) -> list[Position]:
        nonlocal num_readers
        num_readers += 1
        return read_positions(folder)

    monkeypatch.setattr(hang_report, "read_positions", read)
    live = [rank for rank in range(SIZE) if rank not in silent]
    assert gather(tmp_path, live) == {live[0]: live, **{rank: [] for rank in live[1:]}}
    assert num_readers == 1


def test_many_files_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, those of 512 ranks take seconds on a busy disk: all ranks would look silent."""
    for rank in range(SIZE):
        write_position(tmp_path, position(rank))
    all_are_read = threading.Barrier(SIZE)

    def read(path: Path) -> bytes:
        all_are_read.wait(limit(5))
        return path.read_bytes()

    monkeypatch.setattr(files, "read_regular", read)
    assert read_positions(tmp_path) == [position(rank) for rank in range(SIZE)]


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
    assert watchdog.call_with_timeout(may_end.wait, 0.2) is None
    may_end.set()
    assert time.monotonic() - began < limit(10)
    assert watchdog.call_with_timeout(lambda: 7, 10) == 7
    assert watchdog.call_with_timeout(Path("/no/such/place").stat, 10) is None


def test_a_store_that_is_silent_holds_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank waits for up to half an hour, and looks twice a second."""
    monkeypatch.setattr(watchdog, "TICK", 0.01)
    may_answer = threading.Event()
    question = watchdog.Inquiry(lambda: may_answer.wait(limit(60)))
    before = threading.active_count()
    assert not any(question.is_yes() for _ in range(20))
    assert threading.active_count() <= before + 1
    may_answer.set()
    wait_until(question.is_yes, "the answer")
    failing = watchdog.Inquiry(lambda: Path("/no/such/place").stat().st_size > 0)
    assert not failing.is_yes() and not failing.is_yes()


def test_an_error_and_a_wait_that_were_not_expected_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    may_end = threading.Event()
    empty: dict[str, str] = {}
    assert watchdog.call_with_timeout(lambda: empty["entries"], 10) is None
    assert capfd.readouterr().err == ""
    assert watchdog.call_with_timeout(lambda: empty["entries"], 10, "the record") is None
    assert watchdog.call_with_timeout(may_end.wait, 0.1, "the report") is None
    may_end.set()
    expected = ["watchdog: the record: KeyError: 'entries'", "watchdog: the report: not done in 0.1 s"]
    assert capfd.readouterr().err.splitlines() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="counts microseconds of this machine")
def test_a_mark_costs_next_to_nothing() -> None:
    began = time.perf_counter()
    for _ in range(10_000):
        watchdog.beat("forward")
    assert (time.perf_counter() - began) / 10_000 < 20e-6


# The recorder of collectives names the rank that the others wait for: real records of gloo


def _save(world: World, folder: Path, *, pending: int) -> None:
    """Write the recorder once so many collectives are unfinished: gloo's thread retires them after `wait` returns."""

    def has_that_many() -> bool:
        save(folder, world.rank)
        entries = json.loads((folder / f"collectives-{world.rank:05d}.json").read_text())["gloo"]["entries"]
        return [entry["retired"] for entry in entries].count(False) == pending

    wait_until(has_that_many, f"{pending} unfinished collectives")


def _wait_for_rank_1(world: World, folder: Path) -> None:
    """Ranks 0 and 2 wait in an all-reduce when the recorders are written; rank 1 joins it afterwards."""
    for _ in range(3):
        dist.all_reduce(torch.ones(5))
    work = dist.all_reduce(torch.ones(7), async_op=True) if world.rank != 1 else None
    _save(world, folder, pending=int(world.rank != 1))
    (folder / f"written-{world.rank}").touch()
    wait_until(lambda: len(list(folder.glob("written-*"))) == world.size, "all files")
    if work is None:
        dist.all_reduce(torch.ones(7))
    else:
        work.wait()
    dist.barrier()


def test_rank_that_has_not_joined_is_named_from_real_records(tmp_path: Path, rank_pool: Pools) -> None:
    rank_pool(3).run(_wait_for_rank_1, tmp_path)
    verdict = read_verdict(tmp_path)
    assert list(verdict.suspects) == [1]
    assert "has not reached collective " in verdict.suspects[1]
    assert "gloo:all_reduce of 7 Float" in verdict.suspects[1]
    (line,) = verdict.lines
    assert "which rank 1 has not reached" in line


def _finished(world: World, folder: Path) -> None:
    for _ in range(40):
        dist.all_reduce(torch.ones(5))
    dist.barrier()
    _save(world, folder, pending=0)


def test_nobody_is_named_where_all_is_complete_and_files_stay_small(tmp_path: Path, rank_pool: Pools) -> None:
    rank_pool(2).run(_finished, tmp_path)
    assert read_verdict(tmp_path) == flight_recorder.NO_VERDICT
    kept = json.loads((tmp_path / "collectives-00000.json").read_text())["gloo"]["entries"]
    assert len([entry for entry in kept if entry["process_group"][0] == "0"]) <= flight_recorder._KEPT


# NCCL's records: the states that a device reports, which no CPU has.


def entry(number: int, state: str = "completed", *, size: int = 1024, operation: str = "all_reduce") -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "profiling_name": f"nccl:{operation}",
        "input_sizes": [[size]],
        "input_dtypes": ["BFloat16"],
        "state": state,
        "retired": state == "completed",
    }


def verdict_of(
    folder: Path, ranks: Sequence[Sequence[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> flight_recorder.Verdict:
    for rank, entries in enumerate(ranks):
        dump = json.dumps({"entries": entries})
        monkeypatch.setattr(flight_recorder, "_recorders", lambda dump=dump: {"nccl": lambda: dump})
        save(folder, rank)
    return read_verdict(folder)


@pytest.mark.parametrize(
    ("other", "lines"),
    [
        ('{"version": "2.10"}', []),  # an unused recorder of torch's CUDA build has no entries
        ("{", ["  the other recorder cannot be read (JSONDecodeError: "]),
        ('{"entries": [{}]}', ["  the other recorder cannot be read (KeyError: 'process_group') on rank 0, 1"]),
    ],
)
def test_a_recorder_that_is_empty_or_unreadable_does_not_take_the_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str, lines: list[str]
) -> None:
    for rank, entries in enumerate((DONE, WAITS, WAITS)):
        dumps = {"nccl": lambda entries=entries: json.dumps({"entries": entries})}
        more = {"other": lambda: other} if rank < 2 else {}
        monkeypatch.setattr(flight_recorder, "_recorders", lambda found={**more, **dumps}: found)
        save(tmp_path, rank)
    verdict = read_verdict(tmp_path)
    assert list(verdict.suspects) == [0]
    assert [line.startswith(start) for line, start in zip(verdict.lines, lines, strict=False)] == [True] * len(lines)
    assert verdict.lines[len(lines) :] == [f"  waiting in {WHAT}, which rank 0 has not reached"]


DONE = [entry(number) for number in range(1, 41)]
WAITS = [*DONE, entry(41, "started"), entry(42, "scheduled")]
WHAT = "collective 41 of nccl group 0 (default_pg), nccl:all_reduce of 1,024 BFloat16"
CASES = {
    "has not reached": DONE,
    "is in another one than": [*DONE, entry(41, "started", operation="broadcast")],
    "has not started on its device": [*DONE, entry(41, "scheduled"), entry(42, "scheduled")],
}


@pytest.mark.parametrize("reason", CASES)
def test_device_that_lags_is_named(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python code of rank 2 has run ahead as that of the others; only its device has not."""
    verdict = verdict_of(tmp_path, [WAITS, WAITS, CASES[reason], WAITS], monkeypatch)
    assert verdict.suspects == {2: f"{reason} {WHAT}"}
    assert verdict.lines == [f"  waiting in {WHAT}, which rank 2 {reason}"]
    positions = [Position(rank, f"node{rank}", 1, 7, "agreeing", 90, 600.2) for rank in range(4)]
    nodes = [f"node{rank}" for rank in range(4)]
    assert suspects(positions, nodes) == {}, "the progress marks name nobody"
    found = suspects(positions, nodes, verdict)
    text = report(positions, nodes, found, seconds=600, folder=tmp_path, recorded=verdict.lines)
    assert f"suspect: rank 2 (node2) {reason} collective 41" in text


@pytest.mark.parametrize(
    ("of_last", "others"),
    [(WAITS, ""), ([*DONE, entry(41, "started", size=2048)], "; 1 ranks in nccl:all_reduce of 2,048 BFloat16")],
    ids=["the network", "two collectives"],
)
def test_nobody_is_blamed_if_all_devices_wait_or_as_many_here_as_there(
    of_last: list[dict[str, Any]], others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = verdict_of(tmp_path, [WAITS, of_last], monkeypatch)
    assert verdict == flight_recorder.Verdict({}, [f"  waiting in {WHAT}: no rank stands out{others}"])


def test_file_stays_small_however_far_a_rank_has_run_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = [*DONE, *(entry(number, "scheduled") for number in range(41, 341))]
    further = [*ahead, entry(341, "scheduled")]
    verdict = verdict_of(tmp_path, [further, ahead, DONE], monkeypatch)
    assert list(verdict.suspects) == [2]
    assert "collective 41 " in verdict.suspects[2]
    kept = json.loads((tmp_path / "collectives-00000.json").read_text())["nccl"]["entries"]
    numbers = [one["collective_seq_id"] for one in kept]
    assert numbers == [*range(33, 49), 341], "with the one that its Python code has reached"
