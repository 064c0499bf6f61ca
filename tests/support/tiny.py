"""Tiny configurations, batches and jobs for tests that run real engines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dist_mem.block import model_spec
from dist_mem.data.batch import IGNORE, Batch, Update
from dist_mem.data.batch_plan import batch_plan
from dist_mem.data.plan import lanes_of_rank
from dist_mem.engine.engine import Engine
from dist_mem.engine.gradient_norms import Norms
from dist_mem.engine.placement import place_parts
from dist_mem.memory.base import named_tensors
from dist_mem.model import MemoryLM
from dist_mem.runtime.distributed import World
from dist_mem.training.divergence import Divergence
from dist_mem.training.state import TrainState
from dist_mem.training.step import Outcome, StepContext, train_step
from tests.support.configs import config_from
from tests.support.contract_cases import SEG_LEN

VOCAB = 37
TINY = {
    "model": {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_inner": 32, "dropout": 0.0},
    "memory": {"kind": "transformer_xl", "mem_len": 12},
    "train": {
        "global_batch_size": 8,
        "micro_batch_size": 4,
        "seg_len": 8,
        "steps": 100,
        "precision": "fp32",
        "max_grad_norm": None,
    },
    "optimizer": {"kind": "sgd", "lr": 0.5, "weight_decay": 0.0},
    "schedule": {"kind": "constant"},
}


class Gradients:
    """The figures of an engine that a meter logs."""

    lr = 0.1

    def gradient_norm(self) -> float:
        return 1.0

    def gradient_norms(self) -> Norms | None:
        return None


def tiny_config(*overrides: dict[str, Any]) -> Any:
    """Return the configuration of a model that trains in milliseconds."""
    return config_from(TINY, *overrides)


def zero_block(stage: int) -> dict[str, Any]:
    """Return a ZeRO block that keeps no parameter gathered: otherwise a small model hides bugs of stage 3."""
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}


def ragged_segments(config: Any, *, step: int) -> list[Batch]:
    """Return the global batch of one step, a Batch of all G lanes per segment, with documents of all lengths."""
    train = config.train
    generator = torch.Generator().manual_seed(1000 + step)
    segments = []
    for part in range(train.segments_per_update):
        shape = (train.global_batch_size, train.seg_len)
        tokens = torch.randint(1, VOCAB, shape, generator=generator)
        targets = torch.randint(1, VOCAB, shape, generator=generator)
        valid_len = torch.randint(1, train.seg_len + 1, (train.global_batch_size,), generator=generator)
        valid_len[:: 2 + part] = train.seg_len  # some lanes have complete segments, which enter the memory
        targets[torch.arange(train.seg_len) >= valid_len[:, None]] = IGNORE
        is_new = torch.rand(train.global_batch_size, generator=generator) < 0.3
        document = torch.arange(train.global_batch_size)
        segments.append(Batch(tokens, targets, valid_len, is_new, document, None))
    return segments


def _idle_rows(batch: Batch, count: int) -> Batch:
    """Append `count` idle lanes to a batch."""
    if count <= 0:
        return batch
    seg_len = batch.tokens.shape[1]
    return Batch(
        torch.cat([batch.tokens, torch.zeros(count, seg_len, dtype=torch.int64)]),
        torch.cat([batch.targets, torch.full((count, seg_len), IGNORE)]),
        torch.cat([batch.valid_len, torch.zeros(count, dtype=torch.int64)]),
        torch.cat([batch.is_new_document, torch.zeros(count, dtype=torch.bool)]),
        torch.cat([batch.document, torch.full((count,), -1)]),
        None,
    )


def update_of_rank(config: Any, world: World, *, step: int) -> Update:
    """Return this rank's share of `ragged_segments`, in micro-batches."""
    train = config.train
    lanes = lanes_of_rank(
        train.global_batch_size, world_size=world.size, rank=world.rank, micro_lanes=train.micro_batch_size
    )
    batches: list[Batch] = []
    for whole in ragged_segments(config, step=step):
        padded = _idle_rows(whole, lanes.stop - train.global_batch_size)
        for first in range(lanes.start, lanes.stop, train.micro_batch_size):
            rows = slice(first, first + train.micro_batch_size)
            batches.append(Batch._make(None if part is None else part[rows] for part in padded))
    scored = [int((batch.targets != IGNORE).sum()) for batch in batches]
    cursors = torch.full((len(lanes), 3), step)
    return Update(batches, cursors, scored, epoch=0.0, documents_started=0, documents_skipped=0)


@dataclass
class TinyJob:
    """A real engine on a small model, with the state that its steps advance."""

    context: StepContext
    state: TrainState
    lane_ids: torch.Tensor

    @property
    def config(self) -> Any:
        return self.context.config

    @property
    def world(self) -> World:
        return self.context.world

    @property
    def engine(self) -> Engine:
        return self.context.engine

    @property
    def divergence(self) -> Divergence:
        return self.context.divergence

    @property
    def step(self) -> int:
        return self.state.step

    @step.setter
    def step(self, step: int) -> None:
        self.state = self.state._replace(step=step)

    @property
    def states(self) -> list[Any]:
        return self.state.memories

    @states.setter
    def states(self, memories: list[Any]) -> None:
        self.state = self.state._replace(memories=memories)

    @property
    def cursors(self) -> torch.Tensor:
        return self.state.cursors

    def train(self, update: Update, scored: Sequence[int], **options: Any) -> Outcome:
        """Make one update; `scored` are the targets of its micro-batches on all ranks."""
        self.state, outcome = train_step(self.context, self.state, update, scored, **options)
        return outcome


def tiny_job(config: Any, world: World, *, stage: int, block: dict[str, Any] | None = None) -> TinyJob:
    """Return a job on a newly seeded model, which is placed as in a run."""
    import deepspeed

    deepspeed.init_distributed(dist.get_backend())
    train = config.train
    ds_block = {**zero_block(stage), **(block or {})}
    torch.manual_seed(train.seed)
    model = MemoryLM(
        model_spec(config, VOCAB), place_parts(config.train, ds_block, world.device, world_size=world.size)
    )
    lanes = lanes_of_rank(
        train.global_batch_size, world_size=world.size, rank=world.rank, micro_lanes=train.micro_batch_size
    )
    lane_ids = torch.tensor(lanes)
    auxiliary = model.auxiliary_parameter_names()
    sizes = {"world_size": world.size, "accumulation": batch_plan(train, world.size).backwards}
    engine = Engine(model, config.train, config.optimizer, ds_block, **sizes, auxiliary_parameters=auxiliary)
    engine.train()
    states = [engine.init_state(group) for group in lane_ids.split(train.micro_batch_size)]
    context = StepContext(config, world, engine, Divergence(config.divergence), total_steps=100)
    return TinyJob(context, TrainState(0, states, torch.zeros(len(lane_ids), 3, dtype=torch.int64)), lane_ids)


def run_steps(job: TinyJob, *, first: int, last: int) -> list[Outcome]:
    """Run real training steps over `ragged_segments`."""
    from dist_mem.runtime.distributed import sum_over_ranks

    outcomes = []
    for step in range(first, last):
        update = update_of_rank(job.config, job.world, step=step)
        scored = [int(count) for count in sum_over_ranks(update.scored, job.world.device)]
        job.step = step
        outcomes.append(job.train(update, scored))
    return outcomes


def full_parameters(job: TinyJob) -> dict[str, torch.Tensor]:
    """Return every full parameter, on every rank."""
    import deepspeed

    found = {}
    for name, parameter in job.engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=job.engine.stage == 3):
            found[name] = parameter.detach().clone()
    return found


TRAIN = {"global_batch_size": 4, "micro_batch_size": 2, "seg_len": SEG_LEN, "max_grad_norm": 0.5}
ADAM = {"kind": "adamw", "lr": 2e-3, "weight_decay": 0.1}


def memory_of(job: Any) -> dict[str, Tensor]:
    named = {
        f"{group}.{name}": part for group, state in enumerate(job.states) for name, part in named_tensors(state).items()
    }
    return {name: part.clone() for name, part in named.items()}
