"""The smallest number of rows an open segment needs in a forward pass; padding it to T costs about as much as T tokens.

An incomplete segment does not change a memory, so a memory that computes the same outputs from fewer rows does not need
T rows. The memories in `FEWEST` are tested (tests/generation/test_generation_short.py); all others get T rows, as the
memory contract requires.
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

STEP = 16  # the number of rows is a multiple of it, so that few shapes occur
# The fewest rows each memory accepts, from its options. Compressive compresses the states that the rows would push out,
# even if the result is not kept. Infinite passes its new rows on to the next segment and needs T.
FEWEST: dict[type[Memory], Callable[[Any], int]] = {
    NoMemory: lambda options: 1,
    Causal: lambda options: 1,
    TransformerXL: lambda options: 1,
    LaMemo: lambda options: 1,
    Compressive: lambda options: int(options.compression_rate),
}


def num_rows(model: nn.Module, longest: int, *, seg_len: int) -> int:
    """Return the number of rows to compute for open segments of at most `longest` tokens; T if one is complete."""
    memories = [module for module in model.modules() if isinstance(module, Memory)]
    if not memories or any(type(memory) not in FEWEST for memory in memories):
        return seg_len
    fewest = max(FEWEST[type(memory)](memory.options) for memory in memories)
    return min(-(-max(longest, fewest) // STEP) * STEP, seg_len)
