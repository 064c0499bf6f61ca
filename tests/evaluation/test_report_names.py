"""What writes the names of result files reads them."""

from itertools import product
from pathlib import Path

import pytest

from dist_mem.evaluation.report_names import FOLDER, ReportName, counterpart, list_reports

SPLITS = ("test", "validation", "test-2", "test.a_b")
TAGS = ("", "without-memory", "mqar_b54a2c", "mqar_b54a2c-T64-M640-clamp400-same_length_true-stream10-first2000-bf16")


@pytest.mark.parametrize("command", ["", "dialogue", "inspect"])
def test_the_names_that_are_written_are_read_in_order_of_split_and_step(command: str, tmp_path: Path) -> None:
    names = [ReportName(*each, command) for each in product(sorted(SPLITS), (3, 10**8 - 1, 10**8), TAGS)]
    others = [name._replace(command=other) for name in names for other in {"", "dialogue", "inspect"} - {command}]
    (tmp_path / FOLDER).mkdir()
    for stem in (*reversed(names), *others, "figures-test-mem_len", "test-step-3 (copy)"):
        (tmp_path / FOLDER / f"{stem}.json").touch()
    found = list_reports(tmp_path, command)
    assert list(found.values()) == sorted(names) and [path.stem for path in found] == list(map(str, found.values()))
    assert all(counterpart(counterpart(path)) == path for path in found)
