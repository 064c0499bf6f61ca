"""MLflow's SQLite files: whether a file is one, and how a new one is made.

MLflow creates its tables in whatever database it gets, among those of another program too. So a file is used only if
MLflow's migrations know its revision, and everything else is refused before anything is written.

A new file has a temporary name until its tables are complete: MLflow creates them in place, in more than a thousand
statements. A kill in between leaves a file that no later start can use ("table _alembic_tmp_... already exists"), and
two jobs that create them at the same time break each other's.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from dist_mem.errors import UnfitError, UnusableError
from dist_mem.runtime.files import fsync_path, open_regular

QUIET_SECONDS = 60.0  # without a change, after which incomplete tables are taken for abandoned
_REVISION = "alembic_version"  # table


class ForeignError(UnusableError):
    """What is named belongs to somebody else: a file of another program, or the run of another log."""


class _Content(NamedTuple):
    """What a database has."""

    tables: set[str]
    revisions: list[str]
    has_experiments: bool  # as MLflow makes one when it first opens whole tables


def file_of(uri: str) -> Path | None:
    """Return the file of an SQLite store, or meta.yaml of MLflow's old file store; None for servers and databases.

    SQLAlchemy, through which MLflow reads the address of an SQLite file, takes %20 for a blank and %25 for a %.
    """
    scheme, _, path = uri.partition(":")
    if scheme == "sqlite" or scheme.startswith("sqlite+"):
        name = path.removeprefix("///").partition("?")[0]
        return Path(unquote(name)) if path.startswith("///") and name else None
    if scheme == "file":
        return Path(urlsplit(uri).path) / "meta.yaml"
    return Path(uri) / "meta.yaml" if "://" not in uri and scheme != "databricks" else None


def prepare(uri: str) -> None:
    """Check the file of an SQLite store, and create it if it is missing; stores of other kinds are ignored.

    Raises:
        ForeignError: the file is no database of MLflow; it is unchanged.
        UnfitError: its tables are incomplete, and another process may be creating them now; or it is locked.
        OSError: the file cannot be created.
    """
    path = file_of(uri) if uri.startswith("sqlite") else None
    if path is None or str(path) == ":memory:":
        return
    if str(path).startswith("file:"):
        raise UnusableError(f"tracking.uri is {uri!r}, but its file is named in this way: sqlite:////FOLDER/FILE")
    if path.exists():
        _check(path)
    else:
        _create(path)


def _create(path: Path) -> None:
    """Create the tables in a temporary file, and link it to `path` unless another job has created one meanwhile."""
    from mlflow.store.db.utils import _initialize_tables
    from sqlalchemy import create_engine, event
    from sqlalchemy.engine import URL

    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        made = Path(folder) / path.name
        engine = create_engine(URL.create("sqlite", database=str(made)))
        # A thousand flushes take minutes on a slow disk; one is enough for a file without its final name.
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
        _initialize_tables(engine)
        engine.dispose()
        fsync_path(made)
        with suppress(FileExistsError):
            os.link(made, path)
    fsync_path(path.parent)


def _check(path: Path) -> None:
    """Check that a file is a whole database of MLflow. Raises ForeignError, UnfitError: as `prepare`."""
    import mlflow
    from alembic.script import ScriptDirectory
    from mlflow.store.db.utils import _get_alembic_config

    scripts = ScriptDirectory.from_config(_get_alembic_config(""))
    found = _read(path)
    if unknown := {*found.revisions} - {script.revision for script in scripts.walk_revisions()}:
        raise _foreign_error(path, f"the version {min(unknown)!r} of its tables is none of MLflow {mlflow.__version__}")
    if found.revisions and (found.has_experiments or found.revisions == scripts.get_heads()):
        return
    is_begun = "experiments" in found.tables and not found.has_experiments  # MLflow's first table; versions come later
    if found.tables and not found.revisions and not is_begun:
        raise _foreign_error(path, "its tables have no version")
    if time.time() - path.stat().st_mtime < QUIET_SECONDS:
        state = "its tables are incomplete: another process is creating them, or was killed"
        raise UnfitError(f"{path}: {state}; try again after a minute")
    raise _foreign_error(path, "it holds no run; if a killed `mlflow ui` has left it, remove it")


def _read(path: Path) -> _Content:
    """Return what a database has. Raises ForeignError, UnfitError."""
    open_regular(path).close()  # SQLite would wait for a pipe
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            versions = database.execute(f"SELECT * FROM {_REVISION}").fetchall() if _REVISION in tables else []
            is_used = "experiments" in tables and database.execute("SELECT 1 FROM experiments LIMIT 1").fetchone()
    except sqlite3.OperationalError as error:
        raise UnfitError(f"{path} cannot be read now: {error}") from error
    except sqlite3.DatabaseError as error:
        raise _foreign_error(path, str(error)) from error
    return _Content(tables, [str(row[0]) for row in versions], has_experiments=bool(is_used))


def _foreign_error(path: Path, reason: str) -> ForeignError:
    return ForeignError(
        f"{path} is no MLflow database: {reason}; set tracking.uri or MLFLOW_TRACKING_URI to a file of MLflow, or to a "
        "new one"
    )
