"""A process of rows.py: one row of a study, its updates and evaluation, timed when its parent asks for a round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch
from lib.speed import Step
from lib.updates import engine_of, step_of, update_of

from dist_mem.config import Config, load_config
from dist_mem.engine.engine import Engine
from dist_mem.memory import memory_options
from dist_mem.runtime.distributed import initialize, shut_down

WARM_UPS = 4  # memories are full and allocations made


def serve(words: Sequence[str], vocab: int, updates: int, connection: Connection) -> None:
    """Answer each True with the processor seconds of every update, and per evaluated token; end with False."""
    config = load_config(words, memory_options=memory_options)
    world = initialize(threads=1)
    engine = engine_of(config, vocab)
    train = step_of(engine, config, world, update_of(config, range(config.train.global_batch_size), vocab))
    evaluate, tokens = scoring_of(engine, config, vocab)
    measured(engine, train, evaluate, WARM_UPS)
    connection.send(None)
    while connection.recv():
        times, scoring = measured(engine, train, evaluate, updates)
        connection.send((times, [seconds / tokens for seconds in scoring]))
    shut_down(agreed=True)


def scoring_of(engine: Engine, config: Config, vocab: int) -> tuple[Step, int]:
    """Return a function that scores a full segment of `eval.batch_size` lanes by the plain model, and its tokens."""
    lanes, seg_len = config.eval.batch_size, config.train.seg_len
    tokens, valid_len = torch.randint(vocab, (lanes, seg_len)), torch.full((lanes,), seg_len)
    state = engine.init_state(torch.arange(lanes))

    @torch.no_grad()
    def score() -> None:
        nonlocal state
        state = engine.module(tokens, tokens, valid_len, state=state).state

    return score, tokens.numel()


def measured(engine: Engine, train: Step, evaluate: Step, number: int) -> tuple[list[float], list[float]]:
    """Return the processor seconds of so many updates, and of half as many scored segments."""
    times = [processor_seconds(train) for _ in range(number)]
    engine.train(False)
    scoring = [processor_seconds(evaluate) for _ in range(max(1, number // 2))]
    engine.train()
    return times, scoring


def processor_seconds(function: Step) -> float:
    """Return what a call takes of this process's processor time, which other processes hardly change."""
    began = time.process_time()
    function()
    return time.process_time() - began
