"""Updates of the training loop's own step with DeepSpeed, of random tokens in memory: nothing is read."""

from __future__ import annotations

import torch
from lib.speed import Step

from dist_mem.block import model_spec
from dist_mem.config import Config, deepspeed_block
from dist_mem.data.batch import Batch, Update
from dist_mem.data.batch_plan import batch_plan
from dist_mem.engine.engine import Engine
from dist_mem.engine.start import start_communication
from dist_mem.model import MemoryLM
from dist_mem.runtime.distributed import World
from dist_mem.training.divergence import Divergence
from dist_mem.training.state import TrainState
from dist_mem.training.step import StepContext, train_step


def update_of(config: Config, lanes: range, vocab: int) -> Update:
    """Return an update of full segments with random tokens, all scored."""
    train, batches = config.train, []
    for group in torch.tensor(lanes).repeat(train.segments_per_update).split(train.micro_batch_size):
        full, old = torch.full((len(group),), train.seg_len), torch.zeros(len(group), dtype=torch.bool)
        tokens = torch.randint(vocab, (len(group), train.seg_len))
        batches.append(Batch(tokens, tokens, full, old, group, None))
    scored = [batch.targets.numel() for batch in batches]
    cursors = torch.zeros(len(lanes), 3, dtype=torch.int64)
    return Update(batches, cursors, scored, epoch=0.0, documents_started=0, documents_skipped=0)


def engine_of(config: Config, vocab: int) -> Engine:
    """Return a new model under DeepSpeed, the only one of this process, which has joined as the only rank."""
    start_communication()
    batch = batch_plan(config.train, 1)
    torch.manual_seed(0)
    model = MemoryLM(model_spec(config, vocab))
    engine = Engine(
        model, config.train, config.optimizer, deepspeed_block(config), world_size=1, accumulation=batch.backwards
    )
    engine.train()
    return engine


def step_of(engine: Engine, config: Config, world: World, update: Update) -> Step:
    """Return a function that trains on one update, always the same, and waits for the device."""
    context = StepContext(config, world, engine, Divergence(config.divergence), total_steps=10**6)
    groups = torch.arange(config.train.global_batch_size).split(config.train.micro_batch_size)
    state = TrainState(0, [engine.init_state(group) for group in groups], update.cursors)

    def step() -> None:
        nonlocal state
        state, _ = train_step(context, state, update, list(update.scored))
        if world.device.type == "cuda":
            torch.cuda.synchronize()

    return step
