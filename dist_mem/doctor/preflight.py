"""Checks at the start of a job: name unfit nodes before the first step, and end the job on all ranks.

before_joining   each rank reports to the store: a node without its GPU is named before other ranks wait for it
preflight        each rank checks its surroundings, and all compare: 0.05 s on two ranks
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from dist_mem.config import Config, WatchdogConfig
from dist_mem.doctor.examine import examine
from dist_mem.runtime.distributed import World, gather_objects
from dist_mem.runtime.environment import node_name
from dist_mem.runtime.ranks import read_ranks
from dist_mem.supervision.findings import RENDEZVOUS, WARNING, Finding, failed_nodes, lines, refuse
from dist_mem.supervision.hang_report import note_failed_nodes
from dist_mem.supervision.rendezvous import Check, Rendezvous, wait_for_ranks

log = logging.getLogger(__name__)


def before_joining(run_dir: str, watchdog: WatchdogConfig, preflight: bool, check: Check) -> Rendezvous:
    """Wait for all ranks and check that each has its accelerator; call it before `distributed.initialize`.

    With `preflight` off, only missing ranks end the job: torch would wait for them for half an hour without a message.

    Args:
        check: as of `wait_for_ranks`.

    Returns:
        The rendezvous, which keeps rank 0's store alive: hold it until `distributed.initialize` has returned.

    Raises:
        UnfitError: on every rank present; names missing ranks, and nodes without a GPU.
        UnusableError: on every rank present; two ranks have the same GPU.
        ValueError: a launcher's variables are incomplete.
    """
    rendezvous = wait_for_ranks(seconds=watchdog.join_seconds, check=check)
    findings = [one for one in rendezvous.findings if preflight or one.what == RENDEZVOUS]
    _refuse(run_dir, findings, rendezvous.nodes, is_writer=read_ranks()[0] == 0)
    return rendezvous


def preflight(config: Config, world: World) -> list[str]:
    """Check that nodes and ranks are fit for this configuration; every rank calls it after joining.

    Returns:
        Warnings, one line each; the same on every rank.

    Raises:
        UnusableError: on every rank, with one message: what failed, where, and the fix.
        UnfitError: likewise, if every failure is specific to a machine or temporary.
    """
    findings: list[Finding] = []
    with closing(examine(config, world, is_thorough=False)) as rounds:
        for found in rounds:
            findings += found
            _refuse(config.run_dir, findings, gather_objects(node_name()), is_writer=world.rank == 0)
    return lines([finding for finding in findings if finding.level == WARNING])


def _refuse(run_dir: str, findings: Sequence[Finding], nodes: Sequence[str], *, is_writer: bool) -> None:
    names = failed_nodes(findings, nodes)
    if is_writer and names:
        try:
            note_failed_nodes(Path(run_dir), names, nodes)
        except OSError as error:  # the job is refused anyway, for a more important reason
            log.warning("%s: %s", run_dir, error)
    refuse(findings, nodes)
