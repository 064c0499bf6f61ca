"""Compile the blocks of an engine's model before the first step, by a forward pass whose results are dropped."""

from __future__ import annotations

import torch

from dist_mem.config import TrainConfig
from dist_mem.data.batch_plan import backwards_of_window
from dist_mem.engine.engine import Engine
from dist_mem.nn.compilation import compile_ahead, note_errors
from dist_mem.runtime.compilers import use_own_inductor_cache


def compile_blocks(engine: Engine, train: TrainConfig) -> None:
    """Compile forward and backward of all blocks, and change nothing else; every rank calls it.

    In a window (`train.bptt_segments`) gradients flow through states too, which is a graph of its own.

    Raises:
        ValueError: the compiler refuses or fails; names key, reason and fix.
    """
    shape = (train.micro_batch_size, train.seg_len)
    tokens = torch.zeros(shape, dtype=torch.int64, device=engine.device)
    valid_len = torch.full(shape[:1], train.seg_len, device=engine.device)
    state = engine.init_state(tokens[:, 0])
    devices = [engine.device] if engine.device.type == "cuda" else []
    try:
        with note_errors() as errors:
            try:
                use_own_inductor_cache()
            except (ValueError, OSError) as error:
                errors.append(error)
            with compile_ahead(), torch.random.fork_rng(devices), torch.enable_grad():
                state = engine.module(tokens, tokens, valid_len, state=state).state
                if train.bptt_segments > 1:
                    by_segments = backwards_of_window(train) > 1
                    state = engine.module.with_gradient(state) if by_segments else state
                    engine.module(tokens, tokens, valid_len, state=state)
    except (RuntimeError, OSError) as error:  # OSError: a cache that cannot be written
        is_compiler = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
        if not is_compiler and not isinstance(error, OSError):
            raise
        reason = " ".join(str(error).partition("\n\n")[0].split())
        refused = "torch.compile cannot compile the blocks; set train.compile=false, or fix this:"
        raise ValueError(f"train.compile: {refused} {reason}") from error
