"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_mem.config import environment_values
from dist_mem.data.shard import Index, read_index
from dist_mem.runtime.distributed import World
from dist_mem.runtime.network_interface import free_port
from dist_mem.tracking.mlflow.client import connect
from tests.support.clock import clock as clock
from tests.support.limits import limit
from tests.support.order import is_in_part, longest_first
from tests.support.paths import ROOT
from tests.support.ranks import RankPool, launcher_environment
from tests.support.scored_library import write_library
from tests.support.slurm_cluster import Cluster, running_cluster, why_not

torch.set_num_threads(1)  # tiny tensors: more threads only get in each other's way
MINUTES = {"slow", "slurm", "netns", "nightly"}  # marks of what `make test` leaves to `make test-all`
SLOW_SECONDS = 3.0  # on an idle core; a test that takes longer is marked `slow`


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Scale the time limit of the test with the machine, as all limits inside tests are."""
    mark, option = item.get_closest_marker("timeout"), item.config.getoption("timeout")
    seconds = mark.args[0] if mark else item.config.getini("timeout") if option is None else option
    item.add_marker(pytest.mark.timeout(limit(float(seconds))), append=False)
    return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-part", default="0/1", metavar="K/N", help="of what `make test` leaves out, take the K-th of N parts"
    )


@pytest.hookimpl(trylast=True)  # when other tests are deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take a part of the tests that are not quick; begin with the longest files where processes share the files."""
    part = config.getoption("slow_part")
    kept = list[pytest.Item]()
    left_out = list[pytest.Item]()
    for item in items:
        is_quick = not any(item.get_closest_marker(mark) for mark in MINUTES)
        (kept if is_quick or is_in_part(item.nodeid, part) else left_out).append(item)
    items[:] = kept
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workerinput"):  # of pytest-xdist
        items[:] = longest_first(items)


@pytest.fixture(autouse=True)
def restored_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no variable of a launcher, no working directory and no value to hide to the next test of this process."""
    environment, folder = dict(os.environ), Path.cwd()
    monkeypatch.setattr(environment_values, "_read", {})
    yield
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})
    os.chdir(folder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that lack the mark `slow`."""
    reports = [report for report in terminalreporter.getreports("passed") if report.when == "call"]
    slow = [
        report for report in reports if report.duration > limit(SLOW_SECONDS) and not MINUTES & set(report.keywords)
    ]
    if slow:
        terminalreporter.section(f"over {SLOW_SECONDS:g} s even on an idle core: mark them slow")
    for report in slow:
        terminalreporter.line(f"{report.duration:6.1f} s  {report.nodeid}")


def size_of(world: World) -> int:
    return world.size


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
