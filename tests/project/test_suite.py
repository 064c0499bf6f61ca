"""The suite: what `make test` contains, what marks and folders its files have, and that an expected error is one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from dist_mem.errors import CheckpointError, UnfitError, UnreadableError, UnusableError
from dist_mem.memory import memory_kinds
from tests.support.budget import BUDGETS, chosen, exists, function_of, read_durations, spread
from tests.support.forked_ranks import Ranks, run_forked
from tests.support.jobs import run_ranks, start_ranks
from tests.support.messages import refused
from tests.support.paths import PACKAGE, ROOT
from tests.support.ranks import RankPool
from tests.support.two_hosts import ranks_on, two_hosts

ZERO_STAGES = (0, 1, 2, 3)
SECONDS = 300.0  # of `make test`, without fixtures and what takes next to nothing: five minutes in all on two cores
# Mark -> the fixture and the helpers that need it.
NEEDS: dict[str, tuple[str | None, list[Callable[..., Any]]]] = {
    "ranks": ("rank_pool", [run_ranks, start_ranks, run_forked, ranks_on, Ranks, RankPool]),
    "slurm": ("slurm", []),
    "netns": (None, [two_hosts]),
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
    assert "\ntest: setup\n\t$(PYTEST) --run quick $(ARGS)\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    runs = chosen(every_test, BUDGETS["quick"], read_durations())
    return [item for item, is_run in zip(every_test, runs, strict=True) if is_run]


def params_of(item: pytest.Function) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def test_make_test_trains_every_memory_on_two_ranks_and_all_zero_stages(make_test: list[pytest.Function]) -> None:
    name = "test_two_ranks_of_every_stage_train_as_one"
    found = [(params_of(item)["case"], params_of(item)["stage"]) for item in make_test if item.originalname == name]
    assert {case for case, _ in found} >= set(memory_kinds())
    for kind in ("transformer_xl", "infini"):
        assert {stage for case, stage in found if case == kind} == set(ZERO_STAGES)


def test_make_test_has_what_users_trust_most(make_test: list[pytest.Function]) -> None:
    """A run beside plain torch, one that is killed and resumes, a move from two ranks to one, an evaluation on two."""
    assert {item.originalname for item in make_test} >= {
        "test_a_resumed_run_equals_plain_torch_in_every_step",
        "test_resume_after_kill_is_bitwise",
        "test_every_number_of_ranks_reads_every_other_exactly",
        "test_ranks_and_lanes_change_no_metric",
    }


def test_make_test_keeps_its_time(make_test: list[pytest.Function]) -> None:
    durations = read_durations()
    assert sum(durations.get(function_of(item.nodeid), 0.0) for item in make_test) < SECONDS


def test_durations_are_of_tests_that_exist() -> None:
    assert [name for name in read_durations() if not exists(name)] == []


def test_a_budget_takes_variants_of_all_values() -> None:
    for number in range(1, 60):
        for size in range(number + 1):
            places = spread(number, size)
            assert len(set(places)) == size and all(0 <= place < number for place in places)
    assert {place % 4 for place in spread(48, 12)} == set(ZERO_STAGES)
    assert {place // 4 for place in spread(48, 12)} == set(range(12))


def test_a_folder_of_tests_is_one_of_a_layer() -> None:
    layers = {path.stem for path in PACKAGE.iterdir()}
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert folders - layers == {"golden", "project", "support"}


def test_a_test_module_imports_no_other() -> None:
    of_another = re.compile(r"^\s*(?:from|import) tests\.(?!support\b)", re.MULTILINE)
    paths = (ROOT / "tests").rglob("*.py")
    assert [path.name for path in paths if of_another.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("expected", "raised"),
    [
        (ValueError, ValueError("train.steps is -1")),  # of another key
        (UnusableError, UnfitError("train.lr is -1")),  # of another type
        (CheckpointError, UnreadableError("train.lr is -1")),  # of another exit code
    ],
)
def test_an_error_of_another_type_code_or_key_is_not_the_expected_one(
    expected: type[Exception], raised: Exception
) -> None:
    with pytest.raises((AssertionError, UnfitError)), refused(expected, "train.lr"):
        raise raised


@pytest.mark.parametrize("mark", NEEDS)
def test_what_needs_ranks_slurm_or_namespaces_is_marked_so(every_test: list[pytest.Function], mark: str) -> None:
    fixture, helpers = NEEDS[mark]
    assert fixture is None or any(fixture in item.fixturenames for item in every_test)
    marked = {item for item in every_test if item.get_closest_marker(mark)}
    assert [item.nodeid for item in every_test if fixture in item.fixturenames and item not in marked] == []
    called = [re.compile(rf"\b{helper.__name__}\(") for helper in helpers]
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    users = {path for path, text in texts.items() if any(each.search(text) for each in called)}
    assert users <= {item.path for item in marked}
