"""Send MLflow the data that it did not receive during a run."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from dist_mem.cli.arguments import place
from dist_mem.config.sources import SUFFIXES

PLACE = ("train", 7)
EXAMPLE = "sync runs/demo"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("action", choices=["sync"])
    added.add_argument(
        "runs", nargs="+", type=place, help="run directories, your own YAML files, overrides of tracking.*"
    )


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    from dist_mem.checkpoint.listing import newest_count
    from dist_mem.tracking.mlflow.sync import run as run_command

    overrides = [text for text in options.runs if text.startswith(("tracking.", "tracking="))]
    files = [text for text in options.runs if text.endswith(SUFFIXES) and text not in overrides]
    run_dirs = [Path(text) for text in options.runs if text not in (*overrides, *files)]
    return run_command(run_dirs, overrides, files, count=newest_count)
