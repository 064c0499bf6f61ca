"""The job commands `dist-mem launch`, `status`, `logs` and `cancel`: their arguments and functions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from dist_mem.cli.arguments import CONFIG_HELP, count
from dist_mem.cli.commands import load_checked, make_snapshot, require_config
from dist_mem.config import load_config
from dist_mem.errors import UnusableError

Command = Callable[[argparse.Namespace], int]
_RUN_HELP = "a run directory"


def add_commands(add: Callable[[Command], argparse.ArgumentParser]) -> None:
    """Add the parsers; `add` makes the parser of a command from its function."""
    _add_launch(add(launch))
    status_parser = add(status)
    status_parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    status_parser.add_argument("--json", action="store_true", help="one JSON object a line for each run")
    logs_parser = add(logs)
    logs_parser.add_argument("run", type=Path, help=_RUN_HELP)
    logs_parser.add_argument("--follow", "-f", action="store_true", help="go on printing until its jobs have ended")
    logs_parser.add_argument("--lines", "-n", type=count, default=20, help="of each log, the last ones (default: 20)")
    cancel_parser = add(cancel)
    cancel_parser.add_argument("run", type=Path, help=_RUN_HELP)
    cancel_parser.add_argument("--now", action="store_true", help="without saving a checkpoint first")


def _add_launch(added: argparse.ArgumentParser) -> None:
    added.add_argument("config", nargs="*", help=f"{CONFIG_HELP}, as `dist-mem train` takes them")
    added.add_argument("--nodes", help="as launch.nodes: a number, or a range as 60-64")
    added.add_argument("--gpus-per-node", help="as launch.gpus_per_node")
    added.add_argument("--time", help="as launch.time")
    added.add_argument("--partition", help="as launch.partition")
    added.add_argument("--account", help="as launch.account")
    added.add_argument("--dry-run", action="store_true", help="only print the script")
    added.add_argument(
        "--script", choices=["train", "array"], help="print launch/train.sbatch or array.sbatch for a site"
    )


def launch(options: argparse.Namespace) -> int:
    """Submit a training job to Slurm, and print its number."""
    from dist_mem.launch import script, submit

    shorthand = ("nodes", "gpus_per_node", "time", "partition", "account")
    given = [f"launch.{name}={value!r}" for name in shorthand if (value := getattr(options, name)) is not None]
    if options.script:
        return submit.show_script(load_config(["train.steps=1", *options.config, *given]), kind=options.script)
    require_config(options, "dist-mem launch configs/demo.yaml launch/sites/generic.yaml --nodes 1")
    config = load_checked([*options.config, *given], builds_model=True)
    submit.check(config)
    from dist_mem.checkpoint.resume_source import check_run_dir
    from dist_mem.doctor.dry_run import idle_warning

    check_run_dir(config)
    if config.preflight and not options.dry_run:
        from dist_mem.doctor.consistency import check_data

        try:
            list(check_data(config))
        except ValueError as error:
            raise UnusableError(f"{error}; preflight=false submits the job without it") from error
    if warning := idle_warning(config, script.numbers_of_ranks(config.launch)):
        print(warning, file=sys.stderr)

    def snapshot(folder: Path) -> None:
        make_snapshot(folder, options.config)

    return submit.run(config, options.config, dry_run=options.dry_run, make_snapshot=snapshot)


def status(options: argparse.Namespace) -> int:
    """Show where runs stand: their jobs, last step, speed, time left, last checkpoint."""
    from dist_mem.launch.status import run

    return run(options.runs, as_json=options.json)


def logs(options: argparse.Namespace) -> int:
    """Print the end of the logs of a run's newest job."""
    from dist_mem.launch.logs import run

    return run(options.run, num_lines=options.lines, follow=options.follow)


def cancel(options: argparse.Namespace) -> int:
    """Save, stop and cancel the jobs of a run for good."""
    from dist_mem.launch.cancel import run

    return run(options.run, now=options.now)
