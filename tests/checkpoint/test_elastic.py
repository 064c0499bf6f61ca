"""A run goes on exactly on other ranks, at other ZeRO stages and with other micro_batch_size than its checkpoint's."""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.__main__ import main
from dist_mem.checkpoint.engine_files import EngineReader
from dist_mem.checkpoint.manifest import read_manifest, step_dir
from dist_mem.checkpoint.rank_file import RankFile, rank_file
from dist_mem.checkpoint.resume_source import find_resumption
from dist_mem.config import load_config
from dist_mem.memory import memory_kinds, memory_options
from dist_mem.runtime.signals import StopSignal
from dist_mem.training.context import Context
from dist_mem.training.opening import open_run
from dist_mem.training.resume import dropout_seed
from dist_mem.training.state import TrainState
from tests.support.contract_cases import CASES, MET_BY_ALL, SEG_LEN, carrying, case_params
from tests.support.jobs import losses, write_config
from tests.support.ranks import Pools
from tests.support.restoring import CHAINS, Leg, opened, overrides_of, train_leg

STEPS = 4  # of a leg
DETERMINISTIC = {"model": {"dropout": 0.0}, "schedule": {"kind": "constant"}, "checkpoint": {"every": STEPS}}
SMALL_GROUPS = {"sub_group_size": 500, "stage3_param_persistence_threshold": 0}  # parameters are cut anywhere


def write_elastic_config(path: Path, data: Path, memory: dict[str, Any] | None = None, **train: Any) -> Path:
    """Eight lanes in fp32 without dropout; decay and no-decay groups and two learning rates, as in jobs.py."""
    changes = {**DETERMINISTIC, "train": train, "deepspeed": {"zero_optimization": SMALL_GROUPS}}
    return write_config(path, data, path.with_suffix(""), changes, memory=memory)


def lane_hashes(directory: Path, num_lanes: int = 8) -> dict[int, str]:
    """Of memory and cursor of each lane, whatever file it is in."""
    manifest = read_manifest(directory)
    hashes = {}
    for lane in range(num_lanes):
        name, row = manifest["lanes"][str(lane)]
        tensors = RankFile(directory / name, "lanes").read()
        parts = [key.encode() + tensors[key][row].numpy().tobytes() for key in sorted(tensors)]
        hashes[lane] = hashlib.sha256(b"".join(parts)).hexdigest()
    return hashes


def engine_values(directory: Path) -> dict[str, Tensor]:
    """Weights, moments and steps by kind and name, whole."""
    reader = EngineReader(directory)
    values = {f"weights/{name}": weights for name, weights in reader.weights().items()}
    for name, shape in reader.index["shapes"].items():
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            found = reader.read(kind, name, 0, torch.Size(shape).numel())
            if found is not None:
                values[f"{kind}/{name}"] = found
    return values


MOVES = [Leg(2, 2), Leg(3, 3), Leg(1, 1, 4), Leg(2, 0, 1)]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory, books: Path, rank_pool: Pools) -> Iterator[tuple[Path, Path]]:
    """A run that stayed on 2 ranks, and one that moved 2 -> 3 -> 1 -> 2, ZeRO 2 -> 3 -> 1 -> 0, amid ends of books."""
    folder = tmp_path_factory.mktemp("elastic")
    names = ("stayed", "moving")
    stayed, moving = (write_elastic_config(folder / f"{name}.yaml", books, seg_len=32) for name in names)
    train_leg(rank_pool, stayed, MOVES[0], steps=STEPS * len(MOVES))
    for number, leg in enumerate(MOVES):
        train_leg(rank_pool, moving, leg, steps=STEPS * (number + 1))
    yield folder / "stayed", folder / "moving"


def test_losses_parameters_and_moments_are_those_of_the_run_that_stayed(moved: tuple[Path, Path]) -> None:
    """Weight decay and learning rates differ between groups: a group with another one's would show."""
    stayed, moving = (torch.tensor(losses(run_dir)) for run_dir in moved)
    assert len(stayed) == STEPS * len(MOVES)
    assert stayed[0] - stayed[-1] > 0.1, "nothing was learned: the test proves little"
    torch.testing.assert_close(moving, stayed, rtol=0, atol=1e-5)
    expected, found = (engine_values(step_dir(run_dir, STEPS * len(MOVES))) for run_dir in moved)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        if name.startswith("step/"):
            assert values == found[name] == STEPS * len(MOVES), name
        else:
            torch.testing.assert_close(found[name], values, rtol=1e-3, atol=2e-5, msg=name)


def restore_and_save(world: Any, config_file: Path, leg: Leg, step: int) -> None:
    """Save the very state that a job on other ranks has restored: it has no step to make."""
    config = load_config([str(config_file), *overrides_of(leg)], memory_options=memory_options)
    context, state = open_run(config, world, find_resumption(config, world), StopSignal([]))
    try:
        assert state.step == step
        context.saving.run(state._replace(step=step + 1))  # under a name of its own
        context.saving.saver.wait()
    finally:
        context.saving.saver.close()
        context.feed.close()
        context.reporting.tracker.close("FINISHED")


def random_state_at_start(
    world: Any, config_file: Path, leg: Leg, dropout: float = 0.0
) -> tuple[Tensor, Tensor, list[str]]:
    """The generator as a job begins, as it would be if seeded for this step and rank, and what was said."""

    def look(context: Context, state: TrainState, reported: list[str]) -> tuple[Tensor, Tensor, list[str]]:
        found = torch.get_rng_state()
        with torch.random.fork_rng():
            torch.manual_seed(dropout_seed(0, state.step, world.rank))
            return found, torch.get_rng_state(), reported

    changes = (*overrides_of(leg), f"model.dropout={dropout}")
    return opened(world, config_file, changes, ("model.dropout",) if dropout else (), look)


@pytest.fixture
def moved_last(moved: tuple[Path, Path], tmp_path: Path) -> Path:
    """The configuration of a copy of the run that stayed: 2 ranks, ZeRO 2, 2 micro_lanes."""
    stayed = moved[0]
    shutil.copytree(stayed, tmp_path / "stayed")
    text = stayed.with_suffix(".yaml").read_text().replace(str(stayed), str(tmp_path / "stayed"))
    (tmp_path / "stayed.yaml").write_text(text)
    return tmp_path / "stayed.yaml"


@pytest.mark.parametrize(
    ("leg", "dropout", "line"),
    [
        (Leg(3, 2), 0.1, "moved: ranks 2 -> 3; dropout uses new random numbers"),
        (Leg(3, 2), 0.0, "moved: ranks 2 -> 3"),
        (
            Leg(1, 0, 4),
            0.1,
            "moved: ranks 2 -> 1, ZeRO stage 2 -> 0, micro_batch_size 2 -> 4; dropout uses new random numbers",
        ),
        (Leg(2, 2, 4), 0.1, "moved: micro_batch_size 2 -> 4; dropout uses new random numbers"),
        (Leg(2, 3), 0.1, "moved: ZeRO stage 2 -> 3"),
    ],
)
def test_dropout_is_seeded_by_step_and_rank_where_lanes_are_divided_otherwise(
    moved_last: Path, rank_pool: Pools, leg: Leg, dropout: float, line: str
) -> None:
    """And goes on where they are not; a model with dropout says it in one line."""
    saved = step_dir(moved_last.with_suffix(""), STEPS * len(MOVES))
    answers = rank_pool(leg.world).run(random_state_at_start, moved_last, leg, dropout)
    assert line in answers[0][2]
    for rank, (state, seeded, _) in enumerate(answers):
        if leg != Leg(2, 3):
            assert torch.equal(state, seeded)
        else:
            assert torch.equal(state, RankFile(saved / rank_file(rank), "rng").read()["cpu"])
    assert len({tuple(seeded.tolist()) for _, seeded, _ in answers}) == leg.world, "each rank draws its own"


def test_lanes_that_the_ranks_do_not_divide_are_reported_at_start_and_before(
    moved_last: Path, rank_pool: Pools, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, reported = rank_pool(3).run(random_state_at_start, moved_last, Leg(3, 2))[0]
    waste = "4 idle lanes, 33.3% of the work; with train.micro_batch_size=1 it would be 1; none is idle with"
    waste = f"{waste} train.global_batch_size=12 (in a new run) or 2 ranks"
    assert f"warning: {waste}" in reported
    assert main(["train", str(moved_last), "--check", "--world", "3"]) == 0
    assert waste in " ".join(capsys.readouterr().out.split())  # long lines are wrapped
    assert not any(
        "of the work" in line for line in rank_pool(2).run(random_state_at_start, moved_last, Leg(2, 2))[0][2]
    )


MOVED = [*memory_kinds(), *sorted(MET_BY_ALL)]  # the remaining variants are nightly
PAIRS = [
    pytest.param(
        case,
        chain,
        id=f"{case}, {index}",
        marks=() if index == number % len(CHAINS) and case in MOVED else pytest.mark.nightly,
    )
    for number, case in enumerate([*MOVED, *(case for case in CASES if case not in MOVED)])
    for index, chain in enumerate(CHAINS)
]


WINDOW = {"segments_per_update": 4, "bptt_segments": 4, "seg_len": SEG_LEN}


@pytest.mark.parametrize(("case", "chain"), PAIRS)
def test_every_memory_moves_to_the_last_bit(
    tmp_path: Path, books: Path, rank_pool: Pools, case: str, chain: list[Leg]
) -> None:
    """Trained three steps, then restored and saved again on other ranks and stages without a step in between."""
    has_windows = case in carrying() and CHAINS.index(chain) % 2 == 0  # the others: windows of one segment
    window = WINDOW if has_windows else {"seg_len": SEG_LEN}
    config = write_elastic_config(tmp_path / "run.yaml", books, CASES[case], **window, steps=3)
    train_leg(rank_pool, config, chain[0], steps=3)
    first = step_dir(tmp_path / "run", 3)
    for step, leg in enumerate(chain[1:], start=3):
        rank_pool(leg.world).run(restore_and_save, config, leg, step)
        again = step_dir(tmp_path / "run", step + 1)
        assert lane_hashes(again) == lane_hashes(first)
        before, after = engine_values(first), engine_values(again)
        assert before.keys() == after.keys()
        for name, values in before.items():
            assert torch.equal(after[name], values), name


@pytest.mark.parametrize("case", case_params(carrying()))
def test_a_run_through_windows_of_four_segments_learns_the_same_on_two_three_and_one_ranks(
    tmp_path: Path, books: Path, rank_pool: Pools, case: str
) -> None:
    """Losses of three steps on each, with gradients through four segments, beside those of a run that stayed."""
    legs = [Leg(2, 2), Leg(3, 3), Leg(1, 1, 4)]
    names = ("stayed", "moving")
    stayed, moving = (write_elastic_config(tmp_path / f"{name}.yaml", books, CASES[case], **WINDOW) for name in names)
    train_leg(rank_pool, stayed, legs[0], steps=9, changes=("checkpoint.every=3",))
    for number, leg in enumerate(legs):
        kept = ("none", "segments", "segments_and_blocks")[number]
        changes = ("checkpoint.every=3", f"train.activation_checkpointing={kept}")
        train_leg(rank_pool, moving, leg, steps=3 * (number + 1), changes=changes)
    found, expected = (torch.tensor(losses(tmp_path / name)) for name in ("moving", "stayed"))
    assert len(found) == 9
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
