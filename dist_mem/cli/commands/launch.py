"""Submit a training job to Slurm and print its number."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

from dist_mem.cli.arguments import add_allow
from dist_mem.cli.configuration import load_checked, require_config
from dist_mem.config import DataConfig, EvalConfig, as_tree, change_config, load_config
from dist_mem.config.check import flatten
from dist_mem.config.resume_rules import check_allowed
from dist_mem.errors import UnusableError

PLACE = ("train", 2)
EXAMPLE = "configs/pg19_small.yaml launch/sites/generic.yaml --nodes 4"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument("config", nargs="*", default=[], help="as for `dist-mem train`")
    add_allow(added, "key that may differ from the checkpoint, as for `dist-mem train`; repeatable")
    added.add_argument("--nodes", metavar="N", help="launch.nodes: a number, or a range such as 60-64")
    added.add_argument("--gpus-per-node", metavar="N", help="launch.gpus_per_node")
    added.add_argument("--time", help="launch.time")
    added.add_argument("--partition", metavar="NAME", help="launch.partition")
    added.add_argument("--account", metavar="NAME", help="launch.account")
    added.add_argument("--dry-run", action="store_true", help="print the script and do not submit it")
    added.add_argument("--script", action="store_true", help="print a script for any configuration, to use with sbatch")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    from dist_mem.launch import code_snapshot, mounts, script, submit
    from dist_mem.launch.validation import check, check_folder

    shorthand = ("nodes", "gpus_per_node", "time", "partition", "account")
    given = [f"launch.{name}={value}" for name in shorthand if (value := getattr(options, name)) is not None]
    if options.script and options.dry_run:
        raise UnusableError("--dry-run: not with --script, which submits nothing; leave it out")
    if options.script and options.allow:
        way = f"give it to the script: sbatch job.sbatch CONFIG --allow={options.allow[0]}"
        raise UnusableError(f"--allow {options.allow[0]}: not with --script; {way}")
    if options.script:
        return submit.show_script(load_config([*options.config, *given], trains=False, check=check).launch)
    require_config(options, "dist-mem launch configs/demo.yaml launch/sites/generic.yaml --nodes 1")
    config = load_checked([*options.config, *given], builds_model=True, further=check)
    leaves = flatten(as_tree(config))
    check_folder(config.launch, leaves, options.config)
    check_allowed(options.allow)
    from dist_mem.checkpoint.resume_source import check_run_dir
    from dist_mem.estimate.dry_run import idle_warning
    from dist_mem.tracking.start import check_sinks

    check_run_dir(config, options.allow)
    check_sinks(config.tracking, is_here=not (submit.has_own_environment(config.launch) or options.dry_run))
    if config.preflight and not options.dry_run:
        outside = mounts.find_outside(config.launch, leaves)
        here = change_config(config, outside)
        _check_data(here.data, here.eval, outside=outside)
    idle = idle_warning(config.train, config.data, script.numbers_of_ranks(config.launch))
    for warning in filter(None, [idle, *mounts.warnings(config)]):
        print(warning, file=sys.stderr)

    def snapshot(folder: Path) -> None:
        code_snapshot.make_for(folder, [options.config])

    arguments = [*options.config, *(f"--allow={key}" for key in options.allow)]
    return submit.run(config, arguments, dry_run=options.dry_run, make_snapshot=snapshot)


def _check_data(data: DataConfig, evaluation: EvalConfig, *, outside: Mapping[str, str]) -> None:
    """Check the data that this machine has; of what only a container may have, print a warning.

    Args:
        outside: key -> folder, of those that the job reads in a container.

    Raises:
        UnusableError: they are not there, or damaged.
    """
    from dist_mem.doctor.consistency import check_data

    try:
        check_data(data, evaluation)
    except ValueError as error:
        missing = [key for key, folder in outside.items() if not Path(folder).exists()]
        if not missing:
            way = "if only the nodes have it, submit with: dist-mem launch ... --dry-run | sbatch"
            raise UnusableError(f"{error}; {way}") from error
        place = "not on this machine, outside of the container: the preflight of the job looks there"
        print(f"warning: {', '.join(missing)}: {place}", file=sys.stderr)
