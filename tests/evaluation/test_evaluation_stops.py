"""A signal amid an evaluation: all ranks end it soon, in a training and as a command; nothing is half written."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.checkpoint.manifest import list_steps, step_dir
from dist_mem.errors import EXIT_DONE, EXIT_REQUEUE
from dist_mem.evaluation import job, scoring
from dist_mem.model import MemoryLM
from dist_mem.runtime.distributed import World
from dist_mem.tracking.log import find_entries, read_points
from tests.support.forked_ranks import run_forked
from tests.support.jobs import checkpoint_content, difference, losses, train_here, write_config
from tests.support.messages import said_line
from tests.support.ranks import Pools

FIRST = 3  # forward of an evaluation with which the signal comes
LAST = 7  # by when all ranks have agreed; there are dozens
CHANGES = {"train": {"steps": 4}, "eval": {"every": 2, "batch_size": 4}, "schedule": {"kind": "constant"}}


@contextmanager
def signal_amid_scoring(rank: int, number: signal.Signals, *, evaluation: int = 1) -> Iterator[list[int]]:
    """Send this process a signal if it is that rank, as soon as it has scored so much; counts its micro-batches."""
    counts: list[int] = []
    add_scores = scoring.add_scores
    score_batches = scoring.score_batches

    def begin(*arguments: Any, **settings: Any) -> None:
        counts.append(0)
        score_batches(*arguments, **settings)

    def add(*arguments: Any) -> None:
        add_scores(*arguments)
        counts[-1] += 1
        if (len(counts), counts[-1]) == (evaluation, FIRST) and int(os.environ["RANK"]) == rank:
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "add_scores", add)
        patch.setattr(scoring, "score_batches", begin)
        yield counts


def train_with_signal(world: World, config: Path, rank: int, evaluation: int) -> tuple[int, list[int]]:
    with signal_amid_scoring(rank, signal.SIGUSR2, evaluation=evaluation) as counts:
        return train_here(world, config), counts


def figures(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    """Of each evaluation."""
    points = read_points(run_dir / "metrics.jsonl")
    return [(point.step, dict(point.metrics)) for point in points if "validation/word_perplexity" in point.metrics]


def models(run_dir: Path) -> dict[int, set[str]]:
    """The metrics that the log has of each checkpoint at last."""
    logged = {
        entry.body["step"]: entry.body["points"] for entry in find_entries(run_dir / "metrics.jsonl", "checkpoint")
    }
    return {step: {name for _, _, body in points for name in body["metrics"]} for step, points in logged.items()}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_signal_amid_an_evaluation_of_a_training_saves_at_once_and_loses_nothing(
    tmp_path: Path, books: Path, rank_pool: Pools, num_ranks: int
) -> None:
    """At the first evaluation, in the one that the next start owes, and at the last step."""
    stopped = write_config(tmp_path / "stopped.yaml", books, tmp_path / "stopped", CHANGES)
    straight = write_config(tmp_path / "straight.yaml", books, tmp_path / "straight", CHANGES)
    pool = rank_pool(num_ranks)
    assert pool.run(train_here, straight) == [EXIT_DONE] * num_ranks
    # Evaluations of a start, the owed one too; the steps that are saved then, and evaluated.
    for evaluation, saved, evaluated in ((1, [2], []), (1, [2], []), (2, [2, 4], [2]), (1, [2, 4], [2])):
        ended = pool.run(train_with_signal, stopped, num_ranks - 1, evaluation)
        assert [code for code, _ in ended] == [EXIT_REQUEUE] * num_ranks
        assert all(FIRST <= counts[-1] <= LAST for _, counts in ended), "it goes on scoring"
        assert list_steps(tmp_path / "stopped") == saved
        assert [step for step, _ in figures(tmp_path / "stopped")] == evaluated
    assert pool.run(train_here, stopped) == [EXIT_DONE] * num_ranks
    assert figures(tmp_path / "stopped") == figures(tmp_path / "straight")
    assert [step for step, _ in figures(tmp_path / "stopped")] == [2, 4]
    assert losses(tmp_path / "stopped") == losses(tmp_path / "straight")
    stopped_models = models(tmp_path / "stopped")
    assert stopped_models.keys() == {2, 4}
    assert all({"loss", "validation/word_perplexity"} <= names for names in stopped_models.values())
    assert difference(*(checkpoint_content(step_dir(tmp_path / name, 4)) for name in ("stopped", "straight"))) is None
    assert pool.run(train_here, stopped) == [EXIT_DONE] * num_ranks
    assert len(figures(tmp_path / "stopped")) == 2, "evaluated again, though the run was finished"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, books: Path, rank_pool: Pools) -> Path:
    """A run with a checkpoint, of a memory that can be inspected."""
    folder = tmp_path_factory.mktemp("trained")
    changes, below = {"train": {"steps": 1}, "eval": {"batch_size": 4}}, {"kind": "transformer_xl", "mem_len": 16}
    memory = {"kind": "infinite", "num_basis": 8, "num_samples": 8, "over": below}
    config = write_config(folder / "run.yaml", books, folder / "run", changes, memory=memory)
    assert rank_pool(1).run(train_here, config) == [EXIT_DONE]
    return folder / "run"


def command_with_signal(arguments: list[str], rank: int, evaluation: int) -> int:
    with (
        pytest.MonkeyPatch.context() as patch,
        signal_amid_scoring(rank, signal.SIGTERM, evaluation=evaluation) as counts,
    ):
        patch.setattr(job, "LOOK_SECONDS", 1e-9)  # the ranks agree before every forward
        code = main(arguments)
        assert counts[-1] <= LAST, "it goes on scoring"
        return code


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_signal_to_one_rank_ends_the_command_on_all_and_leaves_nothing_half_written(
    tmp_path: Path, trained: Path, num_ranks: int
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    command = ["evaluate", str(run_dir), "--split", "validation"]
    ended = run_forked(command_with_signal, [(command, num_ranks - 1, 1)] * num_ranks, folder=tmp_path)
    assert ended.codes == [EXIT_REQUEUE] * num_ranks, ended.texts
    assert "".join(ended.texts).count("stopped by ") == 1
    said_line("\n".join(ended.texts), f"stopped by SIGTERM on rank {num_ranks - 1}: ")
    assert not list((run_dir / "evaluations").rglob("*"))
    assert run_forked(main, [(command,)] * num_ranks, folder=tmp_path).codes == [EXIT_DONE] * num_ranks


def test_a_signal_ends_inspect_too(tmp_path: Path, trained: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    ended = run_forked(signalled_forward, [(["inspect", str(run_dir)],)], folder=tmp_path)
    assert ended.codes == [EXIT_REQUEUE], ended.texts
    assert "stopped by SIGUSR1 on rank 0: " in ended.texts[0]
    assert not (run_dir / "evaluations").exists()


def signalled_forward(arguments: list[str]) -> int:
    """A command that gets a signal with its third forward."""
    forward, calls = MemoryLM.forward, []

    def counted(*given: Any, **state: Any) -> Any:
        calls.append(0)
        if len(calls) == FIRST:
            os.kill(os.getpid(), signal.SIGUSR1)
        return forward(*given, **state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryLM, "forward", counted)
        code = main(arguments)
    assert len(calls) <= LAST
    return code
