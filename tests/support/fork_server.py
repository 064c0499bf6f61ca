"""The process that ranks of tests are forked from: it has imported everything, so that a rank starts at once."""

import multiprocessing
from functools import cache
from typing import Any

from dist_mem.runtime.distributed import choose_accelerator

_IMPORTED = [  # includes modules that a job imports lazily
    "dist_mem.__main__",
    "dist_mem.training.run",
    "dist_mem.memory.transformer_xl",
    "deepspeed.runtime.superoffload",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "torch._dynamo",
]


@cache
def fork_server() -> Any:
    """Start the process that ranks are forked from, early, so that it can import in parallel; return its context."""
    from multiprocessing.forkserver import ensure_running

    choose_accelerator()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    ensure_running()
    return context
