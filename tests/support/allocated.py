"""Count the bytes of all tensors that are alive, as a context."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_mem.estimate.counting import LiveBytes


class Allocated(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, also of those without values."""

    def __init__(self) -> None:
        super().__init__()
        self.live = LiveBytes()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self.live.add(tensor.untyped_storage())
        return output
