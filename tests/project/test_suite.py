"""The suite: how long `make test` takes, and what folders and imports its files have."""

import re

import pytest

from tests.support.budget import BUDGETS, chosen, exists, function_of, read_durations
from tests.support.paths import PACKAGE, ROOT

SECONDS = 300.0  # of `make test`, without fixtures and what takes next to nothing: five minutes in all on two cores


class Collection:
    """A pytest plugin that keeps the collected tests."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.items = session.items


def test_make_test_keeps_its_time() -> None:
    assert "\ntest: setup\n\t$(PYTEST) --run quick $(ARGS)\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    kept, durations = Collection(), read_durations()
    options = ["-o", "addopts=", "--collect-only", "-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:xdist"]
    code = pytest.main([*options, f"--rootdir={ROOT}", str(ROOT / "tests")], plugins=[kept])
    assert code == pytest.ExitCode.OK
    runs = zip(kept.items, chosen(kept.items, BUDGETS["quick"], durations), strict=True)
    assert sum(durations.get(function_of(item.nodeid), 0.0) for item, is_run in runs if is_run) < SECONDS


def test_durations_are_of_tests_that_exist() -> None:
    assert [name for name in read_durations() if not exists(name)] == []


def test_a_folder_of_tests_is_one_of_a_layer() -> None:
    layers = {path.stem for path in PACKAGE.iterdir()}
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert folders - layers == {"golden", "project", "support"}


def test_a_test_module_imports_no_other() -> None:
    of_another = re.compile(r"^\s*(?:from|import) tests\.(?!support\b)", re.MULTILINE)
    paths = (ROOT / "tests").rglob("*.py")
    assert [path.name for path in paths if of_another.search(path.read_text(encoding="utf-8"))] == []
