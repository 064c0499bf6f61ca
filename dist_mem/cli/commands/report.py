"""Write one HTML page about a book: what each word gains from memory, and from where."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from dist_mem.cli.arguments import divide_runs, output_file, place, split
from dist_mem.errors import UnusableError
from dist_mem.runtime.shipped_files import example_book, example_model
from dist_mem.runtime.signals import OF_SCHEDULERS, StopSignal

PLACE = ("use a trained model", 6)
EXAMPLE = "runs/demo runs/demo_none --book 9003 --split test"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("runs", nargs="*", type=place, metavar="RUN", help="run directories, and key=value overrides")
    book = added.add_mutually_exclusive_group(required=True)
    book.add_argument("--book", metavar="ID", help="show this document, read by the first run")
    book.add_argument("--text", type=Path, metavar="FILE", help="show this UTF-8 file, read by the first run")
    book.add_argument("--example", action="store_true", help="show a book and a model that come with dist_mem")
    added.add_argument("--split", type=split, metavar="NAME", help="split of --book (default: eval.split)")
    added.add_argument("--no-removals", action="store_true", help="do not measure the effect of removing passages")
    out_help = "file to write (default: RUN/report.html; for --example, ./example_report.html)"
    added.add_argument("-o", "--out", type=output_file, metavar="FILE", help=out_help)
    added.set_defaults(overrides=[])  # those after an option


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    runs, given = divide_runs(options)
    if options.example and runs:
        raise UnusableError(f"--example: not with a run, such as {runs[0]}; give --book ID or --text FILE for that")
    if not runs and not options.example:
        raise UnusableError("report: no run: give a run directory, as in: dist-mem report runs/demo --book 9003")
    if len(runs) > 2:
        raise UnusableError(f"report: one run or two read the book, but {len(runs)} are given; leave {runs[2]} out")
    if options.split is not None and options.book is None:
        raise UnusableError(f"--split {options.split}: only with --book; it is the split of that document")
    text, out, overrides = options.text, options.out, tuple(given)
    if options.example:
        runs, text, out = [example_model()], example_book(), out or Path("example_report.html")
        overrides = ("tracking.mlflow=false", "train.threads=1", *overrides)  # more threads slow so small a model
    with StopSignal(OF_SCHEDULERS) as early:
        from dist_mem.runtime.distributed import choose_accelerator

        choose_accelerator()
        from dist_mem.inspection.counterfactual import MOST
        from dist_mem.inspection.page.write_page import run as run_command
        from dist_mem.inspection.request import InspectionRequest

        asked = InspectionRequest(
            runs[0], runs[1] if runs[1:] else None, book=options.book, text=text, split=options.split,
            passages=None if options.no_removals else MOST, overrides=overrides,
        )  # fmt: skip
        return run_command(asked, out=out, early=early)
