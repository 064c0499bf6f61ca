"""Predict the memory of a job by attention back end: `dist-mem plan` shows it beside stages and checkpointing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

from dist_mem.config import Config
from dist_mem.estimate.counting import Counted, count_micro_batch
from dist_mem.estimate.memory import counted_parts
from dist_mem.estimate.zero import Sizes
from dist_mem.nn.attention import BACK_ENDS


class BackEnd(NamedTuple):
    """One value of `model.attention`."""

    name: str
    activations: int  # bytes that one micro-batch keeps for its backward, with its new memories
    num_bytes: int  # of all parts together, a bound as in `counted_parts`


def by_back_end(
    config: Config, vocab_size: int, sizes: Sizes, own: Counted, *, world_size: int, on_gpu: bool
) -> Iterator[BackEnd]:
    """Yield the configured back end, whose count is `own`, and the others that the model accepts."""
    for name in BACK_ENDS:
        changed = copy.deepcopy(config)
        changed.model.attention = name
        if name == config.model.attention:
            counted = own
        elif name == "auto":  # it takes one of the others
            continue
        else:
            try:
                counted = count_micro_batch(changed, vocab_size, on_gpu=on_gpu)
            except ValueError:  # the memory, or model.attention_dropout, refuses it
                continue
        parts = counted_parts(changed, sizes, counted, None, world_size=world_size, on_gpu=on_gpu)
        yield BackEnd(name, counted.kept, sum(part.num_bytes for part in parts))
