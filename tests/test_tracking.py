"""Tracking: metrics.jsonl, delivery in the background, MLflow over SQLite and over a server, progress."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from omegaconf import OmegaConf
from ranks import free_port

from dist_mem import tracking
from dist_mem.config import Config
from dist_mem.delivery import Delivery, Request
from dist_mem.progress import ProgressBar, ProgressLines
from dist_mem.sinks import METRICS_FILE, MetricsFile, Point, Tracker, read_points
from dist_mem.tracking import RUN_ID_FILE, log_to_run, start_tracking

ROOT = Path(__file__).parent.parent


def config_for(uri: str, **overrides: Any) -> Any:
    config = OmegaConf.structured(Config)
    return OmegaConf.merge(config, {"name": "demo", "tracking": {"uri": uri}}, overrides)


def start(config: Any, run_dir: Path, *, rank: int = 0, run_id: str | None = None, first_step: int = 0) -> Tracker:
    return start_tracking(config, rank=rank, run_dir=run_dir, run_id=run_id, total_steps=100, first_step=first_step)


# metrics.jsonl


def test_every_logged_step_is_one_line(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / METRICS_FILE, first_step=0)
    file.log(Point(1, 5.0, {"loss": 2.0}))
    file.log(Point(2, 6.0, {"loss": 1.0, "lr": 0.1}))
    lines = (tmp_path / METRICS_FILE).read_text().splitlines()  # before `close`: a killed job keeps its lines
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "time": 5.0, "metrics": {"loss": 2.0}},
        {"step": 2, "time": 6.0, "metrics": {"loss": 1.0, "lr": 0.1}},
    ]
    file.close("FINISHED")


def test_resume_supersedes_points_past_the_restored_step(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    for first_step, last_step in ((0, 7), (5, 12), (10, 11)):
        file = MetricsFile(path, first_step=first_step)
        for step in range(first_step + 1, last_step + 1):
            file.log(Point(step, float(first_step), {"loss": 1.0}))
        file.close("KILLED")
    points = read_points(path)
    assert [point.step for point in points] == list(range(1, 12))
    assert [point.time for point in points] == [0.0] * 5 + [5.0] * 5 + [10.0]


def test_a_torn_last_line_is_dropped_and_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    whole = '{"step": 1, "time": 1.0, "metrics": {"loss": 2.0}}\n'
    path.write_text(whole + '{"step": 2, "ti')
    MetricsFile(path, first_step=5).close("FINISHED")
    assert path.read_text() == whole
    path.write_text("{}\n" + whole)
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 1 is not a logged step"):
        read_points(path)


# Delivery


class Service:
    """Takes requests, unless told to fail; `received` is what it took."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.failures: list[Exception] = []
        self.reports: list[str] = []
        self.got_all = threading.Event()

    def take(self, word: str) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.received.append(word)
        if word == "last":
            self.got_all.set()

    def request(self, word: str) -> Request:
        return Request(word, lambda: self.take(word))

    def delivery(self, opening: Request | None = None) -> Delivery:
        return Delivery(
            opening or self.request("open"),
            combine=lambda words: [self.request(word) for word in words],
            is_refusal=lambda error: isinstance(error, ValueError),
            report=self.reports.append,
            service="Test",
            interval=0.01,
        )


def test_delivery_keeps_the_order_and_close_delivers_all() -> None:
    service = Service()
    delivery = service.delivery()
    words = [str(number) for number in range(500)]
    for word in words:
        delivery.put(word)
    assert delivery.close(5.0)
    assert service.received == ["open", *words]


def test_an_outage_loses_nothing_and_is_reported_once() -> None:
    service = Service()
    service.failures = [ConnectionError("down")] * 3
    delivery = service.delivery()
    for word in ("first", "last"):
        delivery.put(word)
    assert service.got_all.wait(5.0)
    assert delivery.close(5.0)
    assert service.received == ["open", "first", "last"]
    assert [report.split(" (")[0] for report in service.reports] == ["Test cannot be reached", "Test answers again"]


def test_what_is_refused_is_dropped_and_the_rest_goes_on() -> None:
    service = Service()
    delivery = service.delivery(Request("nothing", lambda: None))
    service.failures = [ValueError("a bad name\nand a long story")]
    for word in ("bad", "good"):
        delivery.put(word)
    assert delivery.close(5.0)
    assert service.received == ["good"]
    assert service.reports == ["Test refused bad: ValueError: a bad name"]


def test_a_refused_opening_ends_delivery_without_an_error() -> None:
    service = Service()
    service.failures = [ValueError("no such experiment")]
    delivery = service.delivery()
    delivery.put("word")
    assert not delivery.close(5.0)
    delivery.put("late")
    assert service.received == []


def test_close_gives_up_on_a_service_that_hangs_or_is_down() -> None:
    service = Service()
    answer = threading.Event()

    def hang() -> None:
        answer.wait()

    delivery = service.delivery(Request("a black hole", hang))
    began = time.monotonic()
    assert not delivery.close(0.1)
    assert time.monotonic() - began < 1.0
    answer.set()
    service.failures = [ConnectionError("down")] * 1000
    assert not service.delivery().close(5.0)
    assert len(service.failures) > 900  # at the end one attempt is enough


# Progress


def test_plain_lines_tell_loss_perplexity_speed_and_time_left() -> None:
    stream = io.StringIO()
    lines = ProgressLines(total_steps=100, first_step=0, every=10, stream=stream)
    for step in (10, 15, 100):
        lines.log(Point(step, 0.0, {"loss": 2.0, "perplexity": 7.389, "tokens_per_second": 12345.6}))
    lines.log(Point(100, 0.0, {"validation/word_perplexity": 99.5, "validation/bits_per_byte": 1.25}))
    ten, hundred, evaluation = stream.getvalue().splitlines()
    assert ten.startswith("step 10/100  loss 2.0000  ppl 7.39  12,346 tokens/s  eta 0:00:0")
    assert hundred.endswith("eta 0:00:00")
    assert evaluation == "step 100: validation  word_perplexity 99.50  bits_per_byte 1.25"


def test_the_bar_stands_at_the_logged_step_and_messages_do_not_tear_it() -> None:
    stream = io.StringIO()
    bar = ProgressBar(total_steps=100, first_step=40, stream=stream)
    bar.log(Point(50, 0.0, {"loss": 2.0, "perplexity": 7.389}))
    bar.message("saved")
    bar.close("FINISHED")
    last = stream.getvalue().split("\r")[-1]
    assert "50/100" in last and "loss 2.0000  ppl 7.39" in last
    assert "saved\n" in stream.getvalue()


# Tracker


def test_ranks_other_than_0_write_nothing_and_never_import_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_import_mlflow_quietly", lambda: pytest.fail("mlflow was imported"))
    tracker = start(config_for("sqlite:///unused.db"), tmp_path / "run", rank=1)
    tracker.log(1, {"loss": 1.0})
    tracker.log_artifact(tmp_path)
    tracker.close("FINISHED")
    assert tracker.run_id is None
    assert list(tmp_path.iterdir()) == []


def test_without_mlflow_the_metrics_are_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_import_mlflow_quietly", lambda: pytest.fail("mlflow was imported"))
    config = config_for("sqlite:///unused.db", tracking={"mlflow": False})
    tracker = start(config, tmp_path)
    tracker.log(1, {"loss": 1.0})
    tracker.close("FINISHED")
    assert [point.step for point in read_points(tmp_path / METRICS_FILE)] == [1]
    with pytest.raises(ValueError, match="must be one of FINISHED, FAILED, KILLED"):
        tracker.close("DONE")


# MLflow


@pytest.fixture(scope="session")
def sqlite_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all tests: making its tables takes seconds. Its experiment keeps artifacts beside it."""
    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder}/mlflow.db"
    client = tracking._connect(uri)
    client.create_experiment("dist_mem", artifact_location=(folder / "artifacts").as_uri())
    return uri


@pytest.fixture
def client(sqlite_uri: str) -> Any:
    return tracking._connect(sqlite_uri)


def history(client: Any, run_id: str | None, name: str) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client.get_metric_history(run_id, name))


def test_mlflow_gets_parameters_metrics_artifacts_and_the_end(sqlite_uri: str, client: Any, tmp_path: Path) -> None:
    tracker = start(config_for(sqlite_uri, data={"path": "x" * 600}), tmp_path)
    for step in range(1, 1501):
        tracker.log(step, {"loss": 1 / step, "lr": 0.1})
    tracker.log(1500, {"validation/word_perplexity": 50.0})
    (tmp_path / "config.yaml").write_text("name: demo\n")
    tracker.log_artifact(tmp_path / "config.yaml")
    tracker.log_text("all good", "report.txt")
    tracker.close("FINISHED")
    assert tracker.run_id is not None
    assert (tmp_path / RUN_ID_FILE).read_text().strip() == tracker.run_id
    run = client.get_run(tracker.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "demo")
    assert run.data.params["train.seg_len"] == "64"
    assert run.data.params["optimizer.betas.1"] == "0.999"
    assert run.data.params["data.path"] == "x" * 500
    assert history(client, tracker.run_id, "loss") == [(step, 1 / step) for step in range(1, 1501)]
    assert history(client, tracker.run_id, "validation/word_perplexity") == [(1500, 50.0)]
    assert {file.path for file in client.list_artifacts(tracker.run_id)} == {"config.yaml", "report.txt"}


def test_one_run_across_resumes_has_every_step_once(sqlite_uri: str, client: Any, tmp_path: Path) -> None:
    """Killed at 7, restored at 5: MLflow has 6 and 7 already. Then killed with 11 and 12 not sent: sent by the next."""
    tracker = start(config_for(sqlite_uri), tmp_path)
    for step in range(1, 8):
        tracker.log(step, {"loss": float(step)})
    tracker.close("KILLED")
    run_id = tracker.run_id
    tracker = start(config_for(sqlite_uri, train={"lanes": 32}), tmp_path, first_step=5)
    tracker.log(5, {"validation/nll": 1.0})
    for step in range(6, 11):
        tracker.log(step, {"loss": float(step)})
    tracker.close("KILLED")
    lines = (tmp_path / METRICS_FILE).read_text()
    lost = [json.dumps(Point(step, 1.0, {"loss": float(step)})._asdict()) + "\n" for step in (11, 12)]
    (tmp_path / METRICS_FILE).write_text(lines + "".join(lost))
    tracker = start(
        config_for(sqlite_uri, train={"lanes": 32}), tmp_path, run_id="of an older checkpoint", first_step=12
    )
    tracker.log(13, {"loss": 13.0})
    tracker.close("FINISHED")
    assert tracker.run_id == run_id
    assert history(client, run_id, "loss") == [(step, float(step)) for step in range(1, 14)]
    assert history(client, run_id, "validation/nll") == [(5, 1.0)]
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["train.lanes"] == "16"
    assert run.data.tags["dist_mem.changed_params.step_5"] == "train.lanes: 16 -> 32"


def test_an_outage_while_the_run_is_made_does_not_make_it_twice(
    sqlite_uri: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = tracking._send_points, [ConnectionError("gone")]

    def send(*args: Any, **kwargs: Any) -> None:
        if failures:
            raise failures.pop()
        real(*args, **kwargs)

    monkeypatch.setattr(tracking, "_send_points", send)
    config = config_for(sqlite_uri, tracking={"experiment": "once"})
    tracker = start(config, tmp_path)
    wait_until(lambda: not failures, seconds=20)
    tracker.log(1, {"loss": 1.0})
    tracker.close("FINISHED")
    runs = client.search_runs([client.get_experiment_by_name("once").experiment_id])
    assert [run.info.run_id for run in runs] == [tracker.run_id]
    assert history(client, runs[0].info.run_id, "loss") == [(1, 1.0)]


def test_a_deleted_run_is_replaced_by_one_with_the_whole_history(
    sqlite_uri: str, client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = start(config_for(sqlite_uri), tmp_path)
    tracker.log(1, {"loss": 1.0})
    tracker.close("KILLED")
    client.delete_run(tracker.run_id)
    resumed = start(config_for(sqlite_uri), tmp_path, first_step=1)
    resumed.log(2, {"loss": 2.0})
    resumed.close("FINISHED")
    assert resumed.run_id != tracker.run_id
    assert history(client, resumed.run_id, "loss") == [(1, 1.0), (2, 2.0)]
    assert f"has no run {tracker.run_id}: a new one begins" in capsys.readouterr().err


def test_an_evaluation_adds_to_the_run_and_leaves_its_status(sqlite_uri: str, client: Any, tmp_path: Path) -> None:
    config = config_for(sqlite_uri)
    report = tmp_path / "report.json"
    report.write_text("{}")
    figures = {"test/word_perplexity": 60.0}
    complaint = log_to_run(config, run_dir=tmp_path, step=9, metrics=figures, files=[report])
    assert complaint is not None and "never recorded" in complaint
    tracker = start(config, tmp_path)
    tracker.close("KILLED")
    assert log_to_run(config, run_dir=tmp_path, step=9, metrics=figures, files=[report]) is None
    assert history(client, tracker.run_id, "test/word_perplexity") == [(9, 60.0)]
    assert [file.path for file in client.list_artifacts(tracker.run_id)] == ["report.json"]
    assert client.get_run(tracker.run_id).info.status == "KILLED"


IMPORTS = """
import sys
from pathlib import Path
from omegaconf import OmegaConf
import dist_mem.train
from dist_mem import tracking
from dist_mem.config import Config

config = OmegaConf.structured(Config)
tracker = tracking.start_tracking(config, rank=1, run_dir=Path("run"), run_id=None, total_steps=1, first_step=0)
assert "mlflow" not in sys.modules, "a rank other than 0 has imported mlflow"
tracking._import_mlflow_quietly()
from mlflow.telemetry import get_telemetry_client
assert get_telemetry_client() is None, "telemetry is on"
"""


def test_only_rank_0_imports_mlflow_and_its_telemetry_is_off(tmp_path: Path) -> None:
    """DeepSpeed would import mlflow too. In a process of its own, because MLflow has no telemetry under pytest."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", IMPORTS], env=environment, cwd=tmp_path, check=True, timeout=120)
    assert not (tmp_path / ".config" / "mlflow").exists()


def test_a_server_that_is_down_costs_no_time_and_no_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracking._import_mlflow_quietly()
    began = time.monotonic()
    tracker = start(config_for(f"http://127.0.0.1:{free_port()}"), tmp_path)
    assert time.monotonic() - began < 1.0
    slowest = 0.0
    for step in range(1, 201):
        before = time.perf_counter()
        tracker.log(step, {"loss": 1.0})
        slowest = max(slowest, time.perf_counter() - before)
    tracker.close("FINISHED")
    assert slowest < 0.5
    assert time.monotonic() - began < tracking.FLUSH_SECONDS + 2.0
    assert tracker.run_id is None
    assert len(read_points(tmp_path / METRICS_FILE)) == 200
    told = capsys.readouterr().err
    assert told.count("cannot be reached") == 1
    assert "resuming the run sends them" in told


@pytest.fixture(scope="session")
def server_uri(tmp_path_factory: pytest.TempPathFactory, sqlite_uri: str) -> Iterator[str]:
    """A real `mlflow server` on loopback, over the same SQLite file."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", sqlite_uri, "--artifacts-destination", str(tmp_path_factory.mktemp("served"))]
    log = tmp_path_factory.mktemp("server") / "log"
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # six more processes, of no use here
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    uri = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(f"{uri}/health") or process.poll() is not None, seconds=60)
        assert process.poll() is None, log.read_text()
        yield uri
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the session we started: the server and its worker
        process.wait()


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5) as response:
            return response.status == 200
    except (URLError, ConnectionError):
        return False


def wait_until(condition: Callable[[], bool], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        threading.Event().wait(0.1)


def test_a_server_takes_the_same(server_uri: str, client: Any, tmp_path: Path) -> None:
    config = config_for(server_uri, tracking={"experiment": "served"})
    for first_step, status in ((0, "KILLED"), (3, "FINISHED")):
        tracker = start(config, tmp_path, first_step=first_step)
        for step in range(first_step + 1, first_step + 6):
            tracker.log(step, {"loss": float(step)})
        tracker.log_text("text", f"{status}.txt")
        tracker.close(status)
    run_id = tracker.run_id
    assert run_id is not None
    assert history(client, run_id, "loss") == [(step, float(step)) for step in range(1, 9)]
    assert client.get_run(run_id).info.status == "FINISHED"
    assert tracking._connect(server_uri).list_artifacts(run_id)[0].path == "FINISHED.txt"
