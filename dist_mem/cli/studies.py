"""What `dist-mem reproduce`, `sweep` and `arena`, the three doors to a study, have in common."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from typing import TYPE_CHECKING, Any

from dist_mem.cli.arguments import count, names, output_folder, seeds
from dist_mem.errors import UnusableError

if TYPE_CHECKING:
    from dist_mem.config import LaunchConfig
    from dist_mem.studies.study import Study


def add_study_arguments(added: ArgumentParser, out: str) -> Any:
    """Add the arguments of all three commands; return the group of what to do instead of running."""
    added.add_argument(
        "overrides", nargs="*", default=[], help="key=value for every training; with --slurm also a site's YAML files"
    )
    added.add_argument("--scale", default="", help="one of the file's: tiny, small or paper (default: its first)")
    added.add_argument("--rows", type=names, default=[], help="only these rows, for example transformer_xl,lamemo")
    added.add_argument("--seeds", type=seeds, default=[], help="for example 0,1,2 (default: those of the file)")
    added.add_argument(
        "--jobs", type=partial(count, most=1000), default=1, metavar="N", help="trainings at one time (default: 1)"
    )
    added.add_argument("--ranks", type=count, default=1, metavar="N", help="processes per training (default: 1)")
    added.add_argument("--out", type=output_folder, metavar="FOLDER", help=f"output (default: {out})")
    added.add_argument(
        "--cells", type=output_folder, metavar="FOLDER", help="reuse finished runs in this folder, and add new ones"
    )
    added.add_argument(
        "--max-runs", type=count, default=1000, metavar="N", help="refuse a file with more (default: 1000)"
    )
    what = added.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="print the resolved settings of every row, and exit")
    what.add_argument("--estimate", action="store_true", help="print what it will take, and exit")
    what.add_argument("--slurm", action="store_true", help="submit the trainings as a job array, and exit")
    what.add_argument("--no-estimate", action="store_true", help="begin without trying every row first")
    added.set_defaults(plan=False)
    return what


def run_study(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    from dist_mem.studies.run_study import StudyRequest, run
    from dist_mem.studies.study import load_study

    launch, extra = _divide(options)
    _check_columns(load_study(options.study, options.scale, max_runs=options.max_runs))
    given = {
        name: getattr(options, name) for name in ("scale", "out", "cells", "rows", "seeds", "jobs", "ranks", "max_runs")
    }
    what = {"check": options.check, "plan": options.plan, "run": not options.estimate}
    estimates = options.estimate or not options.no_estimate
    return run(
        StudyRequest(options.study, options.command, **given, **what, extra=extra, launch=launch, estimate=estimates)
    )


def _check_columns(study: Study) -> None:
    """Raise UnusableError if the command of a column refuses its options, which would be seen after all training."""
    from dist_mem.cli.parser import parse  # which imports this module

    for name, column in study.columns.items():
        try:
            parse([column.command, "RUN", "--split", column.split, *column.evaluate])
        except SystemExit as ended:
            raise UnusableError(
                f"{study.path}: column {name}: `dist-mem {column.command}` refuses {column.evaluate}; see above"
            ) from ended


def _divide(options: Namespace) -> tuple[LaunchConfig | None, list[str]]:
    """Return the block `launch` of the site, None without --slurm, and the overrides of every training.

    Raises:
        UnusableError: files or keys are given that only --slurm takes, or a file has keys of other blocks.
    """
    from dist_mem.config import load_config
    from dist_mem.config.check import flatten
    from dist_mem.config.sources import is_file_name, read_sources
    from dist_mem.launch.validation import check

    files = [word for word in options.overrides if is_file_name(word)]
    site = [word for word in options.overrides if word in files or word.startswith(("launch.", "launch="))]
    extra = [word for word in options.overrides if word not in site]
    if options.slurm:
        launch = load_config(site, trains=False, check=check).launch
        for source in read_sources(site):
            if others := {name: child for name, child in source.tree.items() if name != "launch"}:
                key = next(iter(flatten(others)))
                way = f"of a site's file only `launch` counts; put the rest under train: of {options.study}"
                raise UnusableError(f"{source.place(key)}: {key}: {way}")
        return launch, extra
    if files:
        raise UnusableError(
            f"{files[0]}: only --slurm takes files beside the {options.command}'s; name it under train: in the file"
        )
    if site:
        raise UnusableError(f"{site[0]}: only --slurm submits jobs; give it too, or leave the key out")
    return None, extra
