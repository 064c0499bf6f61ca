"""Run all checks in order, for `dist-mem doctor` and the preflight: first each rank alone, then the ranks together."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dist_mem.config import Config, TrackingConfig
from dist_mem.doctor import consistency, disks, gpus, machine, network
from dist_mem.errors import UnusableError, run_error
from dist_mem.runtime.distributed import World, gather_objects
from dist_mem.runtime.environment import node_name
from dist_mem.runtime.files import drop_empty, missing_folders
from dist_mem.supervision.findings import MACHINE, Finding, Place, Remark, fail, ok, warning
from dist_mem.tracking.mlflow.database import ForeignError
from dist_mem.tracking.mlflow.store import check_tracking, choose_sending, store_uri, was_tracked
from dist_mem.tracking.provenance import without_credentials

Check = Callable[[], Iterable[Remark]]


class LocalResult(NamedTuple):
    """Result of the first round on one rank."""

    place: Place
    findings: list[Finding]
    fingerprints: dict[str, consistency.Fingerprint]  # to compare: of code, configuration, data; without failed ones
    probe: str | None  # name of the file that rank 0 wrote into the run directory; None: it could not write
    new_folders: list[Path]  # that rank 0 made for it, the innermost first


class RankMeasurements(NamedTuple):
    """Result of the second round on one rank, measured together with the others."""

    findings: list[Finding]
    wrong: list[int]


def examine(config: Config | None, world: World, *, is_thorough: bool) -> Generator[list[Finding], None, None]:
    """Run all checks in two rounds; collective, every rank calls it.

    Args:
        config: None: check only machines.
        is_thorough: also run checks that take seconds: speed of the network, git.

    Yields:
        The findings of a round, the same on every rank. If the first round fails, the caller may skip the second.
    """
    results: list[LocalResult] = gather_objects(_check_rank(config, world, is_thorough=is_thorough))
    places, probe = [one.place for one in results], results[0].probe
    run_dir = None if config is None or probe is None else Path(config.run_dir)
    try:
        yield [*(finding for one in results for finding in one.findings), *_compare(results)]
        measured: list[RankMeasurements] = gather_objects(_measure(run_dir, world, str(probe), is_thorough=is_thorough))
    finally:
        if run_dir is not None and world.rank == 0:
            with suppress(OSError):
                (run_dir / str(probe)).unlink()
        if is_thorough and world.rank == 0:  # a job goes on with them
            drop_empty(results[0].new_folders)
    yield list(_judge(places, measured))


def _run(place: Place | None, what: str, check: Check) -> list[Finding]:
    """Return the findings of a check; an exception becomes a finding, because the other ranks wait for this one."""
    try:
        remarks = list(check())
    except ValueError as error:
        remarks = [fail(what, str(error), "fix it: dist-mem train CONFIG --check")]
    except Exception as error:  # of the disk, a driver or a library
        text = f"cannot be checked: {type(error).__name__}: {error}"
        if isinstance(run_error(error), UnusableError):
            remarks = [fail(what, text, "correct the path, or mount its disk", blames_node=True)]
        else:
            remarks = [fail(MACHINE, f"{what} {text}", "repair this node", blames_node=True)]
    return [remark.at(place) for remark in remarks]


def _check_rank(config: Config | None, world: World, *, is_thorough: bool) -> LocalResult:
    """Run the first round: the checks of a rank alone."""
    place, node, is_first = Place(node_name(), world.rank), Place(node_name()), world.local_rank == 0
    fingerprints: dict[str, consistency.Fingerprint] = {}
    probe: str | None = None
    new_folders: list[Path] = []

    def collect(what: str, find: Callable[[], consistency.Fingerprint]) -> Check:
        return lambda: fingerprints.update({what: find()}) or ()

    checks: list[tuple[Place | None, str, Check]] = [(place, "limits", lambda: machine.check_limits(world.size))]
    checks.append((place, "GPU", lambda: gpus.check_gpu(world, tf32=config is not None and config.train.tf32)))
    if is_first:
        checks += [(node, "machine", lambda: machine.check_machine(world)), (node, "caches", disks.check_caches)]
    code = collect("code", lambda: consistency.fingerprint_code(with_commit=is_thorough))
    checks.append((node, "code", code))
    if config is not None and is_first:
        checks.append((node, "data", collect("data", lambda: consistency.fingerprint_data(config.data, config.eval))))

        def check_tars() -> Iterator[Remark]:
            yield from consistency.check_tars(config.data, config.eval, fingerprints.get("data", {}))

        checks.append((node, "data", check_tars))
        if is_thorough:  # otherwise the job reports it, with a better message
            checks.append((node, "data", lambda: consistency.check_data(config.data, config.eval)))
    if config is not None and world.rank == 0:
        probe = name = f".probe-{uuid.uuid4().hex}"
        new_folders = missing_folders(Path(config.run_dir))
        checks.append((node, "run directory", lambda: disks.write_probe(Path(config.run_dir), name)))

        def check_room() -> Iterator[Remark]:
            kept = disks.checkpoints_to_come(config.checkpoint, Path(config.run_dir))
            yield from disks.check_room(Path(config.run_dir), disks.checkpoint_size(config, world.size), kept=kept)

        checks.append((node, "disk room", check_room))
        checks.append(
            (None, "MLflow", lambda: _check_mlflow(config.tracking, Path(config.run_dir), is_thorough=is_thorough))
        )
    if config is not None:
        checks.append((place, "configuration", collect("configuration", lambda: consistency.fingerprint(config))))
    findings = [finding for where, what, check in checks for finding in _run(where, what, check)]
    if any(finding.what == "run directory" for finding in findings):
        probe = None
    return LocalResult(place, findings, fingerprints, probe, new_folders)


def _check_mlflow(tracking: TrackingConfig, run_dir: Path, *, is_thorough: bool) -> Iterator[Remark]:
    """Check that MLflow would accept this run's data; a run itself does not need the server."""
    if not tracking.mlflow:
        return
    try:
        silence = check_tracking(tracking, run_dir)
    except UnusableError as error:
        problem, _, fix = str(error).partition("; ")
        # A run that MLflow has accepted before continues, as when a token is revoked during a run: its data are kept.
        is_known = was_tracked(run_dir) and not isinstance(error, ForeignError)
        level = warning if is_known else fail
        yield level("MLflow", problem, fix or "tracking.send=never goes without it")
        return
    if silence and is_thorough:
        text = f"{without_credentials(store_uri(tracking))} does not answer: {silence}"
        fix = "look at tracking.uri, proxies, the firewall; a run keeps its metrics until it is back"
        yield warning("MLflow", text, fix)
    else:
        yield ok("MLflow", choose_sending(tracking).message.removeprefix("MLflow: "))


def _compare(results: Sequence[LocalResult]) -> Iterator[Finding]:
    for what in ("code", "configuration", "data"):
        found = {one.place: one.fingerprints[what] for one in results if what in one.fingerprints}
        if found:
            places = [Place(place.node) for place in found] if what == "data" else [*found]  # data: of whole nodes
            yield from consistency.compare(what, places, list(found.values()))


def _measure(run_dir: Path | None, world: World, probe: str, *, is_thorough: bool) -> RankMeasurements:
    """Run the second round: the checks that need other ranks, and `probe`, a file in the run directory."""
    node, is_first = Place(node_name()), world.local_rank == 0
    findings: list[Finding] = []
    if run_dir is not None and is_first:
        findings += _run(node, "run directory", lambda: disks.look_for_probe(run_dir, probe))
    if run_dir is not None and world.rank == 0:
        findings += _run(node, "run directory", lambda: disks.check_run_dir_type(run_dir))
    findings += [remark.at(None) for remark in network.check_connections(world)]
    wrong = network.wrong_sums(world)
    if is_thorough:
        findings += [remark.at(None) for remark in network.check_speed(world)]
    return RankMeasurements(findings, wrong)


def _judge(places: Sequence[Place], measured: Sequence[RankMeasurements]) -> Iterator[Finding]:
    for one in measured:
        yield from one.findings
    yield from network.check_sums(places, [one.wrong for one in measured])
