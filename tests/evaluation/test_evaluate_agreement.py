"""A report says the same however many ranks and lanes made it: of trained checkpoints, every memory, every figure."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from dist_mem.data.shard import read_index
from dist_mem.evaluation.evaluate import evaluate_checkpoint
from dist_mem.evaluation.scores import Report, read_report
from dist_mem.evaluation.trained_model import find_checkpoint, read_settings
from dist_mem.memory import memory_kinds
from dist_mem.runtime.distributed import World
from tests.support.jobs import run_ranks, train_here, write_config
from tests.support.ranks import RankPool
from tests.support.scored_library import ALONE, LENGTHS, assert_same

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def trained_runs(
    books: Path, rank_pool: Callable[[int], RankPool], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Returns the run of a memory: of two ranks with ZeRO-2, its memory at work."""

    @cache
    def run(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        config = write_config(folder / "run.yaml", books, folder / "run")
        rank_pool(2).run(train_here, config, [f"memory.kind={kind}", "optimizer.lr=0.02", "train.steps=40"])
        return folder / "run"

    return run


@pytest.fixture(params=memory_kinds())
def trained_run(request: pytest.FixtureRequest, trained_runs: Callable[[str], Path]) -> Path:
    return trained_runs(request.param)


def evaluate_here(world: World, run_dir: Path, data: Path, num_lanes: int, without_memory: bool = False) -> Report:
    """What `dist-mem evaluate` does, in ranks that are already there."""
    checkpoint = find_checkpoint(run_dir)
    config = read_settings(checkpoint.directory, [f"data.path={data}", f"eval.batch_size={num_lanes}"])
    return evaluate_checkpoint(checkpoint, config, split="test", world=world, without_memory=without_memory)


SIZES = (1, 2, 4)
LANES = (1, 5, 16)  # the last: more lanes than documents, and a rank without any
# A Latin square: every pair of a memory, a number of ranks and a number of lanes is met, not every triple.
PAIRS = [
    pytest.param(
        kind,
        size,
        LANES[(number + index) % len(LANES)],
        marks=pytest.mark.core if (kind, size) == ("transformer_xl", 2) else (),
    )
    for number, kind in enumerate(memory_kinds())
    for index, size in enumerate(SIZES)
]


@pytest.mark.parametrize(("trained_run", "size", "num_lanes"), PAIRS, indirect=["trained_run"])
def test_ranks_and_lanes_change_no_metric(
    trained_run: Path, library: Path, rank_pool: Callable[[int], RankPool], size: int, num_lanes: int
) -> None:
    expected = evaluate_here(ALONE, trained_run, library, num_lanes=3)
    assert expected.num_scored == read_index(library / "test").num_tokens == sum(LENGTHS)
    if size == 1:
        reports = [evaluate_here(ALONE, trained_run, library, num_lanes)]
    else:
        reports = rank_pool(size).run(evaluate_here, trained_run, library, num_lanes)
    assert all(report == reports[0] for report in reports)
    assert_same(reports[0], expected)


def test_ranks_change_no_figure_without_memory_either(
    trained_run: Path, library: Path, rank_pool: Callable[[int], RankPool]
) -> None:
    expected = evaluate_here(ALONE, trained_run, library, num_lanes=3, without_memory=True)
    reports = rank_pool(2).run(evaluate_here, trained_run, library, 5, True)
    assert reports[0] == reports[1]
    assert_same(reports[0], expected)
    with_memory = evaluate_here(ALONE, trained_run, library, num_lanes=3)
    assert (with_memory == expected) == trained_run.parent.name.startswith(("none", "causal"))


@pytest.mark.parametrize("trained_run", ["transformer_xl"], indirect=True)
def test_the_command_on_two_ranks_says_what_one_rank_says(trained_run: Path, library: Path, tmp_path: Path) -> None:
    arguments = ["evaluate", str(trained_run), "--split", "test", f"data.path={library}", "eval.batch_size=5"]
    codes, text = run_ranks(arguments, world_size=2, cwd=tmp_path)
    assert codes == [0, 0], text
    assert text.count("9 documents") == 1  # rank 0 alone speaks
    (path,) = (trained_run / "evaluations").glob("test-step-00000040-tiny_*.json")  # data of another training
    report = read_report(path)
    assert_same(report, evaluate_here(ALONE, trained_run, library, num_lanes=3))
