"""The log on disk, which of its points count, and which ones a resumed run makes again."""

import copy
import functools
import json
import math
import operator
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dist_mem.config import load_config
from dist_mem.config.resume_rules import changed_keys
from dist_mem.errors import UnusableError
from dist_mem.tracking import log
from dist_mem.tracking.log import (
    BODIES,
    DAMAGED,
    METRICS_FILE,
    Entry,
    Header,
    Log,
    LogError,
    LogReader,
    Point,
    check_log,
    counted_steps,
    find_entries,
    is_superseded,
    last_point,
    read_entries,
    read_points,
    write_log,
)
from dist_mem.tracking.start import parameters_entry
from dist_mem.tracking.tracker import LogSink, Rollback, Tracker
from tests.support.configs import config_from
from tests.support.messages import refused
from tests.support.tracked import job, start, steps

HEADER = Header("uid", "demo", {"name": "dist_mem"})
DATA = "a key that is data"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log without entries."""
    write_log(tmp_path / METRICS_FILE, HEADER)
    return tmp_path / METRICS_FILE


def test_every_job_is_later_than_the_one_before_on_a_node_with_a_slow_clock_too(path: Path) -> None:
    """Otherwise points of the earlier job could not be distinguished from those that supersede them."""
    for now in (1000.0, 400.0, 1001.5):
        with closing(Log(path)) as log:
            log.append("status", {"status": "RUNNING"}, at=now)
    assert [entry.time for entry in read_entries(path)] == [1_000_000, 1_000_001, 1_001_500]


def test_threads_do_not_tear_each_others_lines(path: Path) -> None:
    bodies = [{"text": f"{number:4}" * 1_000, "name": "a"} for number in range(600)]  # more than a reader takes at once
    with closing(Log(path)) as log, ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda body: log.append("text", body, at=0.0), bodies))
    assert sorted((entry.body for entry in read_entries(path)), key=lambda body: body["text"]) == bodies


def test_a_status_that_mlflow_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="DONE"):
        Tracker().close("DONE")


def test_readers_leave_a_torn_last_line_and_the_writer_cuts_it(path: Path) -> None:
    write_log(path, HEADER, [Entry("status", 7, {"status": "RUNNING"})])
    whole = path.read_bytes()
    for torn in (b'{"kind": "poi', b"\0" * 100):  # a kill; a crash of the node
        path.write_bytes(whole + torn)
        assert [entry.time for entry in read_entries(path)] == [7]
        assert path.read_bytes() == whole + torn  # it may be being written
        Log(path).close()
        assert path.read_bytes() == whole


def test_a_damaged_line_is_an_entry_of_its_own_and_shifts_no_other(path: Path) -> None:
    entries = [Entry("status", 7, {"status": "KILLED"}), Entry("branch", 8, {"first": 1, "last": 2, "before": 3})]
    lines = [json.dumps(entry._asdict()).encode() for entry in entries]
    path.write_bytes(
        path.read_bytes() + b"\n".join([b"\0\0\xff", *lines, b'{"kind": "branch", "ti', b"[" * 10**5, b""])
    )
    assert [entry.kind for entry in read_entries(path)] == [DAMAGED, "status", "branch", DAMAGED, DAMAGED]
    assert list(find_entries(path, "branch")) == entries[1:]


def test_a_reader_repeats_a_batch_until_it_is_done(path: Path) -> None:
    """It starts after the sent entries, or at the start of a shorter copy."""
    entries = [Entry("status", number, {"status": "RUNNING"}) for number in range(5)]
    write_log(path, HEADER, entries)
    reader = LogReader(path)
    assert reader.batch(2) == reader.batch(2) == entries[:2]
    reader.pass_batch()
    assert (reader.batch(9), reader.num_done) == (entries[2:], 2)
    reader.pass_batch()
    assert (reader.batch(9), reader.num_done) == ([], 5)
    for num_done, left in ((0, entries), (3, entries[3:]), (5, []), (6, entries)):
        assert LogReader(path, num_done).batch(9) == left


def test_a_file_that_is_no_log_is_named(path: Path) -> None:
    for text, named in (
        ("", "not JSON"),
        ('{"step": 1, "time": 5.0, "metrics": {}}\n', "format_version"),
        ('{"format_version": 4, "uid": 7}\n', "run_name"),
        ('{"format_version": 3}\n', "format_version"),
    ):
        path.write_text(text)
        for read in (Log, read_points, partial(last_point, metric="loss")):
            with refused(LogError, path, named):
                read(path)


# Points


def test_a_point_is_one_line_that_is_there_when_it_is_logged(path: Path) -> None:
    sink = LogSink(Log(path), first_step=0, report=print)
    sink.log(Point(1, 5.0, {"loss": 2.0}))
    sink.log(Point(2, 6.0, {"loss": math.inf, "lr": 0.1}))
    lines = path.read_text().splitlines()  # before `close`: a killed job keeps its lines
    assert [json.loads(line)["body"] for line in lines if line.startswith('{"kind": "point"')] == [
        {"step": 1, "metrics": {"loss": 2.0}},
        {"step": 2, "metrics": {"loss": "Infinity", "lr": 0.1}},  # as JSON has no infinity
    ]
    assert read_points(path)[1].metrics == {"loss": math.inf, "lr": 0.1}
    sink.close("FINISHED")


def log_from(path: Path, first_step: int, losses: dict[int, float], **options: Any) -> LogSink:
    """Run a job that continues from a step and is killed."""
    with closing(Log(path)) as log:
        sink = LogSink(log, first_step=first_step, report=print, measurements={"seconds"}, **options)
        for step, loss in losses.items():
            sink.log(Point(step, 1e9, {"loss": loss, "seconds": time.perf_counter()}))
        return sink


def counted(path: Path) -> list[tuple[int, float]]:
    points = [(point.step, point.metrics["loss"]) for point in read_points(path)]
    assert counted_steps(path) == [step for step, _ in points]
    last = last_point(path, "loss")
    assert (None if last is None else (last.step, last.metrics["loss"])) == (points[-1] if points else None)
    return points


def test_points_past_the_restored_step_count_no_more_and_every_step_counts_once(path: Path) -> None:
    log_from(path, 0, {step: float(step) for step in range(1, 10)})
    log_from(path, 5, {})
    assert counted(path) == [(step, float(step)) for step in range(1, 6)]
    log_from(path, 5, {6: 6.0, 7: 7.0})  # the same again, and killed again
    log_from(path, 6, {7: 7.5, 8: 8.0})
    assert counted(path) == [*((step, float(step)) for step in range(1, 7)), (7, 7.5), (8, 8.0)]
    with closing(Log(path)) as log:
        sink = LogSink(log, first_step=8, report=print)
        sink.rewind(2)
        assert counted(path) == [(1, 1.0), (2, 2.0)]
        sink.rewind(0)
        assert counted(path) == []


def test_what_a_job_makes_again_is_marked_as_repeated_and_what_differs_as_a_branch(path: Path) -> None:
    log_from(path, 0, {step: float(step) for step in range(1, 10)})
    log_from(path, 5, {6: 6.0, 7: 7.5, 8: 8.0, 10: 10.0})
    made = [(entry.kind, entry.body.get("step")) for entry in read_entries(path) if entry.kind != "status"][9:]
    assert made == [("rewind", 5), ("repeat", 6), ("branch", None), ("point", 7), ("point", 8), ("point", 10)]
    (branch,) = find_entries(path, "branch")
    assert (branch.body["first"], branch.body["last"]) == (7, 9)
    superseded = [entry.body["step"] for entry in read_entries(path) if is_superseded(entry, [branch])]
    assert superseded == [7, 8, 9]


def test_what_was_logged_of_the_restored_step_itself_after_its_checkpoint_is_made_again_and_counts_once(
    path: Path,
) -> None:
    """The evaluation that a branch owes at its first step, and the number of rollbacks."""
    log_from(path, 0, {4: 4.0, 5: 5.0})  # saved after two points
    for life, again in enumerate((5.5, 5.5, 5.5, 5.6)):
        with closing(Log(path)) as log:
            sink = LogSink(log, first_step=5, report=print, num_points=2)
            assert counted(path) == [(4, 4.0), (5, 5.0)], f"life {life}"
            sink.log(Point(5, 1e9, {"loss/owed": again}))
            sink.rewind(5)
            sink.log(Point(6, 1e9, {"loss": 6.0}))
        assert [point.step for point in read_points(path)] == [4, 5, 5, 6]
        assert last_point(path, "loss/owed") == read_points(path)[-2]
    made = [(entry.kind, entry.body["step"]) for entry in find_entries(path, "point", "repeat")]
    assert made == [("point", step) for step in (4, 5, 5, 6)] + [("repeat", 5), ("repeat", 6)] * 2 + [
        ("point", 5),
        ("point", 6),
    ]


def test_a_branch_supersedes_its_first_step_if_none_of_its_points_counts(path: Path) -> None:
    for again in (5.0, 5.0, 5.5):
        log_from(path, 5, {5: again, 6: 6.0}, num_points=0)
        assert counted(path) == [(5, again), (6, 6.0)]
    (branch,) = find_entries(path, "branch")
    kept = [
        entry.body["metrics"]["loss"] for entry in find_entries(path, "point") if not is_superseded(entry, [branch])
    ]
    assert kept == [5.5, 6.0]


def test_a_checkpoint_has_the_points_of_its_step_that_count_after_a_resume_and_a_rollback_too(path: Path) -> None:
    """Of repeated points, those that MLflow has; a save in flight is logged after the rollback to it."""
    first = log_from(path, 0, {4: 4.0, 5: 5.0})
    log_from(path, 4, {5: 5.0}, num_points=1)
    with closing(Log(path)) as log:
        sink = LogSink(log, first_step=5, report=print, num_points=2)
        sink.log(Point(5, 1e9, {"loss/owed": 5.5}))
        sink.record("checkpoint", {"step": 5})
        sink.log(Point(6, 1e9, {"loss": 6.0}))
        sink.rewind(5)
        sink.record("checkpoint", {"step": 5})
    assert first.num_points == 2
    *_, original, owed, _ = find_entries(path, "point")
    for entry in find_entries(path, "checkpoint"):
        assert entry.body["points"] == [tuple(original), tuple(owed)]


def test_points_that_a_checkpoint_counts_and_the_log_has_not_are_lost_and_reported(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_from(path, 0, {1: 1.0, 2: 2.0, 3: 3.0})
    sink = log_from(path, 2, {3: 3.0}, num_points=4)
    assert (sink.num_lost, sink.num_points) == (2, 5)
    assert "has 2 of the 4 points that were logged up to step 2; the others are lost" in capsys.readouterr().out


def test_a_damaged_line_is_named_until_it_is_emptied(path: Path) -> None:
    log_from(path, 0, {1: 1.0})
    whole = path.read_text()
    for damage in ("{}\n", "\0\0\n", '{"kind": "point", "ti\n', '{"kind": "point", "time": 1, "body": {}}\n'):
        path.write_text(whole + damage)
        for read, place in (
            (read_points, "line 4"),
            (check_log, "line 4"),
            (partial(last_point, metric="loss"), "line 1 from its end"),
        ):
            with refused(UnusableError, path, place):
                read(path)
    path.write_text(whole + "\n")
    check_log(path)
    assert counted(path) == [(1, 1.0)]


# Entries of every kind

POINT = {"step": 1, "metrics": {DATA: 1.0}}
EXAMPLES: dict[str, dict[str, Any]] = {
    "point": POINT,
    "repeat": POINT,
    "system": POINT,
    "rewind": {"step": 1, "surplus": 1},
    "branch": {"first": 1, "last": 2, "before": 3},
    "params": {"params": {DATA: "1"}, "changes": "", "step": 0, "config": {DATA: "1"}},
    "tags": {DATA: "\udcff"},
    "datasets": {"datasets": [{"name": "a", "digest": "b", "source": "c", "context": "d", "profile": {}}]},
    "checkpoint": {"step": 1, "points": [["point", 5, POINT]], "path": "a"},
    "status": {"status": "RUNNING"},
    "artifact": {"path": "a"},
    "text": {"text": "a", "name": "b"},
}
OPTIONAL = [("params", "body", "config"), ("checkpoint", "body", "path"), ("rewind", "body", "surplus")]
Place = tuple[str | int, ...]


def places_in(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the way to every value inside a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    for key, child in pairs:
        yield (*place, key)
        yield from places_in(child, (*place, key))


def damages(kind: str) -> Iterator[tuple[str, Any]]:
    """Yield an entry for every value in it that is missing or of another type, and say which one."""
    for place in places_in(whole := {"kind": kind, "time": 1, "body": EXAMPLES[kind]}):
        *parents, last = place
        other: Any
        for other in (None, [[]], {"a": {}}, -1.5, "\0", ...):
            damaged = copy.deepcopy(whole)
            inner: Any = functools.reduce(operator.getitem, parents, damaged)  # type: ignore[arg-type]
            if other is not ... and type(other) is not type(inner[last]):
                inner[last] = other
                yield f"{place} is {other!r}", damaged
            elif other is ... and isinstance(inner, dict) and last != DATA and (kind, *place) not in OPTIONAL:
                del inner[last]
                yield f"{place} is missing", damaged


def test_a_start_and_a_rollback_decode_no_points_before_their_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a long run take a minute and gigabytes of memory, and hundreds of GPUs wait for rank 0."""
    config = config_from({"name": "demo", "tracking": {"mlflow": False, "tensorboard": True}})
    job(config, tmp_path, steps(1, 20))
    decoded: list[bytes] = []

    def note(decode: Callable[..., Any], line: bytes, *more: Any, **named: Any) -> Any:
        decoded.append(line)
        return decode(line, *more, **named)

    for name in ("read_json_line", "_decode"):
        monkeypatch.setattr(log, name, partial(note, getattr(log, name)))
    tracker = start(config, tmp_path, first_step=15)
    tracker.rewind(14)
    tracker.close("FINISHED")
    found = {json.loads(line)["body"]["step"] for line in decoded if b'"point"' in line}
    assert found == {*range(14, 21)}


def test_every_kind_of_entry_is_written_and_read(path: Path) -> None:
    assert EXAMPLES.keys() == BODIES.keys()
    entries = [Entry(kind, 1, body) for kind, body in EXAMPLES.items()]
    write_log(path, HEADER, entries)
    check_log(path)
    assert [entry.kind for entry in read_entries(path)] == [*BODIES]


@pytest.mark.parametrize("kind", BODIES)
def test_an_entry_without_a_key_or_with_one_of_another_type_is_damaged(path: Path, kind: str) -> None:
    """A reader that meets it reads none of its keys."""
    header = path.read_bytes()
    for what, entry in damages(kind):
        path.write_bytes(header + json.dumps(entry).encode() + b"\n")
        with pytest.raises(LogError, match="line 2"):
            check_log(path)
            pytest.fail(what)
        assert [found.kind for found in read_entries(path)] == [DAMAGED]


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.groups=[{param_regex: bias, lr: 1e-5}]"],
        ["optimizer.betas=[0.5, 0.9]"],
        ["data.mixture=[{path: a}, {path: b}]"],
        ["train.profile=[1, 2]"],
        ["model.adaptive={cutoffs: [8, 16]}"],
        ["deepspeed.zero_optimization.overlap_comm=true"],
        ["train.max_grad_norm=null"],
    ],
)
def test_what_a_start_changes_are_the_keys_that_a_resume_compares(path: Path, overrides: list[str]) -> None:
    """Also there and back, where the second start is from the step of the first."""
    old, new = (load_config(["train.steps=10", *given]) for given in ([], overrides))
    there, back = (
        [change.key.replace("[", ".").replace("]", "") for change in changed_keys(*pair)]
        for pair in ((old, new), (new, old))
    )
    with closing(Log(path)) as log:
        for config, step, keys in ((old, 0, []), (new, 5, there), (old, 5, [*there, *back]), (old, 6, [])):
            log.record("params", body := parameters_entry(config.document, path, step=step))
            assert [change.partition(": ")[0] for change in body["changes"].split("; ") if change] == keys


def test_the_last_point_is_found_before_long_entries(tmp_path: Path, path: Path) -> None:
    log_from(path, 0, {1: 1.0})
    with closing(Log(path)) as log:
        log.record("text", {"name": "git.diff", "text": "x" * 1_000_000})
    with path.open("a") as file:
        file.write('{"kind": "poi')
    assert counted(path) == [(1, 1.0)]
    assert last_point(tmp_path / "absent.jsonl", "loss") is None


# Rollback


def point(step: int, **metrics: float) -> Point:
    return Point(step, 0.0, metrics)


EVALUATION, OTHER = (Point(6, 0.0, {"validation/nll": nll}) for nll in (3.0, 4.0))
REPEATED = "repeated"  # MLflow has it; otherwise it is new, and supersedes these steps of before, if any
ROLLBACKS: dict[str, tuple[list[Point], list[tuple[Point, str | tuple[int, int] | None]]]] = {
    "equal points repeat whatever was measured": (
        [point(5, loss=9.0), point(6, loss=1.0, seconds=3.0), point(7, loss=math.nan, seconds=3.0)],
        [
            (point(6, loss=1.0, seconds=8.0), REPEATED),
            (point(7, loss=math.nan, seconds=8.0), REPEATED),
            (point(8, loss=1.0, seconds=8.0), None),
        ],
    ),
    "from the first difference on all points are new, equal by chance or not": (
        [point(step, loss=float(step)) for step in range(1, 10)],
        [(point(6, loss=6.0), REPEATED), (point(7, loss=6.9), (7, 9)), (point(8, loss=8.0), None)],
    ),
    "the last of several values of a step counts": (
        [point(6, loss=1.0), point(6, loss=2.0)],
        [(point(6, loss=2.0), REPEATED), (point(6, loss=1.0), None)],
    ),
    "an evaluation that the killed job did not reach supersedes nothing": (
        [point(6, loss=1.0)],
        [(EVALUATION, None), (point(6, loss=1.0), REPEATED)],
    ),
    # Of a repeated point MLflow has the earlier one; superseded before it was sent, it would be lost.
    "a step of which a point was repeated is not superseded": (
        [point(6, loss=1.0), EVALUATION, point(7, loss=2.0)],
        [(point(6, loss=1.0), REPEATED), (OTHER, (7, 7))],
    ),
}


@pytest.mark.parametrize("case", ROLLBACKS)
def test_points_made_again_are_repeated_or_new_and_supersede_others(case: str) -> None:
    before, made = ROLLBACKS[case]
    after = Rollback(before, first_step=5, measurements={"seconds"})
    for again, expected in made:
        is_repeated = after.repeats(again)
        assert (REPEATED if is_repeated else after.leaves(again)) == expected
