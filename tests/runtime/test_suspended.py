"""A job that was suspended while another one took its run directory over writes nothing more, and says why it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dist_mem import errors
from dist_mem.__main__ import main
from dist_mem.errors import EXIT_DONE
from dist_mem.supervision import lease
from dist_mem.tracking.mlflow.store import RUN_ID_FILE
from tests.support.fork_server import fork_server
from tests.support.forked_ranks import Ranks
from tests.support.jobs import build_books, logged_steps, write_config
from tests.support.limits import wait_until
from tests.support.tracked import history, track_sync

pytestmark = pytest.mark.ranks

STEPS = 30


def train_on(host: str, arguments: list[str]) -> int:
    """`dist-mem train ARGUMENTS` on another host, where a lease goes stale after two seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease.socket, "gethostname", lambda: host)
        patch.setattr(lease, "HEARTBEAT_SECONDS", 0.3)
        patch.setattr(lease, "STALE_SECONDS", 2.0)
        return main(["train", *arguments])


def submit(host: str, config: Path, folder: Path, *changes: str, size: int) -> Ranks:
    folder.mkdir()
    return Ranks(train_on, [(host, [str(config), *changes])] * size, folder=folder)


@contextmanager
def standing_still(job: Ranks, ranks: list[int]) -> Iterator[None]:
    """Stop these ranks meanwhile, as a suspended node does."""
    for rank in ranks:
        os.kill(job.processes[rank].pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for rank in ranks:
            os.kill(job.processes[rank].pid, signal.SIGCONT)


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
    sleeper = submit("sleeper", config, tmp_path / "sleeper", size=2)
    try:
        wait_until(lambda: len(logged_steps(run_dir)) > 10, "ten points")
        with standing_still(sleeper, [0, 1]):
            other = submit("other", config, tmp_path / "other", f"train.steps={STEPS}", size=2).finish(timeout=240)
            assert other.codes == [EXIT_DONE] * 2, other.texts
            left = content(run_dir)
        ended = sleeper.finish(patience=20)
    finally:
        for process in sleeper.processes:
            process.kill()
    changed = {name for name, held in content(run_dir).items() if left.get(name) != held}
    assert not changed, "the job that stood still has written"
    assert ended.codes == [errors.EXIT_TAKEN_OVER] * 2, ended.texts
    reported = [line for text in ended.texts for line in text.splitlines() if "error" in line.lower()]
    assert len(reported) == 1 and "has taken the run directory over" in reported[0], reported
    assert track_sync([run_dir]) == EXIT_DONE
    assert "MLflow has everything" in capsys.readouterr().out
    run_id = (run_dir / RUN_ID_FILE).read_text().strip()
    assert sorted(step for step, _ in history(client, run_id, "loss")) == list(range(1, STEPS + 1))
