"""Jobs that want one run directory: one gets it, whoever died where; one that was suspended writes nothing more."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.checkpoint.manifest import list_steps, step_dir
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, EXIT_TAKEN_OVER
from dist_mem.supervision import lease
from dist_mem.supervision.lease import Lease, LeaseError
from dist_mem.tracking.mlflow.store import RUN_ID_FILE
from tests.support.fork_server import fork_server
from tests.support.forked_ranks import SIGKILLED, Ranks
from tests.support.jobs import (
    build_books,
    checkpoint_content,
    difference,
    logged_steps,
    losses,
    train_here,
    write_config,
)
from tests.support.limits import limit, wait_until
from tests.support.ranks import Pools
from tests.support.tracked import history, track_sync
from tests.support.write_points import WritePoints

NUM_JOBS = 4  # that contend at a time


def contend(run_dir: Path, together: Any) -> None:
    """Want the lease when all others do, and die with it when all have had their answer."""
    together.wait(limit(60))
    try:
        Lease(run_dir)
        code = SIGKILLED
    except LeaseError:
        code = EXIT_FAILED
    together.wait(limit(60))
    if code == SIGKILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(code)


RENAME, REMOVAL = 4, 6  # of taking over: mkdir, the claim, two fsyncs, its rename, an fsync, removals


def die_taking(run_dir: Path, deadly: int) -> None:
    """Take the lease and die at write number `deadly`."""
    WritePoints(run_dir, deadly)
    Lease(run_dir)
    os._exit(EXIT_DONE)


def exit_codes(function: Callable[..., None], *arguments: Any, count: int = 1) -> list[int]:
    """Of `count` forked processes at the same time, smallest first."""
    jobs = [fork_server().Process(target=function, args=arguments, daemon=True) for _ in range(count)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(limit(60))
    return sorted(job.exitcode for job in jobs)


def assert_one_gets_it(run_dir: Path, *, rounds: int) -> None:
    for number in range(rounds):
        codes = exit_codes(contend, run_dir, fork_server().Barrier(NUM_JOBS), count=NUM_JOBS)
        assert codes == [SIGKILLED] + [EXIT_FAILED] * (NUM_JOBS - 1), number
        assert [path.name for path in run_dir.iterdir()] == ["lease.json"]


@pytest.mark.parametrize("rounds", [3, pytest.param(50, marks=pytest.mark.nightly)])
def test_of_jobs_that_find_a_dead_one_exactly_one_gets_the_lease(tmp_path: Path, rounds: int) -> None:
    assert_one_gets_it(tmp_path, rounds=rounds)


def test_a_job_killed_while_it_takes_over_is_taken_over_itself(tmp_path: Path) -> None:
    """Again and again, too: claims to claims."""
    run_dir = tmp_path / "run"
    assert exit_codes(die_taking, run_dir, 99) == [EXIT_DONE]
    assert exit_codes(die_taking, run_dir, 0) == [SIGKILLED]
    for deaths in (1, 2):
        assert exit_codes(die_taking, run_dir, RENAME) == [SIGKILLED]
        assert len(list(run_dir.iterdir())) == 1 + deaths
    shutil.copytree(run_dir, tmp_path / "again")
    assert_one_gets_it(run_dir, rounds=1)
    assert exit_codes(die_taking, tmp_path / "again", REMOVAL) == [SIGKILLED], "between taking over and cleaning up"
    assert_one_gets_it(tmp_path / "again", rounds=1)


def submit(config: Path, name: str, *, num_ranks: int, changes: list[str]) -> Ranks:
    """`dist-mem train CONFIG CHANGES` on forked ranks that print into a folder of this name."""
    folder = config.with_name(name)
    folder.mkdir(exist_ok=True)
    return Ranks(main, [[["train", str(config), *changes]]] * num_ranks, folder=folder)


def assert_refused(job: Ranks) -> None:
    codes, texts = job.finish()
    assert set(codes) == {EXIT_FAILED}, texts
    assert "lease.json: " in texts[0], texts


def resubmit(config: Path, run_dir: Path, old: Ranks, num_ranks: int) -> Ranks:
    """One more while the job runs, then it is killed, and two at the same moment; returns the one that goes on."""
    settings: dict[str, Any] = {"num_ranks": num_ranks, "changes": ["train.steps=1000000"]}
    assert_refused(submit(config, "early", **settings))
    assert all(process.is_alive() for process in old.processes)
    for process in old.processes:
        process.kill()
    assert set(old.finish().codes) == {SIGKILLED}
    saved = list_steps(run_dir)[-1]
    logged = max(logged_steps(run_dir))
    both = [submit(config, name, **settings) for name in ("first", "second")]
    wait_until(lambda: any(job.processes[0].exitcode is not None for job in both), "a refusal")
    refused, going_on = sorted(both, key=lambda job: job.processes[0].exitcode is None)
    assert_refused(refused)
    wait_until(lambda: max(logged_steps(run_dir)) > logged and list_steps(run_dir)[-1] > saved, "a newer checkpoint")
    return going_on


@pytest.mark.parametrize(
    ("num_ranks", "rounds"), [(1, 2), pytest.param(2, 20, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])]
)
def test_of_two_resubmissions_exactly_one_goes_on_and_nothing_is_lost(
    tmp_path: Path, rank_pool: Pools, num_ranks: int, rounds: int
) -> None:
    changes = {"checkpoint": {"every": 3, "keep_last": 2}, "schedule": {"kind": "constant"}}
    books = build_books(tmp_path)
    run_dir, alone = tmp_path / "run", tmp_path / "alone"
    configs = [write_config(tmp_path / f"{path.name}.yaml", books, path, changes) for path in (run_dir, alone)]
    job = submit(configs[0], "old", num_ranks=num_ranks, changes=["train.steps=1000000"])
    wait_until(lambda: bool(list_steps(run_dir)), "the first checkpoint")
    for _ in range(rounds):
        job = resubmit(configs[0], run_dir, job, num_ranks)
    for process in job.processes:
        process.kill()
    job.finish()
    last = [f"train.steps={list_steps(run_dir)[-1] + 2}"]
    assert [rank_pool(num_ranks).run(train_here, config, last) for config in configs] == [[EXIT_DONE] * num_ranks] * 2
    ends = [checkpoint_content(step_dir(path, list_steps(alone)[-1])) for path in (run_dir, alone)]
    assert difference(*ends) is None
    assert losses(run_dir) == losses(alone)


# A job that was suspended while another one took its run directory over

STEPS = 30


def train_on(host: str, arguments: list[str]) -> int:
    """`dist-mem train ARGUMENTS` on another host, where a lease goes stale after two seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease.socket, "gethostname", lambda: host)
        patch.setattr(lease, "HEARTBEAT_SECONDS", 0.3)
        patch.setattr(lease, "STALE_SECONDS", 2.0)
        return main(["train", *arguments])


def submit_on(host: str, config: Path, *changes: str) -> Ranks:
    folder = config.with_name(host)
    folder.mkdir()
    return Ranks(train_on, [(host, [str(config), *changes])] * 2, folder=folder)


def signal_all(job: Ranks, number: signal.Signals) -> None:
    for process in job.processes:
        os.kill(process.pid, number)


def content(run_dir: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@pytest.mark.parametrize("every", [None, 7])
def test_a_job_suspended_past_its_lease_writes_nothing_more(
    tmp_path: Path, sqlite_uri: str, client: Any, capsys: pytest.CaptureFixture[str], every: int | None
) -> None:
    """Neither entries of the log nor checkpoints; MLflow has every step once."""
    fork_server()
    run_dir = tmp_path / "run"
    tracking = {"mlflow": True, "uri": sqlite_uri, "system_metrics": False}
    changes: dict[str, Any] = {"train": {"steps": 10**6}, "checkpoint": {"every": every}, "tracking": tracking}
    changes["schedule"] = {"kind": "constant"}
    config = write_config(tmp_path / "run.yaml", build_books(tmp_path), run_dir, changes)
    sleeper = submit_on("sleeper", config)
    try:
        wait_until(lambda: len(logged_steps(run_dir)) > 10, "ten points")
        signal_all(sleeper, signal.SIGSTOP)
        other = submit_on("other", config, f"train.steps={STEPS}").finish(timeout=240)
        assert other.codes == [EXIT_DONE] * 2, other.texts
        left = content(run_dir)
        signal_all(sleeper, signal.SIGCONT)
        ended = sleeper.finish(patience=20)
    finally:
        for process in sleeper.processes:
            process.kill()
    changed = {name for name, held in content(run_dir).items() if left.get(name) != held}
    assert not changed, "the job that stood still has written"
    assert ended.codes == [EXIT_TAKEN_OVER] * 2, ended.texts
    reported = [line for text in ended.texts for line in text.splitlines() if "error" in line.lower()]
    assert len(reported) == 1 and "has taken the run directory over" in reported[0], reported
    assert track_sync([run_dir], [f"tracking.uri={sqlite_uri}"]) == EXIT_DONE
    assert "MLflow has everything" in capsys.readouterr().out
    run_id = (run_dir / RUN_ID_FILE).read_text().strip()
    assert sorted(step for step, _ in history(client, run_id, "loss")) == list(range(1, STEPS + 1))
