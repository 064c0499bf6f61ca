"""A kill while MLflow's tables are made in a new SQLite file: the next who needs the file has a whole one."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from dist_mem.tracking.mlflow.client import connect, import_mlflow_quietly
from tests.support.fork_server import fork_server
from tests.support.forked_ranks import SIGKILLED
from tests.support.limits import limit
from tests.support.messages import refused

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


def test_tables_that_a_kill_left_unfinished_are_set_aside_and_made_again(tmp_path: Path) -> None:
    """By MLflow's own server, or by a version of before; not while somebody may still be making them."""
    path, printed = tmp_path / "mlflow.db", list[str]()
    kill_in(f"sqlite:///{path}", WITHIN[0], in_place=True)
    with refused(RuntimeError, "mlflow.db"):
        connect(f"sqlite:///{path}", report=printed.append)
    long_ago = time.time() - 3600
    os.utime(path, (long_ago, long_ago))
    client = connect(f"sqlite:///{path}", report=printed.append)
    assert client.create_experiment("usable")
    assert printed == [
        f"{path}: the process that created its tables was killed; they hold no run, and are kept as {path}.broken"
    ]
    assert path.with_name("mlflow.db.broken").exists()


def test_a_store_in_use_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    experiment = connect(f"sqlite:///{path}").create_experiment("first")
    with sqlite3.connect(path) as database:  # what a killed `mlflow db upgrade` leaves
        database.execute("CREATE TABLE _alembic_tmp_runs (run_uuid TEXT)")
    assert connect(f"sqlite:///{path}").get_experiment(experiment).name == "first"
