"""Selections of tests: what `make test` contains, and that files carry the marks of what they need."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dist_mem.contract.check_memory import RULES
from dist_mem.memory import memory_kinds
from tests.support.contract_cases import CASES
from tests.support.order import LONGEST, is_in_part
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow  # the collection takes 10 seconds

ZERO_STAGES = (0, 1, 2, 3)
KILL_AND_RESUME = "tests/training/test_resume.py::test_resume_after_kill_is_bitwise"
# What a file or a test uses if it needs the mark.
NEEDS = {
    "ranks": re.compile(r"\brank_pool\b|\b(?:run_ranks|start_ranks|run_forked|ranks_on|Ranks|RankPool)\("),
    "slurm": re.compile(r"\bslurm: Cluster\b"),
    "netns": re.compile(r"\btwo_hosts\("),
}
# The helper that each expression stands for; if it is renamed, the expression must be changed too.
HELPERS = {
    "conftest.py": ["def rank_pool(", "def slurm("],
    "support/jobs.py": ["def run_ranks(", "def start_ranks("],
    "support/forked_ranks.py": ["def run_forked(", "class Ranks:"],
    "support/two_hosts.py": ["def two_hosts(", "def ranks_on("],
    "support/slurm_cluster.py": ["class Cluster:"],
}


class Collection:
    """A pytest plugin that keeps the collected tests."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = [item for item in session.items if isinstance(item, pytest.Function)]


@pytest.fixture(scope="module")
def every_test() -> list[pytest.Function]:
    """All tests, nightly ones too."""
    kept = Collection()
    options = ["-o", "addopts=", "--collect-only", *(["-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:xdist"])]
    code = pytest.main([*options, f"--rootdir={ROOT}", str(ROOT / "tests")], plugins=[kept])
    assert code == pytest.ExitCode.OK
    return kept.items


@pytest.fixture(scope="module")
def make_test(every_test: list[pytest.Function]) -> list[pytest.Function]:
    """The tests of `make test`, by the Makefile's expression."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (expression,) = re.findall(r"^QUICK := (.*)$", makefile, re.MULTILINE)
    left_out = [part.removeprefix("not ") for part in expression.split(" and ")]
    assert expression == " and ".join(f"not {mark}" for mark in left_out) and '-m "$(QUICK)"' in makefile
    return [item for item in every_test if not any(item.get_closest_marker(mark) for mark in left_out)]


def params_of(item: pytest.Function) -> dict[str, Any]:
    """Return the parameters of a test."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def test_make_test_trains_every_memory_at_every_zero_stage_on_two_ranks(make_test: list[pytest.Function]) -> None:
    params = [params_of(item) for item in make_test if "rank_pool" in item.fixturenames]
    found = {(param["case"], param["stage"]) for param in params if {"case", "stage"} <= param.keys()}
    assert found >= set(product(memory_kinds(), ZERO_STAGES))


def test_make_test_resumes_every_memory(make_test: list[pytest.Function]) -> None:
    """In the same bits, each at a stage or more; all stages are met."""
    name = "test_every_memory_comes_back_bitwise"
    found = [params_of(item) for item in make_test if item.originalname == name]
    assert {param["memory"] for param in found} >= set(memory_kinds())
    assert {param["stage"] for param in found} == set(ZERO_STAGES)


def test_make_test_kills_ranks_and_resumes_at_every_zero_stage(make_test: list[pytest.Function]) -> None:
    found = {params_of(item)["stage"] for item in make_test if item.nodeid.startswith(f"{KILL_AND_RESUME}[")}
    assert found == set(ZERO_STAGES)
    text = (ROOT / KILL_AND_RESUME.partition("::")[0]).read_text(encoding="utf-8")
    assert "send_signal(signal.SIGKILL)" in text


def test_make_test_is_the_larger_part_of_all_tests(
    every_test: list[pytest.Function], make_test: list[pytest.Function]
) -> None:
    not_nightly = [item for item in every_test if not item.get_closest_marker("nightly")]
    assert len(not_nightly) / 2 < len(make_test) < len(not_nightly)


def test_every_variant_of_a_memory_trains_on_two_ranks_before_the_night(every_test: list[pytest.Function]) -> None:
    """Each at a stage or more, and under a third of the contract's rules; every memory of the package under all."""
    by_day = [item for item in every_test if not item.get_closest_marker("nightly")]
    trained = {
        (params_of(item)["case"], params_of(item)["stage"])
        for item in by_day
        if item.originalname == "test_two_ranks_of_every_stage_train_as_one"
    }
    assert {case for case, _ in trained} == set(CASES)
    ruled = [params_of(item) for item in by_day if item.originalname == "test_memory_keeps_the_contract"]
    found = {(param["case"], param["rule"]) for param in ruled}
    assert found >= set(product(memory_kinds(), RULES))
    assert all(sum((case, rule) in found for rule in RULES) >= len(RULES) // 3 for case in CASES)


def test_every_test_is_in_one_part(every_test: list[pytest.Function]) -> None:
    for item in every_test[:100]:
        assert sum(is_in_part(item.nodeid, part) for part in ("0/3", "1/3", "2/3")) == 1
        assert is_in_part(item.nodeid, "0/1")
    for wrong in ("1", "3/3", "-1/3", "a/b"):
        with pytest.raises(pytest.UsageError, match="must be K/N with K below N"):
            is_in_part("test", wrong)


def test_the_longest_files_exist() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


@pytest.mark.parametrize("mark", NEEDS)
def test_what_needs_ranks_slurm_or_namespaces_is_marked_so(every_test: list[pytest.Function], mark: str) -> None:
    marked = {item for item in every_test if item.get_closest_marker(mark)}
    fixture = {"ranks": "rank_pool", "slurm": "slurm"}.get(mark)
    assert [item.nodeid for item in every_test if fixture in item.fixturenames and item not in marked] == []
    users = {path for path in (ROOT / "tests").rglob("test_*.py") if NEEDS[mark].search(path.read_text())}
    assert users - {item.path for item in marked} - {Path(__file__)} == set()


@pytest.mark.parametrize("file", HELPERS)
def test_the_helpers_that_need_a_mark_have_these_names(file: str) -> None:
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert [line for line in HELPERS[file] if line not in text] == []
