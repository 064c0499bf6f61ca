"""Read one passage at every evaluation of a training, and log what the memory read of it and what it gained.

The passage is the beginning of one validation document, always the same, so that its figures can be compared between
steps and runs. Every rank reads it, because ZeRO-3 needs every rank in a forward; they all get the same figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from dist_mem.config import Config
from dist_mem.data.batch import Batch
from dist_mem.data.documents import Documents
from dist_mem.data.segments import collate, document_segments
from dist_mem.data.shard import Index
from dist_mem.evaluation.probe_measures import mass_by_age, mean_values, state_figures
from dist_mem.evaluation.protocol import protocol_of
from dist_mem.evaluation.scoring import Forward, InitState
from dist_mem.memory.base import Memory
from dist_mem.memory.parts.inspector import Inspector
from dist_mem.model import empty_memories

PREFIX = "memory/"  # of the metrics


class PassageRead(NamedTuple):
    """What the memory read of the passage, and gained."""

    figures: dict[str, float]  # by the names they are logged under
    layers: list[dict[str, float]]  # `mass_by_age` of every layer, the mean over segments


def open_passage(index: Index, config: Config, bos_id: int) -> list[Batch]:
    """Return the segments of the passage, one lane each; there are none with `eval.passage: 0`.

    They are the first ones of the first document that has enough, or of the longest; an incomplete one is left out.
    With `data.cut: end` the document is read as if it ended there.

    Raises:
        ShardError: the document is damaged or cannot be read.
    """
    protocol = protocol_of(config)
    seg_len, length = protocol.seg_len, config.eval.passage * protocol.seg_len
    lengths = np.minimum(index.documents.num_tokens, length) // seg_len * seg_len
    number = int(np.argmax(lengths))
    if not lengths[number]:
        return []
    document = Documents(index, lengths, bos_id=bos_id).open(number)
    segments = document_segments(document, seg_len=seg_len, bos_id=bos_id)
    return [collate([segment], seg_len=seg_len, with_recall=False, blocks=protocol.blocks) for segment in segments]


@torch.no_grad()
def passage_figures(
    forward: Forward,
    init_state: InitState,
    memories: Sequence[Memory],
    batches: Sequence[Batch],
    device: torch.device,
) -> PassageRead:
    """Read a passage and return its figures; there are none for one without segments.

    `memory/gain` is in nats per token: the loss with the memory emptied before every segment, less that with it.

    Args:
        forward, init_state: as for `scoring.score_split`; every rank calls it.
        memories: those of the model that `forward` computes, which are inspected in it.
    """
    if not batches:
        return PassageRead({}, [])
    state = init_state(batches[0].document)
    figures: dict[str, list[float]] = {}
    by_layer: list[dict[str, float]] = [{} for _ in memories]
    inspector = Inspector(memories)
    for batch in (host_batch.to(device) for host_batch in batches):
        tensors = batch.tokens, batch.targets, batch.valid_len
        emptied = forward(*tensors, state=empty_memories(state, init_state(batch.document)))
        with inspector:
            output = forward(*tensors, state=state)
        inspector.commit()
        state = output.state
        gain = (emptied.nll.double().sum() - output.nll.double().sum()) / batch.valid_len.sum()
        read = mass_by_age(inspector.layers, batch.valid_len, seg_len=batch.tokens.shape[1])
        for name, figure in ({"gain": float(gain)} | read | mean_values(inspector.layers)).items():
            figures.setdefault(name, []).append(figure)
        for mean, layer in zip(by_layer, inspector.layers, strict=True):
            for name, mass in mass_by_age([layer], batch.valid_len, seg_len=batch.tokens.shape[1]).items():
                mean[name] = mean.get(name, 0.0) + mass / len(batches)
    means = {name: sum(several) / len(several) for name, several in figures.items()}
    held = state_figures(state.blocks) or state_figures([state.stem])  # memory tokens are held for the whole model
    named = {PREFIX + name: figure for name, figure in (means | held).items()}
    return PassageRead(named, by_layer)
