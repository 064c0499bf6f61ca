"""A book of random losses, for a page."""

import numpy as np
import torch

from dist_mem.data.documents import Document
from dist_mem.inspection.attended_passages import AttendedPassages
from dist_mem.inspection.page.book import PageBook
from dist_mem.inspection.reading import DocumentReading

PIECES = [b" word", b"\n", b"\xc3", b"\xa9", b"</script>", *(f" w{number}".encode() for number in range(1000))]


def make_book(num_tokens: int, *, num_layers: int = 1, seg_len: int = 16) -> PageBook:
    """A book of random losses and looks, in which the first of every 16 tokens is not scored."""
    draw = torch.Generator().manual_seed(3)
    nll = torch.empty(num_tokens).exponential_(0.3, generator=draw)
    without = nll + 0.5 * torch.randn(num_tokens, generator=draw)
    nll[::16], without[::16] = torch.nan, torch.nan

    def look() -> AttendedPassages:
        back = torch.randint(1, 600, (num_tokens, 3), generator=draw)
        begin = (torch.arange(num_tokens)[:, None] - back).clamp(min=-1).int()
        mass = torch.rand(num_tokens, 3, generator=draw) / 3
        return AttendedPassages(mass.sum(dim=1), begin, begin + 1, mass)

    tokens = np.random.default_rng(3).integers(0, len(PIECES), num_tokens).astype(np.uint16)
    layers = tuple({"memory": look()} for _ in range(num_layers))
    reading = DocumentReading(Document(0, tokens, None, None), [], nll, without, without, None, None, None, layers)
    return PageBook("A book", "run", PIECES, reading, None, np.arange(0, num_tokens, seg_len), num_tokens)
