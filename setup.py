"""Copy the folders beside the package into the wheel; pyproject.toml contains everything else.

dist_mem/runtime/shipped.py finds them again: in the wheel as dist_mem/shipped/, in a clone where they are.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = ("configs", "examples", "launch")
_NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.tar")  # *.tar: data that were built in shards/


class BuildWithFolders(build_py):
    """Build the package with copies of the folders; an editable installation reads those of the clone."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in FOLDERS:
            copy = Path(self.build_lib) / "dist_mem" / "shipped" / folder
            shutil.rmtree(copy, ignore_errors=True)  # of an earlier build
            shutil.copytree(folder, copy, ignore=_NOT_SHIPPED)


setup(cmdclass={"build_py": BuildWithFolders})
