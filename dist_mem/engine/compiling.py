"""Compile the blocks of an engine's model before the first step, by a forward pass whose results are dropped."""

from __future__ import annotations

import torch

from dist_mem.engine.engine import Engine
from dist_mem.nn.compilation import compile_ahead
from dist_mem.runtime.compilers import use_own_inductor_cache


def compile_blocks(engine: Engine, *, num_lanes: int, seg_len: int, is_window: bool = False) -> None:
    """Compile forward and backward of all blocks, and change nothing else; every rank calls it.

    Args:
        num_lanes: of a micro-batch.
        is_window: gradients flow through states too (`train.bptt_segments`), which is a graph of its own.

    Raises:
        ValueError: the compiler refuses or fails; names key, reason and fix.
    """
    use_own_inductor_cache()
    tokens = torch.zeros(num_lanes, seg_len, dtype=torch.int64, device=engine.device)
    valid_len = torch.full((num_lanes,), seg_len, device=engine.device)
    state = engine.init_state(tokens[:, 0])
    devices = [engine.device] if engine.device.type == "cuda" else []
    with compile_ahead(), torch.random.fork_rng(devices), torch.enable_grad():
        try:
            for _ in range(1 + is_window):
                state = engine.module(tokens, tokens, valid_len, state=state).state
        except (RuntimeError, OSError) as error:  # OSError: a cache that cannot be written
            is_compiler = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
            if not is_compiler and not isinstance(error, OSError):
                raise
            reason = " ".join(str(error).partition("\n\n")[0].split())
            refused = "torch.compile cannot compile the blocks; set train.compile=false, or fix this:"
            raise ValueError(f"train.compile: {refused} {reason}") from error
