"""What a run logs and learns, step by step, against plain torch: one forward, one backward and one AdamW step."""

import math
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dist_mem.block import model_spec
from dist_mem.data.batch import IGNORE
from dist_mem.data.documents import Documents
from dist_mem.data.plan import Cursor, DocumentPlan, cut_lengths
from dist_mem.data.shard import read_index
from dist_mem.evaluation.trained_model import TrainedModel, load_model
from dist_mem.model import MemoryLM, reset_lanes
from dist_mem.tracking.log import METRICS_FILE, read_points
from tests.support.jobs import train_here, write_config
from tests.support.ranks import Pools
from tests.support.simple_lanes import simple_updates

LANES, SEG_LEN, LONGEST, STEPS, BREAK = 8, 16, 72, 18, 10  # LONGEST: the last segment of every document is short
LR, EMBEDDING_LR, DECAY, NORM, WARMUP, END = 3e-3, 1e-3, 0.5, 0.25, 6, 0.1


@dataclass
class Reference:
    metrics: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def rate(step: int) -> float:
    """The share of the peak learning rate in update `step`, from 0: a line up, half a cosine down."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return END + (1 - END) * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2


def epochs(plan: DocumentPlan, cursor: Cursor, lane: int) -> float:
    """Whole epochs, and the share of the lane's segments of the present one that are read."""
    segments = [math.ceil(plan.lengths[number] / SEG_LEN) for number in plan.documents(cursor.epoch, lane)]
    return cursor.epoch + (sum(segments[: cursor.place]) + math.ceil(cursor.offset / SEG_LEN)) / sum(segments)


def reference(data: Path, trained: TrainedModel, *, world_size: int) -> Reference:
    """Train the same model on the same books.

    Args:
        trained: only its configuration and its tokenizer are used.
        world_size: the logged epoch is that of rank 0's lanes.
    """
    index = read_index(data / "train")
    lengths = cut_lengths([entry.num_tokens for entry in index.documents], LONGEST)
    plan = DocumentPlan(lengths, num_lanes=LANES, seg_len=SEG_LEN, seed=trained.config.data.seed)
    documents = Documents(index, lengths, bos_id=trained.tokenizer.bos_id)
    torch.manual_seed(trained.config.train.seed)
    model = MemoryLM(model_spec(trained.config, trained.tokenizer.vocab_size))
    parts = dict(model.named_parameters())
    groups = [
        {
            "params": [parameter],
            "peak": EMBEDDING_LR if "embedding" in name else LR,
            "weight_decay": DECAY if parameter.dim() > 1 and not name.endswith("bias") else 0.0,
        }
        for name, parameter in parts.items()
    ]
    optimizer = torch.optim.AdamW(groups)
    fresh = model.init_state(torch.arange(LANES), "cpu", torch.float32)
    state, found, begun = fresh, Reference(), 0
    updates = simple_updates(documents, plan, lane_ids=range(LANES), micro_lanes=LANES)
    for step, update in enumerate(islice(updates, STEPS)):
        (batch,) = update.batches
        start = reset_lanes(state, fresh, batch.is_new_document)
        output = model(batch.tokens, batch.targets, batch.valid_len, state=start)
        state, begun = output.state, begun + int(batch.is_new_document.sum())
        scored = int((batch.targets != IGNORE).sum())
        loss = output.nll.sum() / scored
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parts.values(), NORM)
        for group in optimizer.param_groups:
            group["lr"] = rate(step) * group["peak"]
        optimizer.step()
        of_rank0 = update.cursors[: LANES // world_size].tolist()
        done = [epochs(plan, Cursor(*cursor), lane) for lane, cursor in enumerate(of_rank0)]
        found.metrics.append(
            {
                "loss": float(loss.detach()),
                "lr": rate(step) * LR,
                "grad_norm": float(norm),
                "tokens": scored,
                "documents": begun,
                "epoch": sum(done) / len(done),
            }
        )
    found.weights = {name: parameter.detach() for name, parameter in parts.items()}
    return found


def logged(run_dir: Path) -> list[dict[str, float]]:
    points = [point.metrics for point in read_points(run_dir / METRICS_FILE) if "loss" in point.metrics]
    return [{**point, "tokens": point["tokens_per_second"] * point["step_seconds"]} for point in points]


@pytest.mark.core
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_run_equals_plain_torch_in_every_step(
    tmp_path: Path, books: Path, rank_pool: Pools, world_size: int
) -> None:
    """Lanes in groups of two, which one rank reads one after another: four micro-batches, or two on each of two."""
    config = write_config(
        tmp_path / "run.yaml",
        books,
        tmp_path / "run",
        {
            "data": {"max_document_len": LONGEST},
            "model": {"dropout": 0.0},
            "train": {"steps": STEPS, "max_grad_norm": NORM},
            "optimizer": {
                "lr": LR,
                "weight_decay": DECAY,
                "groups": [{"param_regex": "embedding", "lr": EMBEDDING_LR}],
            },
            "schedule": {"warmup_steps": WARMUP, "decay_steps": STEPS - WARMUP, "end_factor": END},
            "checkpoint": {"every": BREAK},
        },
    )
    for steps in (BREAK, STEPS):
        assert rank_pool(world_size).run(train_here, config, [f"train.steps={steps}"]) == [0] * world_size
    trained = load_model(tmp_path / "run")
    expected = reference(books, trained, world_size=world_size)
    assert expected.metrics[-1]["epoch"] > 2
    assert all(point["grad_norm"] > NORM for point in expected.metrics), "every step is clipped"
    points = logged(tmp_path / "run")
    assert len(points) == STEPS
    for step, (point, metrics) in enumerate(zip(points, expected.metrics, strict=True)):
        for name, value in metrics.items():
            assert point[name] == pytest.approx(value, rel=1e-4), f"{name} of step {step + 1}"
    for name, weight in trained.model.named_parameters():
        torch.testing.assert_close(weight.detach(), expected.weights[name], rtol=1e-4, atol=1e-5, msg=name)
