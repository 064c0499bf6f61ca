"""The start of a job: a node that is not fit is named before the first step, and the job does not begin.

before_joining   each rank leaves a note in the store: a node without its GPU is named before others wait for it
preflight        each rank looks around, all compare: 0.05 s on two ranks. What fails ends the job on all ranks
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dist_mem.doctor.examine import examine
from dist_mem.runtime.distributed import World, gather_objects
from dist_mem.runtime.environment import node_name, read_ranks
from dist_mem.runtime.files import write_text
from dist_mem.runtime.findings import MEETING, WARNING, Finding, failed_nodes, lines, refuse
from dist_mem.runtime.hang_report import FAILED_NODES
from dist_mem.runtime.rendezvous import Meeting, meet

log = logging.getLogger(__name__)


def before_joining(config: Any) -> Meeting:
    """Wait for all ranks and see that each has its accelerator; called before `distributed.initialize`.

    Without `preflight` only who has not come is a reason to end: torch would wait for half an hour in silence.

    Keep what it returns until that has been called: rank 0 holds the store in it.

    Raises:
        UnfitError: on every rank that came; names who did not come, and nodes without a GPU.
        UnusableError: likewise; two ranks have one GPU.
        ValueError: half of a launcher's variables.
    """
    meeting = meet(seconds=config.watchdog.join_seconds)
    findings = [one for one in meeting.findings if config.preflight or one.what == MEETING]
    _refuse(config, findings, meeting.nodes, is_writer=read_ranks()[0] == 0)
    return meeting


def preflight(config: Any, world: World) -> list[str]:
    """See that nodes and ranks are fit for this configuration; every rank calls it, once it has joined.

    Returns:
        Warnings, a line each; the same on every rank.

    Raises:
        UnusableError: on every rank, with one message: what failed, where, and the fix.
        UnfitError: likewise, if all that failed is of one machine, or of now.
    """
    findings: list[Finding] = []
    with closing(examine(config, world, is_thorough=False)) as rounds:
        for found in rounds:
            findings += found
            _refuse(config, findings, gather_objects(node_name()), is_writer=world.rank == 0)
    return lines([finding for finding in findings if finding.level == WARNING])


def _refuse(config: Any, findings: Sequence[Finding], nodes: Sequence[str], *, is_writer: bool) -> None:
    names = failed_nodes(findings, nodes)
    if is_writer and names:
        note_failed_nodes(Path(config.run_dir), names)
    refuse(findings, nodes)


def note_failed_nodes(run_dir: Path, names: Iterable[str]) -> None:
    """Add nodes to RUN/slurm/failed_nodes, which the next start may leave out."""
    path = run_dir / FAILED_NODES
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        noted = path.read_text(encoding="utf-8").split() if path.exists() else []
        write_text(path, "".join(f"{name}\n" for name in dict.fromkeys([*noted, *names])))
    except OSError as error:  # the job is refused anyway, for a reason that matters more
        log.warning("%s: %s", path, error)
