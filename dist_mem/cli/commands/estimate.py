"""Predict memory, speed and checkpoints of a job on given GPUs, and propose settings."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from dist_mem.cli.arguments import count
from dist_mem.cli.configuration import load_checked, require_config
from dist_mem.errors import UnusableError
from dist_mem.runtime.figures import json_text

PLACE = ("check", 2)
EXAMPLE = "configs/pg19_small.yaml --gpu h100-80gb --gpus 2"


def add_arguments(added: ArgumentParser) -> None:
    """Add the arguments of the command."""
    added.add_argument(
        "config", nargs="*", default=[], help="YAML files, merged left to right, and key=value overrides"
    )
    added.add_argument("--gpus", type=count, default=1, metavar="N", help="number of GPUs of the job (default: 1)")
    added.add_argument("--gpu", required=True, metavar="NAME", help="h100, h200, a100-40gb, ..., or cpu: this machine")
    added.add_argument(
        "--disk", type=float, default=1.0, metavar="GB/s", help="write speed of all ranks together (default: 1)"
    )
    added.add_argument("--all", action="store_true", help="show every setting")
    added.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: Namespace) -> int:
    """Run the command; return the exit code of the process."""
    require_config(options, "dist-mem estimate configs/pg19_small.yaml --gpus 2 --gpu h100-80gb")
    if not options.disk > 0:
        raise UnusableError(f"--disk {options.disk}: must be above 0")
    from dist_mem.launch.validation import check_gpus

    config = load_checked(options.config, builds_model=True, further=lambda config: check_gpus(config.launch))
    from dist_mem.estimate import job_estimate
    from dist_mem.estimate.dry_run import known_steps
    from dist_mem.estimate.search import Cluster
    from dist_mem.estimate.vocabulary import vocab_size_of
    from dist_mem.launch.script import ranks_per_node
    from dist_mem.runtime.gpu import device_of

    cluster = Cluster(device_of(options.gpu), options.gpus, ranks_per_node(config.launch))
    job = job_estimate.estimate_job(
        config,
        vocab_size_of(config.data, config.model),
        cluster,
        disk_rate=1e9 * options.disk,
        steps=known_steps(config.data, config.train, config.schedule),
        report=_report,
    )
    if options.json:
        print(json_text(job_estimate.as_json(job)))
    else:
        print(job_estimate.as_text(config.train, job, shows_all=options.all))
    if not job.fits:
        raise UnusableError(job_estimate.refusal(job))
    return 0


def _report(what: str) -> None:
    """Show on a terminal what is counted next: all of it takes seconds to minutes."""
    if sys.stderr.isatty():
        print(f"counting operations and memory: {what}", file=sys.stderr)
