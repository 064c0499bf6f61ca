"""The functions of the job commands `dist-mem launch`, `status`, `logs` and `cancel`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dist_mem.cli.arguments import add_allow, count
from dist_mem.cli.commands import load_checked, make_snapshot, require_config
from dist_mem.config import load_config
from dist_mem.config.resume_rules import check_allowed
from dist_mem.errors import UnusableError


def launch(options: argparse.Namespace) -> int:
    """Submit a training job to Slurm and print its number."""
    from dist_mem.launch import mounts, script, submit
    from dist_mem.launch.validation import check

    shorthand = ("nodes", "gpus_per_node", "time", "partition", "account")
    given = [f"launch.{name}={value}" for name in shorthand if (value := getattr(options, name)) is not None]
    if options.script:
        return submit.show_script(load_config([*options.config, *given], trains=False, check=check))
    require_config(options, "dist-mem launch configs/demo.yaml launch/sites/generic.yaml --nodes 1")
    config = load_checked([*options.config, *given], builds_model=True, further=check)
    check_allowed(options.allow)
    from dist_mem.checkpoint.resume_source import check_run_dir
    from dist_mem.estimate.dry_run import idle_warning

    check_run_dir(config, options.allow)
    if config.preflight and not options.dry_run:
        from dist_mem.doctor.consistency import check_data

        try:
            check_data(config.data, config.eval)
        except ValueError as error:
            raise UnusableError(f"{error}; preflight=false submits the job without it") from error
    idle = idle_warning(config.train, config.data, script.numbers_of_ranks(config.launch))
    for warning in filter(None, [idle, *mounts.warnings(config)]):
        print(warning, file=sys.stderr)

    def snapshot(folder: Path) -> None:
        make_snapshot(folder, options.config)

    arguments = [*options.config, *(f"--allow={key}" for key in options.allow)]
    return submit.run(config, arguments, dry_run=options.dry_run, make_snapshot=snapshot)


def status(options: argparse.Namespace) -> int:
    """Show the job, step, speed, time left and last checkpoint of runs."""
    from dist_mem.launch.status import run

    return run(options.runs, as_json=options.json)


def logs(options: argparse.Namespace) -> int:
    """Print the end of the logs of a run's newest job."""
    from dist_mem.launch.logs import run

    return run(options.run, num_lines=options.lines, follow=options.follow)


def cancel(options: argparse.Namespace) -> int:
    """Save, stop and cancel the jobs of a run, without a restart."""
    from dist_mem.launch.cancel import run

    return run(options.run, now=options.now)


def add_launch_arguments(added: argparse.ArgumentParser) -> None:
    """Add the arguments of `dist-mem launch`."""
    added.add_argument("config", nargs="*", default=[], help="as for `dist-mem train`")
    add_allow(added, "key that may differ from the checkpoint, as for `dist-mem train`; repeatable")
    added.add_argument("--nodes", metavar="N", help="launch.nodes: a number, or a range such as 60-64")
    added.add_argument("--gpus-per-node", metavar="N", help="launch.gpus_per_node")
    added.add_argument("--time", help="launch.time")
    added.add_argument("--partition", metavar="NAME", help="launch.partition")
    added.add_argument("--account", metavar="NAME", help="launch.account")
    added.add_argument("--dry-run", action="store_true", help="print the script and do not submit it")
    added.add_argument("--script", action="store_true", help="print a script for any configuration, to use with sbatch")


def add_status_arguments(added: argparse.ArgumentParser) -> None:
    """Add the arguments of `dist-mem status`."""
    added.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    added.add_argument("--json", action="store_true", help="print one JSON object per run, one per line")


def add_logs_arguments(added: argparse.ArgumentParser) -> None:
    """Add the arguments of `dist-mem logs`."""
    added.add_argument("run", type=Path, help="a run directory")
    added.add_argument("--follow", "-f", action="store_true", help="print until the run's jobs have ended")
    added.add_argument("--lines", "-n", type=count, default=20, metavar="N", help="lines of each log (default: 20)")


def add_cancel_arguments(added: argparse.ArgumentParser) -> None:
    """Add the arguments of `dist-mem cancel`."""
    added.add_argument("run", type=Path, help="a run directory")
    added.add_argument("--now", action="store_true", help="do not save a checkpoint first")
