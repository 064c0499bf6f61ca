"""Training steps of every memory, as memory.py and peers.py time them: full segments, full memories, no optimizer."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from lib.common import seconds

from dist_mem.block import model_spec
from dist_mem.config import Config, change_config
from dist_mem.memory.base import map_state
from dist_mem.model import MemoryLM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SIZES = {"num_layers": 4, "d_model": 410, "num_heads": 10, "d_head": 41, "d_inner": 2100}
RUN = {"seg_len": 150, "mem_len": 150, "lanes": 4, "vocab": 8192, "rounds": 9, "threads": 2}
Step = Callable[[], Any]


def memories(mem_len: int) -> dict[str, dict[str, Any]]:
    """Return blocks of every memory with M rows, and of the infinity-former's composition; the basis has its widths."""
    short = {"kind": "transformer_xl", "mem_len": mem_len}
    signal = {"kind": "infinite", "num_basis": mem_len, "num_samples": mem_len, "basis_widths": [0.01, 0.05]}
    return {
        "none": {"kind": "none"},
        "transformer_xl": short,
        "transformer_xl, rotary": {**short, "positions": "rotary"},
        "compressive": {"kind": "compressive", "mem_len": mem_len, "cmem_len": mem_len},
        "lamemo": {"kind": "lamemo", "mem_len": mem_len},
        "infinite": signal,
        "infinite, sticky": {**signal, "sampling": "sticky"},
        "infinite over transformer_xl": {**signal, "over": short},
        "infini": {"kind": "infini"},
        "gated_deltanet": {"kind": "linear"},
        "rmt": {"kind": "rmt", "num_tokens": 10},
        "armt": {"kind": "armt", "num_tokens": 16},
        "rmt_rows": {"kind": "rmt_rows", "num_tokens": 16},
        "memorizing": {"kind": "memorizing", "mem_len": mem_len},
        "titans": {"kind": "titans", "window": mem_len},
        "titans, chunks of 256": {"kind": "titans", "window": mem_len, "chunk_len": 256},
        "block_recurrent": {"kind": "block_recurrent", "num_states": mem_len},
    }


def device_seconds(function: Step) -> float:
    """Return the wall time of one call, including its work on a GPU."""
    if not torch.cuda.is_available():
        return seconds(function)
    torch.cuda.synchronize()

    def whole() -> None:
        function()
        torch.cuda.synchronize()

    return seconds(whole)


def configuration(memory: dict[str, Any], arguments: argparse.Namespace) -> Any:
    """Return the configuration of a model with this memory: post-norm, no dropout."""
    model = {"dropout": 0.0, "norm": "post", **{name: getattr(arguments, name) for name in SIZES}}
    keys = {"model": model, "memory": memory, "train": {"seg_len": arguments.seg_len}}
    return change_config(Config(), keys)


def training_step(
    memory: dict[str, Any], dtype: torch.dtype, arguments: argparse.Namespace, device: torch.device
) -> tuple[Step, MemoryLM]:
    """Return a function that runs forward and backward of all lanes, and its model."""
    lanes, seg_len = arguments.lanes, arguments.seg_len
    torch.manual_seed(0)
    model = MemoryLM(model_spec(configuration(memory, arguments), arguments.vocab)).to(device, dtype)
    tokens = torch.randint(arguments.vocab, (lanes, seg_len), device=device)
    valid_len = torch.full((lanes,), seg_len, device=device)
    state = [model.init_state(torch.arange(lanes), device, dtype)]

    def step() -> None:
        output = model(tokens, tokens, valid_len, state=state[0])
        aux = sum(loss.mean() for loss in output.aux.values())
        (output.nll.mean() + aux).backward()
        model.zero_grad()
        state[0] = map_state(torch.Tensor.detach, output.state)  # as between two updates

    for _ in range(4):  # fill the memory, warm up
        step()
    return step, model
