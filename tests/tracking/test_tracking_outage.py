"""A real MLflow server that is killed, and addresses that never answer: training continues, and nothing is lost."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dist_mem.config import save_config
from dist_mem.errors import EXIT_DONE
from dist_mem.runtime.network_interface import free_port
from dist_mem.tracking.log import METRICS_FILE, read_points
from dist_mem.tracking.mlflow import store
from dist_mem.tracking.mlflow.client import connect
from dist_mem.tracking.mlflow.store import RUN_ID_FILE, check_tracking
from dist_mem.tracking.names import in_group
from dist_mem.tracking.start import start_tracking
from dist_mem.training.meter import MEASUREMENTS
from tests.support.configs import config_from
from tests.support.forked_ranks import Program
from tests.support.jobs import build_books, finish, logged_steps, start_ranks, write_config
from tests.support.limits import limit, wait_until
from tests.support.mlflow_server import MlflowServer, points_of, silent_address
from tests.support.tracked import track_sync

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    server = MlflowServer(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.close()


def run_id_of(run_dir: Path) -> str:
    return (run_dir / RUN_ID_FILE).read_text().strip()


def logged(run_dir: Path) -> Counter[tuple[str, int, float | None]]:
    """(name, step, value) of metrics.jsonl; no value for measurements, which a repeated step has its own of.

    Nothing of saves: at which step one in the background is over, no two jobs have alike.
    """
    return Counter(
        (in_group(name), point.step, None if name in MEASUREMENTS else value)
        for point in read_points(run_dir / METRICS_FILE)
        for name, value in point.metrics.items()
        if not name.startswith("checkpoint/")
    )


def kept(client: Any, run_dir: Path) -> Counter[tuple[str, int, float | None]]:
    """The same of the MLflow run, its system metrics aside too."""
    points = points_of(client, run_id_of(run_dir))
    measured = {in_group(name) for name in MEASUREMENTS if not name.startswith("checkpoint/")}
    return Counter(
        (name, step, None if name in measured else value)
        for (name, step, _, value), count in points.items()
        for _ in range(count)
        if name in measured or not name.startswith("system/")
    )


@pytest.mark.core
def test_a_server_killed_in_mid_run_and_then_the_job_leave_every_point_exactly_once(
    server: MlflowServer, tmp_path: Path
) -> None:
    """The server comes back while the job runs and gets what it missed; the killed job is resumed a few steps back."""
    run_dir = tmp_path / "run"
    changes = {
        "train": {"steps": 1_000_000},
        "schedule": {"kind": "constant"},
        "checkpoint": {"every": 70},
        "tracking": {"every": 3, "mlflow": True, "uri": server.uri},
    }
    config = write_config(tmp_path / "job.yaml", build_books(tmp_path / "data"), run_dir, changes)
    processes = start_ranks(["train", str(config)], world_size=1, cwd=tmp_path)
    client = connect(server.uri)
    wait_until(lambda: (run_dir / RUN_ID_FILE).exists() and bool(points_of(client, run_id_of(run_dir))), "points")
    server.kill()
    wait_for_steps(run_dir, 100, processes)
    server.start()
    during_outage = logged_steps(run_dir)[-1]
    wait_until(lambda: max(step for _, step, _, _ in points_of(client, run_id_of(run_dir))) > during_outage, "points")
    wait_for_steps(run_dir, 10, processes)
    processes[0].kill()
    processes[0].communicate()

    last = logged_steps(run_dir)[-1] + 50
    codes, text = finish(start_ranks(["train", str(config), f"train.steps={last}"], world_size=1, cwd=tmp_path))
    assert codes == [EXIT_DONE], text
    run = client.get_run(run_id_of(run_dir))
    assert run.info.status == "FINISHED"
    assert not any("dist_mem.branch" in name for name in run.data.tags)
    assert kept(client, run_dir) == logged(run_dir)
    assert max(kept(client, run_dir).values()) == 1
    uid = run.data.tags["dist_mem.uid"]
    assert len(client.search_runs([run.info.experiment_id], f"tags.`dist_mem.uid` = '{uid}'")) == 1


def wait_for_steps(run_dir: Path, count: int, processes: list[Program]) -> None:
    """Until the job has made `count` more steps."""
    first = logged_steps(run_dir)[-1]
    wait_until(lambda: logged_steps(run_dir)[-1] >= first + count or processes[0].poll() is not None, "steps")
    assert processes[0].poll() is None, processes[0].communicate()[0]


@pytest.mark.parametrize("kind", ["drops", "accepts", "refuses"])
def test_an_address_that_never_answers_costs_ten_seconds_at_most_and_no_points(
    server: MlflowServer, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    connect(server.uri)  # importing mlflow costs the same with a server that answers
    with ExitStack() as stack:
        uri = f"http://127.0.0.1:{free_port()}"
        if kind != "refuses":
            uri = stack.enter_context(silent_address(accepting=kind == "accepts"))
        config: Any = config_from({"name": "demo", "tracking": {"uri": uri}})
        save_config(config, tmp_path / "config.yaml")
        began = time.monotonic()
        assert check_tracking(config.tracking, tmp_path), "why it does not answer"
        assert time.monotonic() - began < limit(store.SECONDS + 1.0)
        tracker = start_tracking(config, run_dir=tmp_path, total_steps=200, first_step=0)
        slowest = 0.0
        for step in range(1, 201):
            before = time.perf_counter()
            tracker.log(step, {"loss": 1.0 / step})
            slowest = max(slowest, time.perf_counter() - before)
        tracker.log_artifact("config.yaml")
        tracker.close("FINISHED")
        assert time.monotonic() - began < limit(10.0)
        assert slowest < limit(0.5)
        assert tracker.run_id is None
    printed = capsys.readouterr().err
    assert f"dist-mem track sync {tmp_path}" in printed
    assert track_sync([tmp_path], [f"tracking.uri={server.uri}"]) == 0
    client = connect(server.uri)
    assert kept(client, tmp_path) == logged(tmp_path)
    assert client.get_run(run_id_of(tmp_path)).info.status == "FINISHED"
    assert [file.path for file in client.list_artifacts(run_id_of(tmp_path))] == ["config.yaml"]
