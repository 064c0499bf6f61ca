"""The journal on disk, and which points a resumed run sends again."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest

from dist_mem.tracking.mlflow.journal import (
    DAMAGED,
    Entry,
    Header,
    Journal,
    JournalError,
    JournalReader,
    find_entries,
    read_entries,
    write_journal,
)
from dist_mem.tracking.mlflow.journal_sink import Rollback
from dist_mem.tracking.tracker import Point

HEADER = Header("uid", "demo", {"name": "dist_mem"})


def begin(tmp_path: Path) -> Path:
    path = tmp_path / "mlflow" / "train.jsonl"
    write_journal(path, HEADER)
    return path


def test_entries_are_on_disk_when_append_returns_and_in_order(tmp_path: Path) -> None:
    path = begin(tmp_path)
    journal = Journal(path)
    for number in range(1200):
        journal.append("text", {"text": str(number)}, time=float(number))
    assert [entry.body["text"] for entry in read_entries(path)] == [str(number) for number in range(1200)]
    assert journal.header == HEADER
    journal.close()


def test_every_job_is_later_than_the_one_before_on_a_node_with_a_slow_clock_too(tmp_path: Path) -> None:
    """Otherwise points of the earlier job could not be distinguished from those that supersede them."""
    path = begin(tmp_path)
    for now in (1000.0, 400.0, 1001.5):
        journal = Journal(path)
        journal.append("status", {}, time=now)
        journal.close()
    assert [entry.time for entry in read_entries(path)] == [1_000_000, 1_000_001, 1_001_500]


def test_threads_do_not_tear_each_others_lines(tmp_path: Path) -> None:
    path = begin(tmp_path)
    journal = Journal(path)
    body = {"text": "x" * 10_000}
    threads = [
        threading.Thread(target=lambda: [journal.append("text", body, time=0.0) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal.close()
    assert [entry.body for entry in read_entries(path)] == [body] * 200


def test_readers_leave_a_torn_last_line_and_the_writer_cuts_it(tmp_path: Path) -> None:
    path = begin(tmp_path)
    write_journal(path, HEADER, [Entry("status", 7, {"status": "RUNNING"})])
    whole = path.read_bytes()
    for torn in (b'{"kind": "poi', b"\0" * 100):  # a kill; a crash of the node
        path.write_bytes(whole + torn)
        assert [entry.time for entry in read_entries(path)] == [7]
        assert path.read_bytes() == whole + torn  # it may be being written
        Journal(path).close()
        assert path.read_bytes() == whole


def test_a_damaged_line_is_an_entry_of_its_own_and_shifts_no_other(tmp_path: Path) -> None:
    path = begin(tmp_path)
    with path.open("ab") as file:
        file.write(b"\0\0\xff\n" + json.dumps(Entry("status", 7, {})._asdict()).encode() + b"\n")
    assert [entry.kind for entry in read_entries(path)] == [DAMAGED, "status"]


def test_a_reader_repeats_a_batch_until_it_is_done(tmp_path: Path) -> None:
    path = begin(tmp_path)
    entries = [Entry("status", number, {}) for number in range(5)]
    write_journal(path, HEADER, entries)
    reader = JournalReader(path)
    assert reader.batch(2) == reader.batch(2) == entries[:2]
    reader.done()
    assert (reader.batch(9), reader.num_done) == (entries[2:], 2)
    reader.done()
    assert (reader.batch(9), reader.num_done) == ([], 5)


def test_reader_starts_after_the_sent_entries_or_at_the_start_of_a_shorter_copy(tmp_path: Path) -> None:
    path = begin(tmp_path)
    entries = [Entry("status", number, {}) for number in range(5)]
    write_journal(path, HEADER, entries)
    for num_done, left in ((0, entries), (3, entries[3:]), (5, []), (6, entries)):
        assert JournalReader(path, num_done).batch(9) == left


def test_a_file_that_is_no_journal_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    for text, complaint in (
        ("", "no header of a journal"),
        ('{"kind": "point"}\n', "no header of a journal"),
        ('{"format_version": 99}\n', "format_version 99 is not 3"),
    ):
        path.write_text(text)
        with pytest.raises(JournalError, match=rf"train\.jsonl: .*{complaint}"):
            Journal(path)


def test_a_damaged_entry_is_not_found_as_one_of_its_kind(tmp_path: Path) -> None:
    path = begin(tmp_path)
    journal = Journal(path)
    journal.append("superseded", {"first": 1}, time=1.0)
    journal.close()
    with path.open("a") as file:
        file.write('{"kind": "superseded", "ti\n')
    assert [entry.body for entry in find_entries(path, "superseded")] == [{"first": 1}]


# Rollback


def point(step: int, **metrics: float) -> Point:
    return Point(step, 0.0, metrics)


def rollback(*points: Point, first_step: int = 5) -> Rollback:
    return Rollback(points, first_step=first_step, measurements={"seconds"})


def test_equal_points_repeat_whatever_was_measured() -> None:
    after = rollback(point(5, loss=9.0), point(6, loss=1.0, seconds=3.0), point(7, loss=math.nan, seconds=3.0))
    assert after.repeats(point(6, loss=1.0, seconds=8.0))
    assert after.repeats(point(7, loss=math.nan, seconds=8.0))
    assert not after.repeats(point(8, loss=1.0, seconds=8.0))
    assert not after.supersedes(point(8, loss=1.0))


def test_from_the_first_difference_on_all_points_are_new_and_the_old_ones_superseded() -> None:
    after = rollback(*(point(step, loss=float(step)) for step in range(1, 10)))
    assert after.repeats(point(6, loss=6.0))
    other = point(7, loss=6.9)
    assert not after.repeats(other)
    assert after.supersedes(other) == range(7, 10)
    equal_by_chance = point(8, loss=8.0)
    assert not after.repeats(equal_by_chance)
    assert not after.supersedes(equal_by_chance)


def test_the_last_of_several_values_of_a_step_counts() -> None:
    after = rollback(point(6, loss=1.0), point(6, loss=2.0))
    assert after.repeats(point(6, loss=2.0))
    assert not after.repeats(point(6, loss=1.0))


def test_an_evaluation_that_the_killed_job_did_not_reach_is_new_and_supersedes_nothing() -> None:
    after = rollback(point(6, loss=1.0))
    evaluation = Point(6, 0.0, {"validation/nll": 3.0})
    assert not after.repeats(evaluation)
    assert not after.supersedes(evaluation)
    assert after.repeats(point(6, loss=1.0))


def test_points_at_steps_that_were_not_logged_before_are_never_among_the_superseded() -> None:
    """Of a repeated point MLflow has the earlier one; superseded before it was sent, it would be lost."""
    after = rollback(point(6, loss=1.0), Point(6, 0.0, {"validation/nll": 3.0}), point(7, loss=2.0))
    assert after.repeats(point(6, loss=1.0))
    evaluation = Point(6, 0.0, {"validation/nll": 4.0})
    assert not after.repeats(evaluation)
    assert after.supersedes(evaluation) == range(7, 8)
