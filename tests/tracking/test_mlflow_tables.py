"""Which SQLite files are MLflow's: no other one is ever changed, and a kill while one is made leaves none."""

import ast
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import dist_mem
from dist_mem.config import save_config
from dist_mem.errors import EXIT_USAGE, UnfitError, UnusableError
from dist_mem.studies.parent_run import ParentRun
from dist_mem.tracking.mlflow.client import connect, import_mlflow_quietly
from dist_mem.tracking.mlflow.models import Registration, fetch_model, open_run
from dist_mem.tracking.mlflow.store import check_tracking
from dist_mem.tracking.mlflow.sync import log_to_run
from tests.support.fork_server import fork_server
from tests.support.forked_ranks import SIGKILLED
from tests.support.limits import limit
from tests.support.messages import refused
from tests.support.small_builds import contents
from tests.support.tracked import config_for, job, track_sync

BEFORE_A_VERSION = 40  # statements of the making: some of the first tables are there, and no version yet
WITHIN = [150, 1200]  # statements of the making: the first tables are there, and later ones are being copied


def make_until(uri: str, deadly: int, *, in_place: bool) -> None:
    """Connect, or make the tables as MLflow itself does, and die before statement number `deadly`."""
    import_mlflow_quietly()
    import sqlalchemy
    from mlflow.store.db import utils

    num_made = 0

    def count(*_: object) -> None:
        nonlocal num_made
        num_made += 1
        if num_made == deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "before_cursor_execute", count)
    if in_place:
        utils._initialize_tables(sqlalchemy.create_engine(uri))
    else:
        connect(uri)
    print("survived", num_made, flush=True)


def kill_in(uri: str, deadly: int, *, in_place: bool = False) -> None:
    maker = fork_server().Process(target=make_until, args=(uri, deadly), kwargs={"in_place": in_place})
    maker.start()
    maker.join(limit(120))
    assert maker.exitcode == SIGKILLED


@pytest.mark.parametrize("deadly", WITHIN)
def test_a_kill_while_the_tables_are_made_leaves_a_store_that_can_be_used(tmp_path: Path, deadly: int) -> None:
    path = tmp_path / "mlflow.db"
    kill_in(f"sqlite:///{path}", deadly)
    assert not path.exists(), "the file has its name when it is whole"
    client = connect(f"sqlite:///{path}")
    assert client.create_experiment("usable")
    assert [found.name for found in tmp_path.iterdir() if not found.name.startswith(".")] == ["mlflow.db"]


@pytest.mark.parametrize("deadly", [BEFORE_A_VERSION, WITHIN[0]])
def test_tables_that_a_kill_left_unfinished_are_refused_with_the_file_to_remove(tmp_path: Path, deadly: int) -> None:
    """By MLflow's own server; not while somebody may still be making them."""
    path = tmp_path / "mlflow.db"
    kill_in(f"sqlite:///{path}", deadly, in_place=True)
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT name FROM sqlite_master WHERE name = 'experiments'").fetchone()
    with refused(UnfitError, "mlflow.db", "after a minute"):
        connect(f"sqlite:///{path}")
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))
    with refused(UnusableError, path, "remove it"):
        connect(f"sqlite:///{path}")


def test_a_store_in_use_is_left_alone(tmp_path: Path) -> None:
    """Whatever else it has, as MLflow's own tables of users, or those of a plugin."""
    path = tmp_path / "mlflow.db"
    experiment = connect(f"sqlite:///{path}").create_experiment("first")
    with sqlite3.connect(path) as database:  # what a killed `mlflow db upgrade` leaves
        for name in ("_alembic_tmp_runs", "alembic_version_auth", "users"):
            database.execute(f"CREATE TABLE {name} (id INTEGER)")
    assert connect(f"sqlite:///{path}").get_experiment(experiment).name == "first"


# Files of other programs

_MADE = "CREATE TABLE alembic_version (version_num TEXT); INSERT INTO alembic_version VALUES"
FOREIGN = {
    "a table of another program": "CREATE TABLE customers (name TEXT); INSERT INTO customers VALUES ('Ada')",
    "no rows": "CREATE TABLE customers (name TEXT)",
    "a version of another program": f"{_MADE} ('aaaa'); CREATE TABLE job (state TEXT)",
    "nothing but a version of another program": f"{_MADE} ('aaaa')",
    "tables of the same names": "CREATE TABLE runs (id TEXT); CREATE TABLE tags (name TEXT)",
    "an empty table of the same name": "CREATE TABLE experiments (id TEXT)",
    "a view": "CREATE VIEW runs AS SELECT 1 AS run_uuid",
    "no tables": "",
    "rows without a version": None,
    "MLflow's tables and others, without a version": None,
    "a newer version of MLflow": None,
    "no database": None,
}


_OTHERS = "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT IN ('experiments', 'sqlite_sequence')"


def write_foreign(path: Path, kind: str, whole: Path) -> None:
    """Write a file that is no database of MLflow, and has not changed for an hour; `whole`: one that is."""
    with closing(sqlite3.connect(path)) as database:
        if kind in (
            "rows without a version",
            "MLflow's tables and others, without a version",
            "a newer version of MLflow",
        ):
            with closing(sqlite3.connect(whole)) as source:
                source.backup(database)
        changes = {
            "rows without a version": "; ".join(  # other tests may have filled any table
                f"DELETE FROM {name}" for (name,) in database.execute(_OTHERS) if kind == "rows without a version"
            ),
            "MLflow's tables and others, without a version": (
                "DELETE FROM alembic_version; DELETE FROM experiments; CREATE TABLE customers (name TEXT)"
            ),
            "a newer version of MLflow": "UPDATE alembic_version SET version_num = 'ffffffffffff'",
        }
        database.executescript(FOREIGN[kind] or changes.get(kind, ""))
        database.commit()
    if kind in ("no database", "no tables"):
        path.write_text("# notes" * 1000 if kind == "no database" else "")
    os.utime(path, (1e9, 1e9))


def the_study(uri: str, run_dir: Path) -> None:
    ParentRun(config_for(uri).tracking, run_dir.with_name("study"), name="study", tags={})


def the_export(uri: str, run_dir: Path) -> None:
    open_run(config_for(uri).tracking, run_dir, "0" * 32, Registration(), [f"tracking.uri={uri}"])


def the_evaluation(uri: str, run_dir: Path) -> None:
    named: dict[str, Any] = {"metrics": {"test/nll": 1.0}, "files": [], "overrides": [f"tracking.uri={uri}"]}
    log_to_run(config_for(uri).tracking, run_dir=run_dir, step=1, **named)


OPENERS: dict[str, Callable[[str, Path], object]] = {
    "preflight": lambda uri, run_dir: check_tracking(config_for(uri).tracking, run_dir),
    "evaluation": the_evaluation,
    "study": the_study,
    "export": the_export,
    "model": lambda uri, run_dir: fetch_model("models:/demo/1", [f"tracking.uri={uri}"]),
    "artifact": lambda uri, run_dir: fetch_model(f"runs:/{'0' * 32}/model", [f"tracking.uri={uri}"]),
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run that has sent nothing yet."""
    job(config_for("sqlite:///mlflow.db", tracking={"send": "never"}), tmp_path / "run", {1: 1.0})
    return tmp_path / "run"


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_file_of_another_program_is_refused_and_stays_as_it_is(
    tmp_path: Path, run_dir: Path, sqlite_uri: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the user has named it by mistake, and by whatever opens a store."""
    (tmp_path / "apps").mkdir()
    path = tmp_path / "apps" / "app.db"
    write_foreign(path, kind, Path(sqlite_uri.removeprefix("sqlite:///")))
    before, uri = contents(path.parent), f"sqlite:///{path}"
    for open_store in OPENERS.values():
        with refused(UnusableError, f"{path} is no MLflow database: "):
            open_store(uri, run_dir)
    save_config(config_for(uri), run_dir / "config.yaml")
    assert track_sync([run_dir], [f"tracking.uri={uri}"]) == EXIT_USAGE
    assert f"error: {run_dir}: {path} is no MLflow database: " in capsys.readouterr().err
    job(config_for(uri), run_dir, {2: 2.0}, first_step=1)  # without a preflight, it trains on
    assert contents(path.parent) == before


def test_a_file_that_cannot_be_read_now_or_is_new_may_be_good_later(tmp_path: Path, sqlite_uri: str) -> None:
    path = tmp_path / "mlflow.db"
    path.touch()
    with refused(UnfitError, path):
        connect(f"sqlite:///{path}")
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE runs (run_uuid TEXT)")
        database.execute("BEGIN EXCLUSIVE")
        with refused(UnfitError, path, "locked"):
            connect(f"sqlite:///{path}")


def test_the_file_is_named_by_its_path_and_never_created_by_a_reader(tmp_path: Path, run_dir: Path) -> None:
    """SQLite's own addresses (file:...) would go past every check."""
    for uri in (f"sqlite:///file:{tmp_path}/app.db?uri=true", f"sqlite:///file:{tmp_path}/app.db?mode=rwc&uri=true"):
        with refused(UnusableError, "sqlite:////FOLDER/FILE"):
            connect(uri)
    for name in ("export", "model", "artifact"):
        with refused(UnusableError, "there is no store"):
            OPENERS[name](f"sqlite:///{tmp_path}/absent.db", run_dir)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_only_one_module_opens_stores() -> None:
    """So that nothing goes past its check: MLflow's own functions create tables in whatever database they get."""
    calls = {
        path.name
        for path in Path(dist_mem.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "MlflowClient"
    }
    assert calls == {"client.py"}
