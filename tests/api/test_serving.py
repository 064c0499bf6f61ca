"""An export that is logged to MLflow, registered, loaded from there, and served over HTTP."""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
import torch
from mlflow.exceptions import MlflowException

import dist_mem
from dist_mem.__main__ import main
from dist_mem.api.serving import ServedModel
from dist_mem.errors import UnfitError, UnusableError
from dist_mem.evaluation.export import run as export
from dist_mem.runtime.network_interface import free_port
from dist_mem.runtime.shipped_files import example_model
from dist_mem.tracking.log import METRICS_FILE, read_header
from dist_mem.tracking.mlflow.store import RUN_ID_FILE, UID_TAG
from tests.support.jobs import train_here
from tests.support.limits import limit, wait_until
from tests.support.messages import refused, said
from tests.support.mlflow_server import silent_address
from tests.support.page_commands import items_of
from tests.support.paths import ROOT
from tests.support.ranks import Pools

pytestmark = pytest.mark.servers

PROMPTS = ["ba ko mi", "tensol bako "]
SETTINGS = {"num_tokens": 20, "temperature": 0.7, "top_p": 0.9, "seed": 5}


@contextmanager
def served(address: str, store: str, log: Path) -> Iterator[str]:
    """Yield the URL of `mlflow models serve`."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", address, "--env-manager", "local"]
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": store,
        "MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT": str(round(limit(60))),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*command, "--port", str(port)], stdout=output, stderr=output, env=environment, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert server.poll() is None, log.read_text()
        try:
            with urlopen(f"{url}/ping", timeout=limit(5)) as response:
                return bool(response.status == 200)
        except (URLError, ConnectionError):
            return False

    try:
        wait_until(answers, "mlflow models serve", seconds=180, poll=0.2)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # with its worker, in the session of this process
        server.wait()


def ask_as_on_the_page(url: str) -> None:
    """Send the request of docs/howto/tracking.md."""
    (item,) = (item for item in items_of(ROOT / "docs/howto/tracking.md") if item.text.startswith("curl "))
    _, address, _, header, _, body = shlex.split(item.text)
    name, value = header.split(": ")
    request = Request(address.replace("http://127.0.0.1:5001", url), body.encode(), {name: value})
    with urlopen(request, timeout=limit(60)) as response:
        assert set(json.load(response)) == {"predictions"}


def ask(url: str, params: Mapping[str, Any]) -> Any:
    body = {"dataframe_split": {"columns": ["prompt"], "data": [[prompt] for prompt in PROMPTS]}, "params": params}
    request = Request(f"{url}/invocations", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=limit(60)) as response:
        return json.load(response)["predictions"]


@pytest.fixture(scope="module")
def tracked_run(tmp_path_factory: pytest.TempPathFactory, api_folder: Path, sqlite_uri: str, rank_pool: Pools) -> Path:
    """A run of MLflow's."""
    run = tmp_path_factory.mktemp("tracked") / "run"
    changes = [f"run_dir={run}", "tracking.mlflow=true", f"tracking.uri={sqlite_uri}", "tracking.system_metrics=false"]
    assert rank_pool(1).run(train_here, api_folder / "run.yaml", changes) == [0]
    assert main(["track", "sync", str(run), f"tracking.uri={sqlite_uri}"]) == 0
    return run


def test_a_served_model_answers_as_the_model_in_this_process(
    tracked_run: Path, tmp_path: Path, client: Any, sqlite_uri: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["export", str(tracked_run), f"tracking.uri={sqlite_uri}", "--mlflow", "--register", "served", "--out"]
    assert main([*command, str(tmp_path / "first")]) == 0
    assert "logged to MLflow as models:/served/1" in capfd.readouterr().out
    assert main([*command, str(tmp_path / "second"), "--alias", "champion"]) == 0
    assert "logged to MLflow as models:/served@champion" in capfd.readouterr().out
    version = client.get_model_version_by_alias("served", "champion")
    run_id = (tracked_run / RUN_ID_FILE).read_text().strip()
    assert (version.version, version.run_id) == (2, run_id)
    of_run = {output.model_id for output in client.get_run(run_id).outputs.model_outputs}
    assert Path(version.source).parent.name in of_run, "the page of the run lists the model"

    mine = dist_mem.load(tracked_run)
    loaded = dist_mem.load("models:/served@champion", f"tracking.uri={sqlite_uri}")
    for name, weight in mine.trained.model.state_dict().items():
        assert torch.equal(loaded.trained.model.state_dict()[name], weight), name
    sampling = dist_mem.Sampling(temperature=0.7, top_p=0.9, seed=5)
    with served("models:/served@champion", sqlite_uri, tmp_path / "log") as url:
        expected = ["".join(mine.generate(prompt, num_tokens=20, sampling=sampling)) for prompt in PROMPTS]
        assert ask(url, SETTINGS) == [{"continuation": text} for text in expected]
        ask_as_on_the_page(url)
        default = ["".join(mine.generate(prompt)) for prompt in PROMPTS]
        assert ask(url, {}) == [{"continuation": text} for text in default], "defaults are those of generate"
        scores = mine.score(PROMPTS)
        assert ask(url, {"mode": "score"}) == [
            {"num_tokens": len(one.tokens), "nats_per_token": one.mean, "perplexity": one.perplexity} for one in scores
        ]
        for wrong in ({"mode": "sing"}, {"top_p": 2.0}):
            with pytest.raises(HTTPError, match="400") as caught:
                ask(url, wrong)
            said(json.load(caught.value)["message"].rpartition("Error: ")[2], *wrong)


def test_an_export_is_loaded_from_a_run_and_from_the_registry(
    api_folder: Path, tmp_path: Path, client: Any, sqlite_uri: str
) -> None:
    assert export(api_folder / "runs" / "demo", out=tmp_path / "demo") == 0
    experiment = client.get_experiment_by_name("dist_mem").experiment_id
    run_id = client.create_run(experiment).info.run_id
    client.log_artifacts(run_id, str(tmp_path / "demo"), "model")
    client.create_registered_model("api_demo")
    version = client.create_model_version("api_demo", f"runs:/{run_id}/model", run_id).version
    client.set_registered_model_alias("api_demo", "champion", version)
    expected = dist_mem.load(api_folder / "runs" / "demo").score("ba ko mi").nll
    store = f"tracking.uri={sqlite_uri}"
    for address in (f"runs:/{run_id}/model", f"runs:/{run_id}/", "models:/api_demo@champion"):
        assert torch.equal(dist_mem.load(address, store).score("ba ko mi").nll, expected), address
    with refused(UnusableError, "api_demo", "tracking.uri"):
        dist_mem.load("models:/api_demo@nobody", store)
    for address in (f"runs:/{run_id}/nothing", f"runs:/{'0' * 32}/model"):
        with pytest.raises(UnusableError, match="MLflow cannot fetch"):
            dist_mem.load(address, store)
    with pytest.raises(UnfitError, match="MLflow cannot fetch"):
        dist_mem.load("models:/api_demo@champion", f"tracking.uri=http://127.0.0.1:{free_port()}")
    client.log_text(run_id, "no model", "notes/a.txt")
    with refused(UnusableError, "manifest.json"):
        dist_mem.load(f"runs:/{run_id}/notes", store)


def test_without_the_runs_store_nothing_is_written(
    tracked_run: Path, api_folder: Path, tmp_path: Path, sqlite_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stranger = shutil.copytree(tracked_run, tmp_path / "stranger")
    (stranger / RUN_ID_FILE).write_text("0" * 32 + "\n")
    with silent_address(accepting=True) as silent:
        pass  # nobody listens there any more
    out = tmp_path / "out"
    for run, store, code, named in (
        (api_folder / "runs" / "demo", sqlite_uri, 2, "dist-mem track sync"),
        (tracked_run, f"sqlite:///{tmp_path}/other.db", 2, f"sqlite:///{tmp_path}/other.db"),
        (stranger, sqlite_uri, 2, "0" * 32),
        (tracked_run, silent, 1, silent),
    ):
        assert main(["export", str(run), f"tracking.uri={store}", "--mlflow", "--out", str(out)]) == code
        assert not out.exists() and not (tmp_path / "other.db").exists()
        (line,) = capsys.readouterr().err.splitlines()
        said(line, named)


def test_a_model_without_all_files_is_not_registered_and_the_export_stays(
    tracked_run: Path, tmp_path: Path, client: Any, sqlite_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()  # where the store would need a folder
    experiment = client.create_experiment("full", artifact_location=(tmp_path / "file" / "artifacts").as_uri())
    run = shutil.copytree(tracked_run, tmp_path / "run")
    tags = {UID_TAG: read_header(run / METRICS_FILE).uid}
    (run / RUN_ID_FILE).write_text(client.create_run(experiment, tags=tags).info.run_id + "\n")
    out = tmp_path / "out"
    register = ["--mlflow", "--register", "torn", "--alias", "champion"]
    assert main(["export", str(run), f"tracking.uri={sqlite_uri}", "--out", str(out), *register]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    said(line, out)
    assert dist_mem.load(out)
    assert not client.search_registered_models("name = 'torn'")
    assert not client.search_logged_models([experiment])


@pytest.mark.parametrize("prompt", [None, math.nan, 3])
@pytest.mark.parametrize("mode", ["generate", "score"])
def test_a_prompt_that_is_no_text_is_refused_with_its_row(prompt: object, mode: str) -> None:
    """It was continued and scored as the text "None" or "nan"."""
    model = ServedModel(dist_mem.load(example_model()))
    with pytest.raises(MlflowException, match="prompt of row 1 is"):
        model.predict(
            {"prompt": ["It was", prompt]}, {"mode": mode, **({"num_tokens": 1} if mode == "generate" else {})}
        )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--register a", "--mlflow"),
        ("--mlflow --alias champion", "--register NAME"),
        ("--mlflow --register a/b", "--register 'a/b'"),
        ("--mlflow --register ' '", "--register ' '"),
        ("--mlflow --register a --alias v1", "--alias 'v1'"),
        ("--mlflow --register a --alias 'a b'", "--alias 'a b'"),
        ("--mlflow", "mlflow"),  # which is not there
    ],
)
def test_invalid_names_are_refused_before_anything_is_read(
    tmp_path: Path,
    single_process: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    named: str,
) -> None:
    if named == "mlflow":
        monkeypatch.setitem(sys.modules, "mlflow", None)  # as Python reports a module that is not there
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), *shlex.split(options)]) == 2
    said(capsys.readouterr().err, named)
