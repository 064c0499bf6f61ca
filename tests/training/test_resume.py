"""A run that is killed and started again ends in the very bits of a run that was not."""

import json
import shutil
import signal
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_mem.checkpoint.manifest import step_dir
from dist_mem.config import load_config
from dist_mem.data.plan import DocumentPlan, make_plan
from dist_mem.data.shard import read_index
from dist_mem.evaluation.trained_model import load_model
from dist_mem.memory import memory_options
from dist_mem.runtime.versions import machine_of
from dist_mem.training.resume import Rate, other_machine, other_rate, planned_rate
from tests.support.faults import flip
from tests.support.jobs import (
    checkpoint_content,
    difference,
    finish,
    logged_steps,
    losses,
    run_ranks,
    start_ranks,
    train_here,
    write_config,
)
from tests.support.limits import wait_until
from tests.support.messages import said, said_line
from tests.support.paths import EXAMPLES
from tests.support.ranks import Pools
from tests.support.run_memories import SEG_LEN, carries_gradient, every_memory, small_memory
from tests.support.scored_library import make_config


def zero(stage: int) -> dict[str, object]:
    return {"deepspeed": {"zero_optimization": {"stage": stage}}}


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.core), 3])
def test_resume_after_kill_is_bitwise(tmp_path: Path, books: Path, rank_pool: Pools, stage: int) -> None:
    """kill -9 between steps 7 and 12, resume to 12, beside a straight 12; dropout on, accumulation 2, in mid-book."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for run_dir in (straight, killed):
        write_config(tmp_path / f"{run_dir.name}.yaml", books, run_dir, zero(stage), {"checkpoint": {"every": 6}})
    assert rank_pool(2).run(train_here, tmp_path / "straight.yaml") == [0, 0]

    processes = start_ranks(["train", "killed.yaml"], world_size=2, cwd=tmp_path)
    first = killed / "checkpoints" / "step-00000006"
    wait_until(lambda: first.is_dir() and 7 in logged_steps(killed), "a step after the first checkpoint")
    for process in processes:
        process.send_signal(signal.SIGKILL)
    finish(processes)
    assert not (killed / "checkpoints" / "step-00000012").exists()
    codes, text = run_ranks(["train", "killed.yaml"], world_size=2, cwd=tmp_path)
    assert codes == [0, 0], text
    assert "resuming from" in text

    ends = [checkpoint_content(run_dir / "checkpoints" / "step-00000012") for run_dir in (straight, killed)]
    assert any(name.startswith("ranks/") for name in ends[0])
    assert difference(*ends) is None
    assert losses(straight) == losses(killed)
    cursors = [content["ranks/rank-00000.safetensors"]["lanes/cursors"] for content in ends]
    assert cursors[0][:, 2].any(), "no lane stands in the middle of a book: the test proves little"


EXAMPLE = EXAMPLES / "averages.py"
MEMORIES: dict[str, dict[Any, Any]] = {
    **every_memory(),
    "infinite, sticky, over lamemo": small_memory(
        "infinite", over={"kind": "lamemo", "mem_len": SEG_LEN}, sampling="sticky"
    ),
    "a memory outside the package": small_memory(f"{EXAMPLE}:Averages"),
    "a memory per block": {"default": "none", 1: small_memory("infini")},
}
ACCUMULATIONS = {
    1: {"micro_batch_size": 4, "segments_per_update": 1},
    4: {"micro_batch_size": 4, "segments_per_update": 4},  # successive segments share an update
}


def mark_of(number: int, stage: int, accumulation: int, background: bool) -> list[pytest.MarkDecorator]:
    """By day two stages of every memory, so that every pair of settings is met by some memories."""
    is_met = (accumulation == 4) == (number + stage) % 2 and background == (number + stage // 2) % 2
    return [] if is_met and (stage - number) % 4 < 2 else [pytest.mark.nightly]


SETTINGS = [
    pytest.param(memory, *rest, marks=mark_of(number, *rest))
    for number, memory in enumerate(MEMORIES)
    for rest in product(range(4), ACCUMULATIONS, (False, True))
]


@pytest.mark.parametrize(("memory", "stage", "accumulation", "background"), SETTINGS)
def test_every_memory_comes_back_bitwise(
    tmp_path: Path, books: Path, rank_pool: Pools, memory: str, stage: int, accumulation: int, background: bool
) -> None:
    """Six steps; and from what was saved amid them, after three, a newly opened job goes on to six."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    changes = {
        "train": {"steps": 6, **ACCUMULATIONS[accumulation]},
        "checkpoint": {"every": 3, "background": background},
        "deepspeed": {"zero_optimization": zero},
    }
    window = accumulation if carries_gradient(MEMORIES[memory]) else 1  # one an update
    own = {"train": {"bptt_segments": window, "activation_checkpointing": "segments" if window > 1 else "none"}}
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "straight", changes, own, memory=MEMORIES[memory])
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert rank_pool(2).run(train_here, config) == [0, 0]
    again = (f"run_dir={resumed}", f"resume={step_dir(straight, 3)}")
    assert rank_pool(2).run(train_here, config, again) == [0, 0]
    assert losses(straight)[3:] == losses(resumed)
    assert difference(*(checkpoint_content(step_dir(run_dir, 6)) for run_dir in (straight, resumed))) is None


def test_the_source_of_a_memory_outside_is_kept_and_a_change_is_reported(tmp_path: Path, books: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(EXAMPLE.read_text())
    for steps in (1, 2):
        changes = {"train": {"steps": steps, "threads": steps}, "schedule": {"kind": "constant"}}
        memory = small_memory(f"{mine}:Averages")
        config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", changes, memory=memory)
        codes, text = run_ranks(["train", str(config)], world_size=1, cwd=tmp_path)
        assert codes == [0], text
        kept = tmp_path / "run" / "checkpoints" / f"step-{steps:08d}" / "memory" / "mine.py"
        assert kept.read_text() == mine.read_text()
        mine.write_text(EXAMPLE.read_text() + "# mended\n")
    assert "memory/mine.py differs from the file that the run was trained with so far" in text
    assert "threads 1 -> 2: sums in another order, so the bits are not those of a run that stayed" in text
    mine.unlink()
    assert load_model(tmp_path / "run", "eval.allow_code=true").config.memory["kind"] == f"{kept}:Averages", (
        "an evaluation takes the copy"
    )


def test_checkpoint_damaged_twice_does_not_stop_the_run(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"train": {"steps": 6}})
    checkpoints = tmp_path / "run" / "checkpoints"
    for _ in range(3):
        assert rank_pool(2).run(train_here, config) == [0, 0]
        (checkpoints / "step-00000006" / "manifest.json").write_text("{}")
    kept = sorted(path.name for path in checkpoints.glob("*.broken*"))
    assert kept == ["step-00000006.broken", "step-00000006.broken-2"]


def damage_second_document_of_a_lane(config_file: Path) -> None:
    """Flip a byte of a document that is met amid the training, by the rank of its lane alone."""
    config = load_config([str(config_file)], memory_options=memory_options)
    index, num_lanes = read_index(Path(config.data.path) / "train"), config.train.global_batch_size
    lengths = [entry.num_tokens for entry in index.documents]
    plan = make_plan(lengths, num_lanes=num_lanes, seg_len=config.train.seg_len, seed=config.data.seed)
    assert isinstance(plan, DocumentPlan)
    dealt = [plan.documents(0, lane) for lane in range(num_lanes)]
    entry = index.documents[next(documents[1] for documents in dealt if len(documents) > 1)]
    flip(index.split_dir / entry.shard, entry.tokens_offset)


def test_damaged_document_of_one_rank_stops_all_with_everything_saved(tmp_path: Path, books: Path) -> None:
    """No rank is left in a collective; with `skip`, the run goes on from there."""
    data = tmp_path / "data"
    shutil.copytree(books, data)
    config = write_config(tmp_path / "run.yaml", data, tmp_path / "run", {"train": {"steps": 60}})
    damage_second_document_of_a_lane(config)
    codes, text = run_ranks(["train", str(config)], world_size=2, cwd=tmp_path)
    assert codes == [2, 2], text
    assert text.count("error: ") == 1
    assert "data.on_corrupt=skip" in text
    assert "Traceback" not in text
    newest = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    step = json.loads((newest / "manifest.json").read_text())["step"]
    assert step == logged_steps(tmp_path / "run")[-1]
    changes = ["data.on_corrupt=skip", f"train.steps={step + 3}"]
    codes, text = run_ranks(["train", str(config), *changes], world_size=2, cwd=tmp_path)
    assert codes == [0, 0], text
    assert logged_steps(tmp_path / "run") == list(range(1, step + 4))


def test_run_directory_that_cannot_be_written_is_an_error_of_two_lines(tmp_path: Path, books: Path) -> None:
    """Not a traceback; and at the start, not at the first save."""
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"train": {"steps": 2}})
    (tmp_path / "run").write_text("a file")
    codes, text = run_ranks(["train", str(config)], world_size=2, cwd=tmp_path)
    assert codes == [2, 2], text
    assert f"run_dir {tmp_path / 'run'} cannot be used" in text
    (tmp_path / "run").unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file")
    codes, again = run_ranks(["train", str(config)], world_size=2, cwd=tmp_path)
    assert codes == [2, 2], again
    said_line(again, "error: ", "[Errno 17]", f"'{tmp_path / 'run' / 'checkpoints'}'")
    assert "Traceback" not in text + again


def test_another_machine_is_said_and_the_same_is_not() -> None:
    here = machine_of(torch.device("cpu"))
    assert other_machine(here, here) == other_machine({}, here) == []
    [line] = other_machine({"GPU": "NVIDIA H200"}, here)
    said(line, "GPU NVIDIA H200 -> none", "processor none ->", f"threads none -> {torch.get_num_threads()}")


def test_a_learning_rate_that_leaves_the_former_schedule_is_said() -> None:
    """OneTrainer#1604: after more steps were asked for, the rate rose fivefold without a word."""

    def rate(**changes: Any) -> Rate:
        config = make_config(**changes)
        return partial(planned_rate, config.optimizer, config.schedule, config.train.steps)

    ended = rate(train={"steps": 12})
    assert other_rate(ended, rate(train={"steps": 12}), 6) == []
    assert other_rate(ended, rate(train={"steps": 24}), 0) == []
    assert other_rate(ended, rate(train={"steps": None, "epochs": 1.0}), 12) == []
    (line,) = other_rate(ended, rate(train={"steps": 24}), 12)
    assert line == "learning rate 0.0005 at step 13: the former schedule gave 1.7e-05 at step 12, and 0 next"
    for changes in ({"optimizer": {"lr": 0.5}}, {"schedule": {"kind": "linear"}}):
        assert len(other_rate(ended, rate(train={"steps": 12}, **changes), 3)) == 1
