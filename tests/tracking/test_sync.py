"""`track sync`: what lies in a run goes to the server that its user named, nothing else to nobody else; exit codes."""

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from mlflow.tracking._tracking_service.registry import TrackingStoreRegistry
from sqlalchemy.engine import make_url

from dist_mem.__main__ import main
from dist_mem.config import change_config, save_config
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, UnusableError
from dist_mem.runtime.files import sha256_of
from dist_mem.tracking import log
from dist_mem.tracking.log import (
    BODIES,
    FORMAT_VERSION,
    METRICS_FILE,
    Entry,
    Header,
    LogReader,
    new_uid,
    read_entries,
    write_log,
)
from dist_mem.tracking.mlflow.client import connect
from dist_mem.tracking.mlflow.database import file_of
from dist_mem.tracking.mlflow.models import fetch_model
from dist_mem.tracking.mlflow.store import DEFAULT_URI, check_store, check_tracking, is_named_by_user
from dist_mem.tracking.mlflow.sync import log_to_run
from tests.support.faults import remount, small_disk
from tests.support.file_server import FileServer
from tests.support.messages import refused, said
from tests.support.tracked import config_for, job, start, steps, track_sync

SECRET = "the user's secret"
TOKEN = "the-users-token"


@pytest.fixture
def thief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """A server that has nothing, and remembers what it is asked and by whom."""
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TOKEN)
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    with closing(FileServer(tmp_path / "nothing")) as thief:
        yield thief


Sync = Callable[..., tuple[int, str]]


@pytest.fixture
def sync(capsys: pytest.CaptureFixture[str]) -> Sync:
    """`track sync` of a run, to a server if one is named; its exit code, and what it prints, errors to stderr."""

    def run(run_dir: Path, uri: str | None = None) -> tuple[int, str]:
        code = track_sync([run_dir], [f"tracking.uri={uri}"] if uri else [])
        printed = capsys.readouterr()
        assert "error: " not in printed.out
        return code, printed.out + printed.err

    return run


def make_run(run_dir: Path, uri: str, *entries: tuple[str, dict[str, Any]], experiment: str = "dist_mem") -> Path:
    """A run directory of somebody else."""
    run_dir.mkdir()
    save_config(config_for(uri), run_dir / "config.yaml")
    header = Header(new_uid(), "theirs", {"name": experiment})
    write_log(run_dir / METRICS_FILE, header, [Entry(kind, 1764000000000, body) for kind, body in entries])
    return run_dir


POINT = ("point", {"step": 1, "metrics": {"loss": 1.0}})


def test_a_server_that_only_the_folder_names_gets_nothing(
    tmp_path: Path, thief: FileServer, sync: Sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path / "my run", thief.url, POINT)
    code, printed = sync(run_dir)
    assert code == EXIT_USAGE and f"tracking.uri={thief.url}" in printed and "only" in printed
    complaint = log_to_run(config_for(thief.url).tracking, run_dir=run_dir, step=1, metrics={"nll": 1.0}, files=[])
    assert f"dist-mem track sync '{run_dir}'" in (complaint or "") and f"tracking.uri={thief.url}" in (complaint or "")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://another.example")
    assert sync(run_dir)[0] == EXIT_USAGE
    assert not thief.asked


@pytest.mark.parametrize("how", ["command line", "block", "environment", "yaml", "json"])
def test_a_server_can_be_named_in_every_way_the_user_has(
    tmp_path: Path, thief: FileServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    run_dir = make_run(tmp_path / "run", thief.url, POINT)
    mine = tmp_path / f"mine.{how}"
    mine.write_text(f'{{"train": {{"steps": 7}}, "tracking": {{"uri": "{thief.url}"}}}}')
    if how == "environment":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", thief.url)
    given = {"command line": f"tracking.uri={thief.url}", "block": f"tracking={{uri: '{thief.url}'}}"}
    main(["track", "sync", str(run_dir), *([] if how == "environment" else [given.get(how, str(mine))])])
    assert f"Bearer {TOKEN}" in thief.credentials


def test_the_check_before_a_training_sends_the_users_token(tmp_path: Path, thief: FileServer) -> None:
    assert check_tracking(config_for(thief.url).tracking, tmp_path) is None  # what is not there may be asked for
    assert thief.credentials == {f"Bearer {TOKEN}"}


def test_no_other_kind_of_server_is_taken_from_the_folder(tmp_path: Path, sync: Sync) -> None:
    for uri in ("databricks", "postgresql://evil.example/x", "http:evil.example", "uc://x", "s3://x/y"):
        code, printed = sync(make_run(tmp_path / uri[:4], uri, POINT))
        assert code == EXIT_USAGE
        said(printed, f"tracking.uri={uri}")


def test_a_local_store_that_only_the_folder_names_is_not_written(tmp_path: Path, sync: Sync) -> None:
    whole, folder = tmp_path / "whole.db", tmp_path / "mlruns"
    connect(f"sqlite:///{whole}").create_experiment("mine")
    folder.mkdir()
    before = sha256_of(whole)
    for number, uri in enumerate((f"sqlite:///{whole}", f"sqlite:///{tmp_path}/absent.db", folder.as_uri())):
        code, printed = sync(make_run(tmp_path / f"run{number}", uri, POINT))
        assert code == EXIT_USAGE
        said(printed, f"tracking.uri={uri}")
    assert sha256_of(whole) == before
    assert not (tmp_path / "absent.db").exists() and not list(folder.iterdir())


def test_the_store_in_the_working_directory_sends_files_only_below_it(
    tmp_path: Path, thief: FileServer, sync: Sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be somebody else's, as where the working directory is their run."""
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    # MLflow keeps a store by its address, also one that another test had in its own working directory.
    monkeypatch.setattr(SqlAlchemyStore, "_engine_map", {})
    TrackingStoreRegistry._get_store_with_resolved_uri.cache_clear()
    client = connect(DEFAULT_URI)
    outside = tmp_path / "outside"
    places = {"stolen": f"{thief.url}/files", "elsewhere": outside.as_uri(), "up": f"{here}/../outside", "own": None}
    text = ("text", {"text": "text", "name": "a.txt"})
    for name, place in places.items():
        client.create_experiment(name, artifact_location=place)
        code, printed = sync(make_run(here / name, DEFAULT_URI, POINT, text, experiment=name))
        assert code == (EXIT_DONE if place is None else EXIT_USAGE)
        assert place is None or "keeps its files at" in printed
    assert not thief.asked and not outside.exists()


def test_only_files_inside_the_run_are_uploaded(tmp_path: Path, sqlite_uri: str, client: Any, sync: Sync) -> None:
    outside = tmp_path / "home"
    outside.mkdir()
    (outside / "secret.txt").write_text(SECRET)
    paths: list[Any] = ["link.txt", "folder/secret.txt", "../home/secret.txt", "a/../../home/secret.txt"]
    paths += [
        str(outside / "secret.txt"),
        "whole",
        "folder",
        "missing.txt",
        "",
        ".",
        "own.txt",
        "inner.txt",
        "a" * 256,
        "\0",
    ]
    run_dir = make_run(tmp_path / "run", sqlite_uri, *[("artifact", {"path": path}) for path in paths])
    (run_dir / "link.txt").symlink_to(outside / "secret.txt")
    (run_dir / "folder").symlink_to(outside)
    (run_dir / "whole").mkdir()
    (run_dir / "whole" / "link.txt").symlink_to(outside / "secret.txt")
    (run_dir / "own.txt").write_text("own")
    (run_dir / "inner.txt").symlink_to(run_dir / "own.txt")
    code, printed = sync(run_dir, sqlite_uri)
    assert code == EXIT_DONE
    run_id = (run_dir / "mlflow_run_id").read_text().strip()
    assert sorted(found.path for found in client.list_artifacts(run_id)) == ["inner.txt", "own.txt"]
    assert printed.count("is no file inside the run directory") == len(paths) - 2
    stored = Path(client.get_run(run_id).info.artifact_uri.removeprefix("file://"))
    assert not any(SECRET in path.read_text() for path in stored.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["../../x.txt", "/tmp/x.txt", "..", "", "a/../../b"])
def test_a_text_is_kept_under_a_plain_name(tmp_path: Path, sqlite_uri: str, client: Any, sync: Sync, name: Any) -> None:
    run_dir = make_run(tmp_path / "run", sqlite_uri, ("text", {"text": "text", "name": name}))
    code, printed = sync(run_dir, sqlite_uri)
    assert code == EXIT_DONE and "is no plain name" in printed
    assert not client.list_artifacts((run_dir / "mlflow_run_id").read_text().strip())
    assert not [*Path(sqlite_uri.removeprefix("sqlite:///")).parent.rglob("x.txt")]


# Exit codes, and errors at the start of tracking


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has sent nothing yet."""
    return make_run(tmp_path / "run", "sqlite:///mlflow.db", POINT)


@pytest.mark.parametrize(
    ("status", "expected"), [(401, EXIT_USAGE), (403, EXIT_USAGE), (500, EXIT_FAILED), (503, EXIT_FAILED)]
)
def test_refused_login_is_2_and_a_server_in_trouble_or_down_is_1(
    run_dir: Path, thief: FileServer, sync: Sync, status: int, expected: int
) -> None:
    thief.faults.default_factory = lambda: [status]
    code, printed = sync(run_dir, thief.url)
    assert code == expected and TOKEN not in printed
    assert ("401: it refuses MLFLOW_TRACKING_TOKEN; set" if status == 401 else str(status)) in printed
    assert max(thief.asked.values()) == 1, "it is not asked again for minutes"
    thief.close()
    assert sync(run_dir, thief.url)[0] == EXIT_FAILED, "it is down now"


def test_wrong_address_is_refused_and_named(run_dir: Path) -> None:
    for uri, named in {
        "ftp://mlflow.example": "tracking.uri is 'ftp://mlflow.example'",
        "'http://[::1'": "tracking.uri is no address",
        "sqlite:////nowhere/at/all/mlflow.db": "tracking.uri is 'sqlite:////nowhere/at/all/mlflow.db'",
    }.items():
        with refused(UnusableError, named):
            track_sync([run_dir], [f"tracking.uri={uri}"])


GONE = {"experiment": "gone"}, {"id": "987654"}, {"id": "so it is"}, {"uri": "file:./runs"}, {"uri": "runs"}


@pytest.mark.parametrize("which", GONE)
def test_an_experiment_or_a_store_that_cannot_be_used_is_2_with_the_remedy(
    tmp_path: Path, sqlite_uri: str, client: Any, monkeypatch: pytest.MonkeyPatch, sync: Sync, which: dict[str, str]
) -> None:
    """At the start of a training, where nothing is made yet, and at `track sync`."""
    monkeypatch.chdir(tmp_path)
    if client.get_experiment_by_name("gone") is None:
        client.delete_experiment(client.create_experiment("gone"))
    if "id" in which:
        monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", which["id"])
    config = config_for(which.get("uri", sqlite_uri), tracking={"experiment": which.get("experiment")})
    remedy = "set tracking.uri=sqlite:///" if "uri" in which else "set tracking.experiment=NAME"
    with refused(UnusableError, remedy):
        check_tracking(config.tracking, tmp_path / "run")
    assert not [*tmp_path.iterdir()]
    job(change_config(config, {"tracking.send": "never"}), tmp_path / "run", {1: 1.0})
    save_config(config, tmp_path / "run" / "config.yaml")
    code, printed = sync(tmp_path / "run", config.tracking.uri)
    assert code == EXIT_USAGE and remedy in printed


@pytest.mark.parametrize(
    "override", ["tracking.uri={}", "tracking.uri='{}'", "tracking={{uri: {}}}", "tracking.uri=~/none/no.db"]
)
def test_every_form_of_an_override_names_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    uri = f"sqlite:///{tmp_path}/none/no.db"
    given = override.format(uri).replace("=~", "=sqlite:///~")
    with refused(UnusableError, f"no store {uri}"):
        fetch_model("models:/demo/1", [given])
    assert is_named_by_user(config_for(uri).tracking, [given])
    assert not is_named_by_user(config_for(uri).tracking, ["tracking.experiment=mine"])


NAME = st.text("ab %25F.é#&=", min_size=1, max_size=12).filter(lambda name: name not in (".", ".."))


@settings(deadline=None)
@given(NAME, st.booleans(), st.booleans())
def test_an_sqlite_address_means_the_file_that_sqlalchemy_opens(name: str, is_absolute: bool, has_query: bool) -> None:
    uri = f"sqlite:///{'/x/' if is_absolute else ''}{name}/m.db{'?timeout=5' if has_query else ''}"
    assert file_of(uri) == Path(str(make_url(uri).database))


def test_a_folder_with_a_percent_sign_is_read_in_one_way(tmp_path: Path) -> None:
    for folder in (tmp_path / "a b", tmp_path / "a%2Fb"):
        folder.mkdir()
    check_store(f"sqlite:///{tmp_path}/a%20b/m.db")
    check_store(f"sqlite:///{tmp_path}/a%252Fb/m.db")
    with refused(UnusableError, "tracking.uri", f"{tmp_path}/a/b"):
        check_store(f"sqlite:///{tmp_path}/a%2Fb/m.db")


def open_files(folder: Path) -> list[str]:
    """Return the files under a folder that this process has open."""
    names = [file.path for file in psutil.Process().open_files()]
    return [name for name in names if Path(name).is_relative_to(folder)]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "absent": lambda log: None,
    "no text": lambda log: b"\xff\xfe{}\n",
    "newer": lambda log: f'{{"format_version": {FORMAT_VERSION + 1}, "another": "key"}}\n'.encode(),
    "a line that is no point": lambda log: log + b"no point\n",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_run_directory_that_cannot_be_used_is_2_and_the_file_is_named(
    run_dir: Path, sqlite_uri: str, sync: Sync, damage: str
) -> None:
    """At `track sync` and, unless the log is not there, at the start of a training."""
    path = run_dir / METRICS_FILE
    damaged = DAMAGES[damage](path.read_bytes())
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    code, printed = sync(run_dir, sqlite_uri)
    assert code == EXIT_USAGE
    assert str(path) in printed and ("format_version" in printed) == (damage == "newer")
    if damaged is not None:
        with refused(UnusableError, path):
            start(config_for("http://mlflow.example", tracking={"send": "never"}), run_dir)
        assert open_files(run_dir) == []


@pytest.fixture
def whole_run(tmp_path: Path, sqlite_uri: str) -> Path:
    """A run with entries of every kind, and an evaluation that is kept for MLflow; it has sent nothing."""
    config = config_for(sqlite_uri, tracking={"send": "never"})
    run_dir = tmp_path / "whole"
    job(config, run_dir, steps(1, 5))
    tracker = start(config, run_dir, first_step=3)
    for step in (4, 5, 6):
        tracker.log(step, {"loss": 2.0 / step})
    (run_dir / "file.txt").write_text("a file")
    tracker.log_artifact("file.txt")
    tracker.log_text("a text", "a.txt")
    tracker.log_params({"of_model": 3})
    tracker.log_tags({"mine": "kept"})
    tracker.log_datasets(
        [{"name": "x", "digest": "0", "source": "/x", "context": "training", "profile": {"tokens": 3}}]
    )
    tracker.log_checkpoint(6, run_dir / "checkpoints")
    tracker.close("FINISHED")
    save_config(config, run_dir / "config.yaml")
    log_to_run(config.tracking, run_dir=run_dir, step=6, metrics={"test/nll": 1.0}, files=[run_dir / "file.txt"])
    return run_dir


def test_what_this_program_writes_is_a_log_that_it_can_read(whole_run: Path, sqlite_uri: str, sync: Sync) -> None:
    kinds = {entry.kind for entry in read_entries(whole_run / METRICS_FILE)}
    assert kinds == BODIES.keys() - {"repeat", "system"}
    assert sync(whole_run, sqlite_uri)[0] == EXIT_DONE


def test_what_mlflow_has_of_a_run_is_not_decoded_to_send_an_evaluation(
    tmp_path: Path, sqlite_uri: str, sync: Sync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log of 100,000 points takes ten seconds, which are all that MLflow has."""
    run_dir = make_run(tmp_path / "run", sqlite_uri, *[POINT] * 50)
    assert sync(run_dir, sqlite_uri)[0] == EXIT_DONE
    decoded: list[str] = []
    checked_by: list[str] = []
    decode, check_log = log._decode, log.check_log

    def note(line: bytes) -> Entry:
        decoded.append((entry := decode(line)).kind)
        return entry

    def check(path: Path) -> None:
        checked_by.append(threading.current_thread().name)
        check_log(path)

    monkeypatch.setattr(log, "_decode", note)
    monkeypatch.setattr("dist_mem.tracking.mlflow.sync.check_log", check)
    tracking = config_for(sqlite_uri).tracking
    given = [f"tracking.uri={sqlite_uri}"]
    assert log_to_run(tracking, run_dir=run_dir, step=1, metrics={"nll": 1.0}, files=[], overrides=given) is None
    assert 0 < len(decoded) < 8, "those of the evaluation, and the first of the log"
    assert set(checked_by) == {"MainThread"}, "before MLflow's time"


def test_an_evaluation_of_another_run_is_refused(whole_run: Path, sqlite_uri: str, sync: Sync) -> None:
    (path,) = (whole_run / "mlflow").iterdir()
    write_log(path, Header(new_uid(), "theirs", None), [*read_entries(path)])
    code, printed = sync(whole_run, sqlite_uri)
    assert code == EXIT_USAGE and path.exists()
    said(printed, f"error: {whole_run}: {path}")


def test_io_error_is_1(run_dir: Path, sqlite_uri: str, sync: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(reader: LogReader, size: int) -> list[Entry]:
        raise OSError(errno.EIO, "Input/output error", str(run_dir / METRICS_FILE))

    monkeypatch.setattr(LogReader, "batch", fail)
    code, printed = sync(run_dir, sqlite_uri)
    assert code == EXIT_FAILED and str(run_dir / METRICS_FILE) in printed


@pytest.mark.parametrize("options", ["size=1m", "ro"])
def test_disk_that_is_full_or_read_only_at_the_start_is_no_error_of_the_user(tmp_path: Path, options: str) -> None:
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        (disk / "filler").write_bytes(bytes(1 << 20))
        remount(disk, options)
        with refused(OSError, disk):
            start(config_for("http://mlflow.example", tracking={"send": "never"}), disk / "run")
        assert open_files(disk) == []
