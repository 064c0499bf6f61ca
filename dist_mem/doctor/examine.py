"""Run all checks in order, for `dist-mem doctor` and the preflight: first each rank alone, then the ranks together."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from dist_mem.doctor import consistency, disks, machine, network, sizes
from dist_mem.doctor.mlflow_server import check_mlflow
from dist_mem.runtime.distributed import World, gather_objects
from dist_mem.runtime.environment import node_name
from dist_mem.runtime.findings import Finding, Place, Remark, fail


class Plans(NamedTuple):
    """What rank 0 finds out about the run."""

    probe: str | None  # name of the file that it wrote into the run directory; None: it could not write
    checkpoint: sizes.Checkpoint | None  # None: the model cannot be built


class LocalResult(NamedTuple):
    """Result of the first round on one rank."""

    place: Place
    findings: list[Finding]
    code: consistency.Facts
    config: consistency.Facts
    data: consistency.Facts | None  # only on the first rank of a node
    plans: Plans


class Measured(NamedTuple):
    """Result of the second round on one rank, measured together with the others."""

    findings: list[Finding]
    wrong: list[int]
    clocks: list[network.Interval]
    pairs: list[network.PairSpeed]
    write_rate: float | None  # bytes per second; only on the first rank of a node


def examine(config: Any | None, world: World, *, is_thorough: bool) -> Generator[list[Finding], None, None]:
    """Run all checks in two rounds; collective, every rank calls it.

    Args:
        config: None: check only machines.
        is_thorough: also run checks that take seconds: speed of network and disk, git, quota.

    Yields:
        The findings of a round, the same on every rank. If the first round fails, the caller may skip the second.
    """
    results: list[LocalResult] = gather_objects(_look_around(config, world, is_thorough=is_thorough))
    places, plans = [one.place for one in results], results[0].plans
    try:
        yield [*(finding for one in results for finding in one.findings), *_compare(config, results)]
        measured: list[Measured] = gather_objects(_measure(config, world, plans, is_thorough=is_thorough))
    finally:
        if config is not None and world.rank == 0 and plans.probe:
            with suppress(OSError):
                (Path(config.run_dir) / plans.probe).unlink()
    yield list(_judge(config, places, measured, plans.checkpoint))


def _guarded(what: str, check: Callable[[], Iterable[Remark]]) -> list[Remark]:
    """Return the remarks of a check; an exception becomes a remark, because the other ranks wait for this one."""
    try:
        return list(check())
    except ValueError as error:
        return [fail(what, str(error), "fix it: dist-mem train CONFIG --check")]
    except Exception as error:  # any error: the other ranks wait for this one
        text = f"cannot be checked: {type(error).__name__}: {error}"
        return [fail(what, text, "repair this node", blames_node=True)]


def _facts(collect: Callable[[], consistency.Facts], findings: list[Finding], place: Place) -> consistency.Facts:
    """Return the facts to compare between ranks; on failure add a finding instead."""
    facts: consistency.Facts = {}

    def look() -> Iterator[Remark]:
        facts.update(collect())
        yield from ()

    findings += _at(place, _guarded("facts", look))
    return facts


def _at(place: Place | None, remarks: Iterable[Remark]) -> list[Finding]:
    return [remark.at(place) for remark in remarks]


def _look_around(config: Any | None, world: World, *, is_thorough: bool) -> LocalResult:
    """Run the first round: the checks of a rank alone."""
    place, is_first = Place(node_name(), world.rank), world.local_rank == 0
    findings, plans = _at(place, _guarded("limits", lambda: machine.check_limits(world.size))), Plans(None, None)
    whole = Place(place.node)
    if is_first:
        findings += _at(whole, _guarded("machine", lambda: machine.check_machine(world)))
        findings += _at(whole, _guarded("caches", disks.check_caches))
    code = _facts(lambda: consistency.code_facts(with_commit=is_thorough), findings, whole)
    if config is None:
        return LocalResult(place, findings, code, {}, None, plans)
    data = None
    if is_first:
        data = _facts(lambda: consistency.data_facts(config), findings, whole)
        findings += _at(whole, _guarded("data", lambda: consistency.check_tars(config)))
        if is_thorough:  # otherwise the job reports it, with a better message
            findings += _at(whole, _guarded("data", lambda: consistency.check_data(config)))
    if world.rank == 0:
        found, plans = _look_at_run(config, world, is_thorough=is_thorough)
        findings += found
    return LocalResult(
        place, findings, code, _facts(lambda: consistency.config_facts(config), findings, place), data, plans
    )


def _look_at_run(config: Any, world: World, *, is_thorough: bool) -> tuple[list[Finding], Plans]:
    """Run the checks of rank 0 alone."""
    node, run_dir = Place(node_name()), Path(config.run_dir)
    checkpoint: list[sizes.Checkpoint] = []

    def check_room() -> Iterator[Remark]:
        checkpoint.append(sizes.checkpoint_size(config, world.size))
        kept, (num_bytes, num_files) = sizes.checkpoints_to_come(config), checkpoint[0]
        yield from disks.check_room(run_dir, num_bytes=num_bytes, num_files=num_files, kept=kept)
        if is_thorough:
            yield from disks.check_quota(run_dir, num_bytes * kept)

    name = f".probe-{uuid.uuid4().hex}"
    problem = disks.leave_probe(run_dir, name)
    findings = _at(node, [problem] if problem else _guarded("disk room", check_room))
    findings += _at(None, _guarded("MLflow", lambda: check_mlflow(config, is_patient=is_thorough)))
    return findings, Plans(None if problem else name, checkpoint[0] if checkpoint else None)


def _compare(config: Any | None, results: Sequence[LocalResult]) -> Iterator[Finding]:
    places = [one.place for one in results]
    yield from consistency.compare("code", places, [one.code for one in results])
    if config is None:
        return
    yield from consistency.compare("configuration", places, [one.config for one in results])
    nodes = {one.place.node: one.data for one in results if one.data is not None}
    yield from consistency.compare("data", [Place(node) for node in nodes], list(nodes.values()))


def _measure(config: Any | None, world: World, plans: Plans, *, is_thorough: bool) -> Measured:
    """Run the second round: the checks that need other ranks."""
    node, is_first = Place(node_name()), world.local_rank == 0
    findings: list[Finding] = []
    run_dir = None if config is None or plans.probe is None else Path(config.run_dir)
    if run_dir is not None and is_first:
        findings += _at(node, _guarded("run directory", lambda: disks.look_for_probe(run_dir, str(plans.probe))))
    if run_dir is not None and world.rank == 0:
        findings += _at(node, _guarded("run directory", lambda: disks.check_run_dir_type(run_dir)))
    wrong, clocks = network.wrong_sums(world), network.read_clocks(world)
    if not is_thorough:
        return Measured(findings, wrong, clocks, [], None)
    findings += _at(None, network.check_speed(world))
    pairs, rate = network.measure_pairs(world), None
    if run_dir is not None and is_first:
        try:
            rate = disks.write_rate(run_dir)
        except OSError as error:
            findings += _at(node, [disks.cannot_write(error)])
    return Measured(findings, wrong, clocks, pairs, rate)


def _judge(
    config: Any | None, places: Sequence[Place], measured: Sequence[Measured], checkpoint: sizes.Checkpoint | None
) -> Iterator[Finding]:
    for one in measured:
        yield from one.findings
    yield from network.check_sums(places, [one.wrong for one in measured])
    yield from network.check_pairs(places, [one.pairs for one in measured])
    yield from network.check_clocks(places, [one.clocks for one in measured])
    rates = [one.write_rate for one in measured if one.write_rate is not None]
    if config is not None and checkpoint is not None and rates:
        yield from _at(None, sizes.check_stop_time(config, num_bytes=checkpoint.num_bytes, rate=sum(rates)))
