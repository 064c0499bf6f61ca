"""Draw a figure of the papers from trained runs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dist_mem.cli.arguments import MODEL, add_checkpoint, count, divide_runs, output_folder, place, split
from dist_mem.errors import UnusableError
from dist_mem.runtime.signals import OF_SCHEDULERS, StopSignal

PLACE = ("use a trained model", 5)
EXAMPLE = "lamemo.fig1 runs/demo"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("name", nargs="?", help="as in the papers, for example infinite.fig7; see --list")
    added.add_argument(
        "runs", nargs="*", type=place, default=[], help=f"{MODEL}; then key=value overrides, as for `evaluate`"
    )
    added.add_argument("--list", action="store_true", help="list all figures")
    added.add_argument("--split", type=split, metavar="NAME", help="split to read (default: eval.split)")
    added.add_argument("--document", metavar="ID", help="read this document of the split")
    added.add_argument("--tokens", type=count, metavar="N", help="tokens to read (default: as many as the paper)")
    add_checkpoint(added)
    added.add_argument(
        "-o", "--out", type=output_folder, metavar="FOLDER", help="folder to write (default: RUN/figures)"
    )
    added.add_argument("--format", choices=["png", "svg"], default="png", help="of the picture (default: png)")
    added.set_defaults(overrides=[])  # those after an option


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    if not options.list and options.name is None:
        raise UnusableError("figure: give a name and a run, as in: dist-mem figure infinite.fig7 RUN; or --list")
    with StopSignal(OF_SCHEDULERS) as early:
        from dist_mem.runtime.distributed import choose_accelerator

        choose_accelerator()
        from dist_mem.papers import draw_figures as command
        from dist_mem.papers.figures.parts.source import FigureSettings

        if options.list:
            print(command.describe_figures())
            return 0
        runs, overrides = divide_runs(options)
        settings = FigureSettings(options.split, options.document, options.tokens, tuple(overrides))
        return command.run(
            options.name,
            runs,
            settings,
            checkpoint=options.checkpoint,
            folder=options.out,
            form=options.format,
            early=early,
        )
