"""Count what makes a host wait for its device, on CPUs, where nothing waits.

Every tensor counts as one on the device, but those that `Batch` holds on the host, what is computed from such tensors
alone, and the step counts that torch's Adam keeps on the host. What DeepSpeed does on GPUs only is not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_mem.data.batch import Batch

WAITS, FROM_HOST, COLLECTIVES = "waits", "tensors from Python values", "collectives"


class _Dispatched(TorchDispatchMode):
    """Counts reads of single values, and collectives."""

    def __init__(self, counts: Counter[str], on_host: Iterable[Tensor]) -> None:
        super().__init__()
        self.counts, self.on_host = counts, {id(tensor): tensor for tensor in on_host}

    def is_on_host(self, *values: Any) -> bool:
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        return bool(tensors) and all(id(tensor) in self.on_host for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_on_host(args, kwargs):
            self.on_host |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        elif func.namespace == "c10d":
            self.counts[COLLECTIVES] += 1
            self.counts[f"{COLLECTIVES}: {func._schema.name.removeprefix('c10d::')}"] += 1
        elif func._schema.name in ("aten::_local_scalar_dense", "aten::nonzero"):
            self.counts[WAITS] += 1
        return result


class _Called(TorchFunctionMode):
    """Counts copies of tensors to Python, and of Python's values to tensors."""

    def __init__(self, counts: Counter[str], dispatched: _Dispatched) -> None:
        super().__init__()
        self.counts, self.dispatched = counts, dispatched

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.cpu) and not self.dispatched.is_on_host(args):
            self.counts[WAITS] += 1
        if func is torch.tensor:
            self.counts[FROM_HOST] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(batches: Iterable[Batch], optimizer: torch.optim.Optimizer) -> Iterator[Counter[str]]:
    """Count in the block."""
    from deepspeed.accelerator import get_accelerator

    counts: Counter[str] = Counter()
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    on_host = [part for batch in batches for part in batch if part is not None]

    dispatched = _Dispatched(counts, [*on_host, *steps])

    def copied(batch: Batch, device: torch.device) -> Batch:
        on_host = dict(dispatched.on_host)
        copies = Batch._make(None if part is None else part.clone() for part in batch)
        dispatched.on_host = on_host  # the copies are not
        return copies

    def synchronize(*arguments: Any) -> None:
        counts[WAITS] += 1

    with (
        mock.patch.object(Batch, "to", copied),
        mock.patch.object(type(get_accelerator()), "synchronize", synchronize),
        _Called(counts, dispatched),
        dispatched,
    ):
        yield counts
