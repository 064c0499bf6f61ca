"""MLflow's SQLite files: whether a file is one, and how a new one is made.

MLflow creates its tables in whatever database it gets, among those of another program too. So a file is used only if
MLflow's migrations know its revision, and everything else is refused before anything is written.

A new file has a temporary name until its tables are complete: MLflow creates them in place, in more than a thousand
statements. A kill in between leaves a file that no later start can use ("table _alembic_tmp_... already exists"), and
two jobs that create them at the same time break each other's. Such a file holds MLflow's tables, all empty; it alone is
ever renamed.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from dist_mem.errors import UnfitError, UnusableError
from dist_mem.runtime.files import free_name, fsync_path, open_regular

QUIET_SECONDS = 60.0  # without a change, after which incomplete tables are taken for abandoned
_REVISION = "alembic_version"  # table
_COPY = "_alembic_tmp_"  # begin of the name of a table that a migration is copying
_FILLED = {_REVISION, "workspaces"}  # tables into which migrations write rows


class ForeignError(UnusableError):
    """What is named belongs to somebody else: a file of another program, or the run of another log."""


class _Content(NamedTuple):
    """What a database has; a table that a migration is copying counts under its own name."""

    columns: dict[str, set[str]]  # table or view -> its columns
    filled: list[str]  # those of MLflow's tables that have rows
    revisions: list[str]


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


def prepare(uri: str, report: Callable[[str], None]) -> None:
    """Check the file of an SQLite store, and create it if it is missing or a kill has left it incomplete.

    Stores of other kinds are ignored.

    Args:
        report: called with a line for the user.

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
    if path.exists() and not _is_whole(path):
        aside = free_name(path.with_name(f"{path.name}.broken"))
        with suppress(FileNotFoundError):  # another job was faster
            path.rename(aside)
            report(f"{path}: the process that created its tables was killed; they hold no run, and are kept as {aside}")
    if not path.exists():
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


def _is_whole(path: Path) -> bool:
    """Return whether a database of MLflow is whole; False: a kill has left it incomplete, and without any run.

    Raises:
        ForeignError, UnfitError: as `prepare`.
    """
    import mlflow
    from alembic.script import ScriptDirectory
    from mlflow.store.db.utils import _get_alembic_config
    from mlflow.store.tracking.dbmodels.initial_models import Base

    scripts = ScriptDirectory.from_config(_get_alembic_config(""))
    found, first = _read(path), {name: {*table.columns.keys()} for name, table in Base.metadata.tables.items()}
    if unknown := {*found.revisions} - {script.revision for script in scripts.walk_revisions()}:
        raise _foreign_error(path, f"the version {min(unknown)!r} of its tables is none of MLflow {mlflow.__version__}")
    others = [name for name in first if name in found.columns and not found.columns[name] >= first[name]]
    has_first = not others and found.columns.keys() >= first.keys()
    if has_first and found.revisions and (found.filled or found.revisions == scripts.get_heads()):
        return True
    known = _tables() if has_first else first
    if foreign := [name for name in found.columns if name not in known]:
        raise _foreign_error(path, f"it has the table {foreign[0]!r}")
    if others:
        raise _foreign_error(path, f"its table {others[0]!r} has other columns")
    if found.filled:
        raise _foreign_error(path, f"it has rows in {found.filled[0]!r}, but no version of its tables")
    if time.time() - path.stat().st_mtime < QUIET_SECONDS:
        raise UnfitError(
            f"{path}: its tables are incomplete: another process is creating them, or was killed; after a minute they "
            "are created again"
        )
    if not found.columns:
        raise _foreign_error(path, "it is empty")
    return False


def _tables() -> set[str]:
    """Return the names of MLflow's tables."""
    import mlflow.store.db.utils  # noqa: F401  # imports the models, which add their tables
    from mlflow.store.db.base_sql_model import Base

    return {_REVISION, *Base.metadata.tables}


def _read(path: Path) -> _Content:
    """Return what a database has. Raises ForeignError, UnfitError."""
    columns: defaultdict[str, set[str]] = defaultdict(set)
    filled: list[str] = []
    if path.exists():
        open_regular(path).close()  # SQLite would wait for a pipe
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as database:
            rows = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY name")
            for name in [name for (name,) in rows if not name.startswith("sqlite_")]:
                bare = name.removeprefix(_COPY)
                columns[bare] |= {row[1] for row in database.execute("SELECT * FROM pragma_table_info(?)", [name])}
                if bare in _tables() - _FILLED and database.execute(f'SELECT 1 FROM "{name}" LIMIT 1').fetchone():
                    filled.append(bare)
            revisions = database.execute(f"SELECT * FROM {_REVISION}").fetchall() if _REVISION in columns else []
    except sqlite3.OperationalError as error:
        raise UnfitError(f"{path} cannot be read now: {error}") from error
    except sqlite3.DatabaseError as error:
        raise _foreign_error(path, str(error)) from error
    return _Content(columns, filled, [str(row[0]) for row in revisions])


def _foreign_error(path: Path, reason: str) -> ForeignError:
    return ForeignError(
        f"{path} is no MLflow database: {reason}; set tracking.uri or MLFLOW_TRACKING_URI to a file of MLflow, or to a "
        "new one"
    )
