"""The functions of `dist-mem reproduce`, `sweep` and `arena`, the three doors to a study, and their arguments."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from typing import TYPE_CHECKING, Any

from dist_mem.cli.arguments import count, names, output_folder, place, seeds
from dist_mem.errors import EXIT_DONE, UnusableError
from dist_mem.runtime.terminal import table

if TYPE_CHECKING:
    from dist_mem.config import Config


_GIVEN = ("scale", "out", "cells", "rows", "seeds", "jobs", "ranks", "max_runs")  # options that are those of a Request


def add_reproduce_arguments(added: ArgumentParser) -> None:
    """Add the arguments of `dist-mem reproduce`."""
    added.add_argument(
        "study",
        nargs="?",
        type=place,
        metavar="TABLE",
        help="name, for example lamemo.table1, or a .yaml file (default: list them)",
    )
    _add_arguments(added, "runs/reproduce/TABLE.SCALE")
    added.set_defaults(no_estimate=True, plan=False)


def add_sweep_arguments(added: ArgumentParser) -> None:
    """Add the arguments of `dist-mem sweep`."""
    added.add_argument("study", type=place, metavar="SWEEP.yaml", help="grid, rows, seeds and columns")
    what = _add_arguments(added, "runs/sweep/NAME")
    what.add_argument("--no-estimate", action="store_true", help="begin without trying every row first")
    added.set_defaults(plan=False)


def add_arena_arguments(added: ArgumentParser) -> None:
    """Add the arguments of `dist-mem arena`."""
    added.add_argument("study", type=place, metavar="ARENA.yaml", help="rows, budget, seeds and columns")
    what = _add_arguments(added, "runs/arena/NAME")
    what.add_argument("--no-estimate", action="store_true", help="begin without trying every row first")
    what.add_argument("--plan", action="store_true", help="print what every row takes within the budget, and exit")


def _add_arguments(added: ArgumentParser, out: str) -> Any:
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
        "--cells", type=output_folder, metavar="FOLDER", help="take over its finished runs, and add those made here"
    )
    added.add_argument(
        "--max-runs", type=count, default=1000, metavar="N", help="refuse a file with more (default: 1000)"
    )
    what = added.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="print the resolved settings of every row, and exit")
    what.add_argument("--estimate", action="store_true", help="print what it will take, and exit")
    what.add_argument("--slurm", action="store_true", help="submit the trainings as a job array, and exit")
    return what


def reproduce(options: Namespace) -> int:
    """Train and evaluate every row of a table of the papers, or of yours."""
    from dist_mem.studies.study import load_study, study_names

    if options.study is not None:
        return _run(options)
    shipped = [load_study(name) for name in study_names()]
    rows = [(study.name, ", ".join(study.scales), study.title) for study in shipped]
    print("\n".join(table([("table", "scales", "what"), *rows])))
    return EXIT_DONE


def sweep(options: Namespace) -> int:
    """Train and compare every combination of some settings, several at one time."""
    return _run(options)


def arena(options: Namespace) -> int:
    """Compare memories at an equal budget: train, evaluate, and write a table with intervals."""
    return _run(options)


def _run(options: Namespace) -> int:
    from dist_mem.studies.run_study import Request, run

    site, extra = _divided(options)
    given = {
        name: getattr(options, name) for name in ("scale", "out", "cells", "rows", "seeds", "jobs", "ranks", "max_runs")
    }
    what = {"check": options.check, "plan": options.plan, "run": not options.estimate}
    estimates = options.estimate or not options.no_estimate
    return run(Request(options.study, options.command, **given, **what, extra=extra, site=site, estimate=estimates))


def _divided(options: Namespace) -> tuple[Config | None, list[str]]:
    """Return the configuration of the site, None without --slurm, and the overrides of every training.

    Raises:
        UnusableError: files or keys are given that only --slurm takes.
    """
    from dist_mem.config import load_config
    from dist_mem.launch.validation import check

    files = [word for word in options.overrides if "=" not in word]
    site = [word for word in options.overrides if word in files or word.startswith("launch.")]
    extra = [word for word in options.overrides if word not in site]
    if options.slurm:
        return load_config(site, trains=False, check=check), extra
    if files:
        raise UnusableError(
            f"{files[0]}: only --slurm takes files beside the {options.command}'s; name it under train: in the file"
        )
    if site:
        raise UnusableError(f"{site[0]}: only --slurm submits jobs; give it too, or leave the key out")
    return None, extra
