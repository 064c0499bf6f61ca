"""Copy the batches of an update to a GPU while the previous update computes.

prefetch thread (pinned memory) -> `Transfer.start`, on a stream of its own -> `on_device`, in the step
"""

from __future__ import annotations

import torch

from dist_mem.data.batch import Batch, Copies, Update


class Transfer:
    """Starts the copies; on CPUs there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def needs_pinned(self) -> bool:
        """Whether batches should be in pinned memory."""
        return self._stream is not None

    def start(self, update: Update) -> Update:
        """Return the update with copies on the device, which may still be under way; the host does not wait."""
        if self._stream is None:
            return update
        with torch.cuda.stream(self._stream):
            batches = [batch.to(self._device) for batch in update.batches]
            return update._replace(copies=Copies(batches, self._stream.record_event()))


def on_device(update: Update, device: torch.device) -> list[Batch]:
    """Return the batches on the device, for the current stream; the host does not wait."""
    if update.copies is None:
        return [batch.to(device) for batch in update.batches]
    stream = torch.cuda.current_stream(device)
    stream.wait_event(update.copies.copied)
    for batch in update.copies.batches:
        for part in batch:
            if part is not None:
                part.record_stream(stream)  # another stream has allocated it and must not reuse it too early
    return update.copies.batches
