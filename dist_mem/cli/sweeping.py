"""The function of `dist-mem sweep`, and its arguments."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_mem.cli.arguments import count, output_folder
from dist_mem.errors import UnusableError

if TYPE_CHECKING:
    from dist_mem.config import Config


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of `dist-mem sweep`."""
    added.add_argument("sweep", type=Path, metavar="SWEEP.yaml", help="grid, rows, seeds and columns")
    add_running(added, "runs/sweep/NAME")


def add_running(added: ArgumentParser, out: str) -> Any:
    """Add the arguments of commands that run many trainings; return the group of what to do instead of running."""
    added.add_argument(
        "overrides", nargs="*", default=[], help="key=value for every training; with --slurm also a site's YAML files"
    )
    added.add_argument(
        "--jobs", type=partial(count, most=1000), default=1, metavar="N", help="trainings at one time (default: 1)"
    )
    added.add_argument("--ranks", type=count, default=1, metavar="N", help="processes per training (default: 1)")
    added.add_argument("--out", type=output_folder, metavar="FOLDER", help=f"output (default: {out})")
    added.add_argument(
        "--max-runs", type=count, default=1000, metavar="N", help="refuse a file with more (default: 1000)"
    )
    what = added.add_mutually_exclusive_group()
    what.add_argument("--estimate", action="store_true", help="print what it will take, and exit")
    what.add_argument("--no-estimate", action="store_true", help="begin without trying every row first")
    what.add_argument("--slurm", action="store_true", help="submit the trainings as a job array, and exit")
    return what


def _divided(options: Namespace) -> tuple[Config | None, list[str]]:
    """Return the configuration of the site, None without --slurm, and the overrides of every training.

    Raises:
        UnusableError: files are given that only --slurm takes.
    """
    from dist_mem.config import load_config

    files = [word for word in options.overrides if "=" not in word]
    site = [word for word in options.overrides if word in files or word.startswith("launch.")]
    extra = [word for word in options.overrides if word not in site]
    if options.slurm:
        return load_config(["train.steps=1", *site]), extra
    if files:
        raise UnusableError(
            f"{files[0]}: only --slurm takes files beside the {options.command}'s; name it under train: in the file"
        )
    return None, extra


def run_or_submit(
    options: Namespace, path: Path, run: Callable[..., int], submit: Callable[..., int], **more: Any
) -> int:
    """Call `submit` with --slurm and `run` without it; `more`: further arguments of `run`."""
    config, extra = _divided(options)
    if config is not None:
        return submit(path, config, out=options.out, jobs=options.jobs, extra=extra, max_runs=options.max_runs)
    more["max_runs"] = options.max_runs
    estimates = {"estimates": not options.no_estimate, "only_estimate": options.estimate}
    return run(path, out=options.out, jobs=options.jobs, ranks=options.ranks, extra=extra, **estimates, **more)


def sweep(options: Namespace) -> int:
    """Train and compare every combination of some settings, several at one time."""
    from dist_mem.studies.sweep import run, submit

    return run_or_submit(options, options.sweep, run, submit)
