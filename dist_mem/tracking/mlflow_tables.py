"""MLflow's tables in a new SQLite file: made in a file beside it, which gets the name once it is whole.

MLflow makes them in place, in more than a thousand statements. A kill among them leaves a file that no later start can
use ("table _alembic_tmp_... already exists"), and two jobs that make them at once break each other's.
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

QUIET_SECONDS = 60.0  # after which nobody is at work any more on tables that are not whole


def prepare(uri: str, report: Callable[[str], None]) -> None:
    """Make the file of an SQLite store, if it is one and has none, or one that a kill has left unfinished.

    Args:
        report: takes a line for the user.

    Raises:
        RuntimeError: the tables are not whole, and somebody may be making them now.
        OSError: the file cannot be made.
    """
    from sqlalchemy.engine import make_url

    url = make_url(uri) if uri.startswith("sqlite") else None
    if url is None or not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        return
    path = Path(url.database)
    if path.exists() and _is_unfinished(path):
        if time.time() - path.stat().st_mtime < QUIET_SECONDS:
            raise RuntimeError(
                f"{path}: its tables are not whole: somebody makes them now, or was killed; a minute later they are "
                "made again"
            )
        aside = free_name(path.with_name(f"{path.name}.broken"))
        with suppress(FileNotFoundError):  # another job was faster
            path.rename(aside)
            report(f"{path}: whoever made its tables was killed; they hold no run, are kept as {aside}")
    if not path.exists():
        _make(path)


def _make(path: Path) -> None:
    """Make the tables, and give the file its name unless another job has made one meanwhile."""
    from mlflow.store.db.utils import _initialize_tables
    from sqlalchemy import create_engine, event

    with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        made = Path(folder) / path.name
        engine = create_engine(f"sqlite:///{made}")
        # A thousand flushes to the disk are minutes where it is slow; one is enough for a file without a name.
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
        _initialize_tables(engine)
        engine.dispose()
        fsync_path(made)
        with suppress(FileExistsError):
            os.link(made, path)
    fsync_path(path.parent)


def _is_unfinished(path: Path) -> bool:
    """Whether the making of the tables has ended halfway: no experiment, and not the newest form of the tables."""
    from mlflow.store.db.utils import _get_latest_schema_revision

    with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as database:  # MLflow says what is wrong with it
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if "experiments" in tables and database.execute("SELECT count(*) FROM experiments").fetchone()[0]:
            return False
        versions = database.execute("SELECT * FROM alembic_version") if "alembic_version" in tables else []
        return [version for (version,) in versions] != [_get_latest_schema_revision()]
    return False
