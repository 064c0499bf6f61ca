"""Train and evaluate every row of a table of the papers, or of yours."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dist_mem.cli.arguments import place
from dist_mem.cli.studies import add_study_arguments, run_study
from dist_mem.errors import EXIT_DONE
from dist_mem.runtime.terminal import table

PLACE = ("use a trained model", 12)
EXAMPLE = "recall --scale small"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument(
        "study",
        nargs="?",
        type=place,
        metavar="TABLE",
        help="name, for example lamemo.table1, or a .yaml file (default: list them)",
    )
    add_study_arguments(added, "runs/reproduce/TABLE.SCALE")
    added.set_defaults(no_estimate=True)


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    from dist_mem.studies.study import load_study, study_names

    if options.study is not None:
        return run_study(options)
    shipped = [load_study(name) for name in study_names()]
    rows = [(study.name, ", ".join(study.scales), study.title) for study in shipped]
    print("\n".join(table([("table", "scales", "what"), *rows])))
    return EXIT_DONE
