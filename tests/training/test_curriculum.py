"""A run over two stages of a curriculum: resumed, moved, rolled back, shown and computed again, all exactly."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from dist_mem.checkpoint.manifest import list_steps, step_dir
from dist_mem.checkpoint.resume_source import check_data
from dist_mem.config import DataConfig
from dist_mem.errors import CheckpointError
from dist_mem.runtime.distributed import World
from dist_mem.training import context, loop
from tests.support.curricula import make_data
from tests.support.jobs import checkpoint_content, difference, losses, train_here, write_config
from tests.support.messages import refused, said
from tests.support.rank_errors import error_of
from tests.support.ranks import Pools
from tests.support.recording import assert_as_delivered, found_by, train_recording

BOUNDARY = 3


def config_of(tmp_path: Path, books: Path, *, ends_by: str = "step", **changes: Any) -> Path:
    """Six steps, two segments each: three of short documents, then three of `books`."""
    by_accuracy = ends_by == "accuracy"
    short = make_data(tmp_path / "short", [20 + 3 * number for number in range(10)], answers=by_accuracy)
    curriculum = {"data": {"curriculum": [{"path": str(short), "until": 5 if by_accuracy else BOUNDARY}]}}
    base = {"train": {"steps": 6, "segments_per_update": 2}, "checkpoint": {"every": 1}}
    reached = {"data": {"until_accuracy": 0.5}, "eval": {"every": BOUNDARY}, "optimizer": {"lr": 0.03, "groups": []}}
    return write_config(
        tmp_path / "run.yaml", books, tmp_path / "straight", curriculum, base, reached if by_accuracy else {}, changes
    )


# By accuracy, a run does all that it does by step.
by_accuracy_or_step = pytest.mark.parametrize("ends_by", ["accuracy", "step"])


@by_accuracy_or_step
def test_a_run_resumes_bitwise_before_at_and_after_a_boundary_and_is_computed_again(
    tmp_path: Path, books: Path, rank_pool: Pools, ends_by: str
) -> None:
    config, straight = config_of(tmp_path, books, ends_by=ends_by), tmp_path / "straight"
    delivered = rank_pool(2).run(train_recording, config, [])
    assert all(batch.is_new_document.all() for batch in delivered[0][BOUNDARY + 1][:2]), "the memory is not empty"
    for step in (BOUNDARY - 1, BOUNDARY, BOUNDARY + 1):
        resumed = tmp_path / f"from-{step}"
        again = (f"run_dir={resumed}", f"resume={step_dir(straight, step)}")
        assert rank_pool(2).run(train_here, config, again) == [0, 0]
        assert losses(straight)[step:] == losses(resumed)
        assert difference(*(checkpoint_content(step_dir(run_dir, 6)) for run_dir in (straight, resumed))) is None

    moved = [f"run_dir={tmp_path / 'moved'}", f"resume={step_dir(straight, BOUNDARY)}"]
    on_one_rank = rank_pool(1).run(train_recording, config, moved)
    for step in range(BOUNDARY + 1, 7):
        assert_as_delivered(tmp_path / "moved", step, on_one_rank)
    for kept in (range(1, 7), [BOUNDARY - 1], []):  # from the step before, over the boundary, from the beginning
        for step in set(range(1, 7)) - set(kept):
            shutil.rmtree(step_dir(straight, step), ignore_errors=True)
        for step in range(1, 7):
            assert_as_delivered(straight, step, delivered)
    code, _, lines = rank_pool(2).run(found_by, straight, BOUNDARY + 1)[0]
    assert code == 0, lines
    assert any(line.startswith(f"{BOUNDARY} of {BOUNDARY} other recorded points") for line in lines), lines


def test_a_stage_that_ends_before_it_is_learned_says_so(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    config = config_of(tmp_path, books, ends_by="accuracy", optimizer={"lr": 1e-9})
    assert rank_pool(1).run(train_here, config, []) == [0]
    log = [json.loads(line) for line in (tmp_path / "straight" / "metrics.jsonl").read_text().splitlines()]
    tags = [tag for line in log if line.get("kind") == "tags" for tag in line["body"].items()]
    (text,) = (text for name, text in tags if name.endswith("curriculum.stage_0"))
    said(text, "data.curriculum[0] ends at step 5", "not 50.00%")


@by_accuracy_or_step
def test_a_rollback_over_a_boundary_reads_the_stage_before_again(
    tmp_path: Path, books: Path, rank_pool: Pools, ends_by: str
) -> None:
    changes: dict[str, Any] = {"divergence": {"action": "rollback"}, "checkpoint": {"every": 2}}
    config = config_of(tmp_path, books, ends_by=ends_by, **changes)
    delivered = rank_pool(2).run(train_recording, config, [], BOUNDARY + 1)
    for step in range(1, 7):
        assert_as_delivered(tmp_path / "straight", step, delivered)


def train_where_rank_1_loses_its_indexes(world: World, config: Path, folder: Path) -> int:
    """Each rank has data of its own, as on the disk of its node."""
    own = folder / str(world.rank)
    for name in ("books", "short"):
        shutil.copytree(folder / name, own / name)

    def lose(step: int) -> None:
        if world.rank == 1 and step == 1:
            for path in own.glob("*/validation/index.json"):
                path.unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "begin_step", lose)
        return train_here(world, config, [f"data.path={own}/books", f"data.curriculum.0.path={own}/short"])


def test_answers_that_one_rank_cannot_open_stop_all_ranks_saved(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    shutil.copytree(books, tmp_path / "books")
    config = config_of(tmp_path, books, ends_by="accuracy", preflight=False, checkpoint={"every": None})
    for text in rank_pool(2).run(error_of, train_where_rank_1_loses_its_indexes, config, tmp_path):
        said(text, tmp_path / "1" / "short" / "validation" / "index.json")
    assert list_steps(tmp_path / "straight") == [BOUNDARY]


def train_where_no_stage_can_be_noted(world: World, config: Path) -> int:
    def fail(run_dir: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(run_dir / "history.jsonl"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "begin_part", fail)
        return train_here(world, config)


def test_a_stage_that_ends_on_a_full_disk_stops_all_ranks_saved(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    config = config_of(tmp_path, books, ends_by="accuracy", checkpoint={"every": None})
    for text in rank_pool(2).run(error_of, train_where_no_stage_can_be_noted, config):
        said(text, "rank 0: OSError: [Errno 28]", "history.jsonl")
    assert list_steps(tmp_path / "straight") == [BOUNDARY]


def test_another_number_of_stages_than_a_checkpoint_was_trained_on_is_refused() -> None:
    """It was "zip() argument 2 is shorter than argument 1"."""
    for fingerprints in ("", "a b"):
        with refused(CheckpointError, "data.curriculum"):
            check_data(Path("step"), {"data_fingerprint": fingerprints}, cast(Any, ["one"]), DataConfig())
