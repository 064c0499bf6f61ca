"""Fixtures shared by all tests."""

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_mem.config import environment_values
from dist_mem.data.shard import Index, read_index
from dist_mem.runtime import signals
from dist_mem.runtime.distributed import World
from dist_mem.runtime.network_interface import free_port
from dist_mem.tracking.mlflow.client import connect
from tests.support.budget import BUDGETS, chosen, function_of, longest_first, read_durations, write_durations
from tests.support.clock import clock as clock
from tests.support.limits import limit
from tests.support.paths import ROOT
from tests.support.ranks import RankPool, launcher_environment
from tests.support.scored_library import write_library
from tests.support.slurm_cluster import Cluster, running_cluster, why_not

# Tiny tensors: more threads only get in each other's way, here and in the processes that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
NEW_SECONDS = 1.0  # a test function without a line in durations.json that takes longer gets one by `make durations`
# Names of tests/support/ by which a file starts several ranks.
STARTS_RANKS = {"Program", "RankPool", "Ranks", "run_forked", "run_ranks", "start_ranks"}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Scale the time limit of the test with the machine, as all limits inside tests are."""
    mark, option = item.get_closest_marker("timeout"), item.config.getoption("timeout")
    seconds = mark.args[0] if mark else item.config.getini("timeout") if option is None else option
    item.add_marker(pytest.mark.timeout(limit(float(seconds))), append=False)
    return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dist_mem")
    group.addoption("--run", choices=[*BUDGETS, "night"], help="quick | all | night: what is not in all")
    group.addoption("--store-durations", action="store_true", help="write tests/durations.json from this run")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of files that start several ranks."""
    if isinstance(item, pytest.Function) and (
        "rank_pool" in item.fixturenames or STARTS_RANKS & vars(item.module).keys()
    ):
        item.add_marker("ranks")


@pytest.hookimpl(trylast=True)  # when other tests are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take as much of every test function as the budget has room for, and begin with the longest files."""
    choice, durations = config.getoption("run"), read_durations()
    if choice in BUDGETS:
        keep(config, items, chosen(items, BUDGETS[choice], durations))
    elif choice == "night":
        keep(config, items, [not is_run for is_run in chosen(items, BUDGETS["all"], durations)])
    if hasattr(config, "workerinput"):  # of pytest-xdist
        items[:] = longest_first(items, durations)


@pytest.fixture(autouse=True)
def restored_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no variable of a launcher, no working directory and no value to hide to the next test of this process."""
    environment, folder = dict(os.environ), Path.cwd()
    monkeypatch.setattr(environment_values, "_read", {})
    monkeypatch.setattr(signals, "_ACTIVE", [])
    yield
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
    os.chdir(folder)


def keep(config: pytest.Config, items: list[pytest.Item], runs: list[bool]) -> None:
    """Deselect the other tests."""
    config.hook.pytest_deselected(items=[item for item, is_run in zip(items, runs, strict=True) if not is_run])
    items[:] = [item for item, is_run in zip(items, runs, strict=True) if is_run]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Store the durations of all tests, or name those that must be measured for the budgets to be kept."""
    reports = [report for each in ("passed", "failed") for report in terminalreporter.getreports(each)]
    if config.getoption("store_durations"):
        write_durations((report.nodeid, report.duration) for report in reports)
        return
    known = read_durations()
    new = {function_of(report.nodeid) for report in reports if report.duration > limit(NEW_SECONDS)} - known.keys()
    if new:
        terminalreporter.section("not in tests/durations.json: measure them with `make durations`")
    for name in sorted(new):
        terminalreporter.line(name)


def size_of(world: World) -> int:
    return world.size


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that the test starts interpret Triton's kernels, on CPU tensors."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """`rank_pool(2)` gives two ranks that live until the end of the session.

    They start with the first test that needs any ranks, so that their start is no part of a test's time.
    """
    pools = {2: RankPool(2)}
    pools[2].run(size_of)

    def get(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real books (`data/pg19`, ...); tests that need it skip where it is absent."""
    folder = Path(os.environ.get("DIST_MEM_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(f"no real books at {folder / 'data'}; set DIST_MEM_SHARED to a folder that has data/pg19")
    return folder


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine small documents, see scored_library.py."""
    return write_library(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory of small books, see jobs.py."""
    from tests.support.jobs import build_books  # which takes seconds to import

    return build_books(tmp_path_factory.mktemp("books"))


@pytest.fixture
def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launcher tells the only rank of a job, so that a command can be called in this process."""
    for name, value in launcher_environment(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of models that transformers opens are copied into the test's folder, and not into the user's."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.fixture
def index(library: Path) -> Index:
    """Of the library's only split."""
    return read_index(library / "test")


@pytest.fixture(scope="session")
def sqlite_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One store for all tests: making its tables takes seconds. Its experiment keeps artifacts beside it."""
    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder}/mlflow.db"
    client = connect(uri)
    client.create_experiment("dist_mem", artifact_location=(folder / "artifacts").as_uri())
    return uri


@pytest.fixture
def client(sqlite_uri: str) -> Any:
    """An MlflowClient of that store."""
    return connect(sqlite_uri)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A real Slurm of two nodes."""
    if reason := why_not():
        pytest.skip(reason)
    with running_cluster() as cluster:
        yield cluster
