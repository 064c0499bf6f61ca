"""Values that memories log are averaged over blocks, lanes and ranks, and do not change the training."""

from typing import Any

import pytest
import torch

from dist_mem.contract.check_memory import failures
from dist_mem.contract.subject import CheckedMemory, SubjectSize
from dist_mem.memory import memory_class
from dist_mem.runtime.distributed import World
from dist_mem.training.meter import Meter
from tests.support.paths import SUPPORT
from tests.support.ranks import Pools
from tests.support.tiny import Gradients, full_parameters, ragged_segments, run_steps, tiny_config, tiny_job

LOGGING = f"{SUPPORT / 'logging_memory.py'}:Logging"
# Six lanes in groups of two on two ranks: two places are idle.
SIZES: dict[str, Any] = {"global_batch_size": 6, "micro_batch_size": 2, "segments_per_update": 2}


def logs_of_two_steps(world: World, kind: str, stage: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the metrics after two updates, and the parameters."""
    job = tiny_job(tiny_config({"train": SIZES, "memory": {"kind": kind}}), world, stage=stage)
    meter = Meter(lane_segments_per_update=12)
    for outcome in run_steps(job, first=0, last=2):
        meter.add(outcome.totals, epoch=0.0, logs=outcome.logs)
    return meter.read(Gradients()), full_parameters(job)


@pytest.mark.parametrize("stage", [2, 3])
def test_figures_are_means_over_blocks_and_lanes_that_read_of_all_ranks(rank_pool: Pools, stage: int) -> None:
    config = tiny_config({"train": SIZES})
    lengths = [batch.valid_len for step in range(2) for batch in ragged_segments(config, step=step)]
    for metrics, _ in rank_pool(2).run(logs_of_two_steps, LOGGING, stage):
        assert metrics["memory/tokens"] == pytest.approx(float(torch.cat(lengths).double().mean()))
        assert metrics["memory/layer"] == pytest.approx(0.5)
        assert metrics["memory/size"] > 0.0


def test_logging_changes_no_bit_of_the_training(rank_pool: Pools) -> None:
    pairs = [rank_pool(2).run(logs_of_two_steps, kind, 2)[0] for kind in (LOGGING, "transformer_xl")]
    (logging, one), (silent, other) = pairs
    assert all(torch.equal(one[name], other[name]) for name in other)
    assert logging["loss"] == silent["loss"]
    assert set(logging) - set(silent) == {"memory/tokens", "memory/layer", "memory/size"}


def test_figures_of_the_memory_below_are_logged_too() -> None:
    memory = {"kind": "infinite", "over": {"kind": LOGGING, "mem_len": 4}, **memory_class("infinite").small_options(4)}
    subject = CheckedMemory(lambda seg_len: memory, SubjectSize(lanes=2, seg_len=4, segments=1, layers=2))
    model = subject.model()
    (tokens, targets), *_ = subject.segments()
    logs = model(tokens, targets, subject.full_lengths(), state=subject.empty_state(model)).logs
    assert set(logs) == {"tokens", "layer", "size"}


def test_a_name_that_no_store_takes_is_named() -> None:
    kind = f"{SUPPORT / 'logging_memory.py'}:BadName"
    chosen = memory_class(kind)
    first = next(failures(lambda seg_len: {"kind": kind, **chosen.small_options(seg_len)}))
    assert "logs has the name 'size of x?', but a name consists of letters, digits and ._/-" in first.message
