"""Compiled blocks without Inductor: torch's compiler traces them as one graph, and torch's own kernels run it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from dist_mem.nn import compilation as compiling

# Dynamo reads the gradient of a block's input, and makes an instance of an autograd function: torch warns of both.
TRACED = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@contextmanager
def without_inductor() -> Iterator[None]:
    """Replace Inductor by `aot_eager`, which computes the bits of a model that is not compiled."""

    def traced(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        return aot_eager(graph, inputs)

    with pytest.MonkeyPatch.context() as patch, compiling.compile_ahead():
        patch.setattr(compiling, "_inductor", traced)
        forget_graphs()
        yield
        forget_graphs()


def forget_graphs() -> None:
    """Forget everything that was compiled in this process, and its counts."""
    torch._dynamo.reset()
    compiling.compile_once.cache_clear()
    counters.clear()


def num_graphs() -> int:
    """Return how many graphs were compiled since `forget_graphs`."""
    return counters["stats"]["unique_graphs"]
