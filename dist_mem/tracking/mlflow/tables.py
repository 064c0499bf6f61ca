"""Create MLflow's tables in a new SQLite file, under a temporary name until they are complete.

MLflow creates them in place, in more than a thousand statements. A kill in between leaves a file that no later start
can use ("table _alembic_tmp_... already exists"), and two jobs that create them at the same time break each other's.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from dist_mem.runtime.files import free_name, fsync_path
from dist_mem.tracking.mlflow.stores import file_of

QUIET_SECONDS = 60.0  # without a change, after which incomplete tables are taken for abandoned


def prepare(uri: str, report: Callable[[str], None]) -> None:
    """Create the file of an SQLite store if it is missing, or if a kill has left it incomplete; ignore other stores.

    Args:
        report: called with a line for the user.

    Raises:
        RuntimeError: the tables are incomplete, and another process may be creating them now.
        OSError: the file cannot be created.
    """
    path = file_of(uri) if uri.startswith("sqlite") else None
    if path is None or str(path) == ":memory:" or str(path).startswith("file:"):
        return
    if path.exists() and _is_unfinished(path):
        if time.time() - path.stat().st_mtime < QUIET_SECONDS:
            raise RuntimeError(
                f"{path}: its tables are incomplete: another process is creating them, or was killed; after a minute "
                "they are created again"
            )
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


def _is_unfinished(path: Path) -> bool:
    """Whether the tables are incomplete: no experiment, and not the newest schema."""
    from mlflow.store.db.utils import _get_latest_schema_revision

    with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as database:  # MLflow reports what is wrong with it
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "experiments" in tables and database.execute("SELECT count(*) FROM experiments").fetchone()[0]:
            return False
        versions = database.execute("SELECT * FROM alembic_version") if "alembic_version" in tables else []
        return [version for (version,) in versions] != [_get_latest_schema_revision()]
    return False
