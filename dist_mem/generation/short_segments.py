"""How few rows of an open segment have to go through a model: padding to T costs about as much as T tokens.

An incomplete segment leaves nothing in a memory, so a memory that computes the outputs of fewer rows as well need not
be given T. The memories here were tried (tests/generation/test_generation_short.py); all others are given T rows, as
the memory contract says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from dist_mem.memory.base import Memory
from dist_mem.memory.causal import Causal
from dist_mem.memory.compressive import Compressive
from dist_mem.memory.lamemo import LaMemo
from dist_mem.memory.none import NoMemory
from dist_mem.memory.transformer_xl import TransformerXL

STEP = 16  # rows come in multiples of it, so that few shapes occur
# The fewest rows that a memory takes, from its options. Compressive compresses what the rows would push out, even if
# nothing keeps the result. Infinite hands its new rows on to the next segment, and takes T.
FEWEST: dict[type[Memory], Callable[[Any], int]] = {
    NoMemory: lambda options: 1,
    Causal: lambda options: 1,
    TransformerXL: lambda options: 1,
    LaMemo: lambda options: 1,
    Compressive: lambda options: int(options.compression_rate),
}


def num_rows(model: nn.Module, longest: int, *, seg_len: int) -> int:
    """How many rows to give a model for open segments of at most `longest` tokens; T where one of them is complete."""
    memories = [module for module in model.modules() if isinstance(module, Memory)]
    if not memories or any(type(memory) not in FEWEST for memory in memories):
        return seg_len
    fewest = max(FEWEST[type(memory)](memory.options) for memory in memories)
    return min(-(-max(longest, fewest) // STEP) * STEP, seg_len)
