"""Files that come with dist_mem: configurations, tables, sites, examples, a trained model.

In a clone, and with an editable installation, they are in the folders beside the package. A wheel contains copies of
these folders in dist_mem/shipped/ (pyproject.toml).
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from dist_mem.runtime.files import is_dir, is_file
from dist_mem.runtime.ranks import is_rank0

FOLDERS = ("configs", "examples", "launch")
_PACKAGE = Path(__file__).parent.parent


def shipped_root() -> Path:
    """Return the folder that contains `FOLDERS`."""
    inside = _PACKAGE / "shipped"
    return inside if inside.is_dir() else _PACKAGE.parent


def example_model() -> Path:
    """Return the trained model that comes with dist_mem, an export of the run of `make demo` (`make example`)."""
    return shipped_root() / "examples" / "demo"


def example_book() -> Path:
    """Return a book of its data that this model was not trained on."""
    return example_model() / "flora_marsh.txt"


def shipped_path(name: str) -> Path | None:
    """Return the shipped file or folder of this name, such as configs/demo.yaml; None if there is none."""
    parts = Path(name).parts
    if not parts or parts[0] not in FOLDERS or ".." in parts:
        return None
    path = shipped_root() / name
    return path if is_file(path) or is_dir(path) else None


@cache
def say_where_from() -> None:
    """Print once, on rank 0, that files that are not in this folder are taken from among the shipped ones."""
    if is_rank0():
        print(f"files that are not in this folder: taken from {shipped_root()}", file=sys.stderr, flush=True)
