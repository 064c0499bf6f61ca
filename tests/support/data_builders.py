"""Run `dist-mem data build` in this process."""

from __future__ import annotations

from pathlib import Path

from dist_mem.__main__ import main


def build_data(name: str, *arguments: str | Path) -> int:
    """Run a builder and return its exit code."""
    return main(["data", "build", name, *map(str, arguments)])
