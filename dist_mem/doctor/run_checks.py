"""The doctor command: run all checks, on one process or on all ranks of a launcher, and print a line per finding.

    dist-mem doctor
    srun --ntasks-per-node 8 --gpus-per-node 8 dist-mem doctor configs/pg19_small.yaml

The exit code is 1, not 2, if a check failed, because another node, or the same one after a repair, may pass. It is 2 if
the configuration does not exist, as for every command.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from dist_mem.config import Config
from dist_mem.doctor.examine import examine
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, UnusableError
from dist_mem.runtime import distributed
from dist_mem.runtime.environment import node_name
from dist_mem.runtime.ranks import read_ranks
from dist_mem.runtime.terminal import colour_first_word
from dist_mem.supervision.findings import FAIL, WARNING, Finding, Place, fail, find_failures, lines
from dist_mem.supervision.rendezvous import wait_for_ranks

_TIMEOUT = 120.0  # seconds that ranks wait for each other; short, because the command is interactive


def run(config: Config | None, *, seconds: float = _TIMEOUT) -> int:
    """Run all checks and print the findings; return the exit code, the same on every rank.

    Args:
        config: None: check only machines and network.
        seconds: for network checks, and for ranks to come where `config` does not say.

    Raises:
        UnusableError: the launcher's environment variables are incomplete.
    """
    began = time.monotonic()
    try:
        rank, size, _, _ = read_ranks()
        rendezvous = wait_for_ranks(seconds=seconds if config is None else config.watchdog.join_seconds)
    except ValueError as error:
        raise UnusableError(str(error)) from error
    is_alone = rendezvous.store is None and size > 1  # it has met no other rank, so it prints its own findings
    findings = list(rendezvous.findings)
    _show(findings, if_=rank == 0 or is_alone)
    if find_failures(findings):
        return _end(findings, began, prints=rank == 0)
    try:
        world = distributed.initialize(timeout_seconds=seconds, tf32=config is not None and config.train.tf32)
        for found in examine(config, world, is_thorough=True):
            _show(found, if_=rank == 0)
            findings += found
        distributed.shut_down(agreed=True)
    except RuntimeError as error:  # raised by torch: the other ranks did not answer
        reason = str(error).partition("\n")[0]
        fix = "the firewall between nodes; NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME (launch.interface)"
        broken = fail("network", reason, fix, blames_node=True).at(Place(node_name(), rank))
        _show([broken], if_=True)
        findings.append(broken)
    return _end(findings, began, prints=rank == 0)


def _show(findings: Sequence[Finding], *, if_: bool) -> None:
    if if_:
        for line in lines(findings):
            print(colour_first_word(line, sys.stdout), flush=True)


def _end(findings: Sequence[Finding], began: float, *, prints: bool) -> int:
    num_failed = len(lines(find_failures(findings)))
    num_warnings = len(lines([finding for finding in findings if finding.level == WARNING]))
    if prints:
        summary = f"{num_failed} {FAIL}, {num_warnings} {WARNING}"
        print(f"{summary}, {time.monotonic() - began:.1f} s", file=sys.stderr if num_failed else sys.stdout)
    return EXIT_FAILED if num_failed else EXIT_DONE
