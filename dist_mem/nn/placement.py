"""Where the weights of a model go while it is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

PartT = TypeVar("PartT", bound=nn.Module)


class Placement:
    """Hooks of the construction of a model, part by part: embedding, blocks, softmax.

    All parts are made before the first weight is drawn. Then each part in turn is drawn whole and placed, so that no
    two need to be whole at the same time. The random numbers do not depend on the placement. This base class leaves all
    weights where they are made.
    """

    def place_part(self, part: PartT) -> PartT:
        """Return a part that is made; the values of its parameters, which are drawn later, may be dropped."""
        return part

    @contextmanager
    def draw_weights(self, part: nn.Module) -> Iterator[None]:
        """Draw the weights of a part in the block, whole, on the CPU and in fp32; afterwards they are final."""
        yield
