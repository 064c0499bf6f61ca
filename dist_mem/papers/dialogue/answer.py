"""Generate a model's replies to the gold history of a conversation, with the memory left by reading that history.

A conversation is read once, from its first token. At each chosen reply, the model generates from a kept reading and the
generated text is dropped; then the person's reply is read, and the conversation continues. The input of a reply thus
never contains its reference or anything after it. (The published evaluation gave every context of a dialogue the same
list, filled up to the second to last turn, so that nearly all references were in the input.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.generate import generate
from dist_mem.generation.reading import Reading, read, select, start
from dist_mem.generation.sampling import Sampling
from dist_mem.papers.dialogue.replies import Conversation, Reply, line_ends, line_of


class Answer(NamedTuple):
    """A reply of the model and its reference."""

    conversation: Conversation
    place: Reply  # of the reference
    text: str
    reference: str


def answer_all(
    trained: TrainedModel,
    conversations: Sequence[Conversation],
    chosen: Sequence[Sequence[Reply]],
    *,
    num_lanes: int,
    num_tokens: int,
    sampling: Sampling,
    after: Reading | None = None,
) -> Iterator[Answer]:
    """Yield a reply of the model for each chosen reply; its random numbers do not depend on the rest of the batch.

    Args:
        chosen: chosen replies of each conversation, in order.  num_lanes: conversations read at once.
        num_tokens: maximum length of a reply; a reply ends at the end of its line.
        after: reading of a text, with one lane, that every conversation continues; None: each is a document.
    """
    order = sorted(range(len(conversations)), key=lambda place: len(chosen[place]))  # lanes of a batch end together
    for first in range(0, len(order), num_lanes):
        batch = order[first : first + num_lanes]
        yield from _answer_batch(
            trained,
            [conversations[place] for place in batch],
            [chosen[place] for place in batch],
            num_tokens=num_tokens,
            sampling=sampling,
            after=after,
        )


def _answer_batch(
    trained: TrainedModel,
    conversations: Sequence[Conversation],
    chosen: Sequence[Sequence[Reply]],
    *,
    num_tokens: int,
    sampling: Sampling,
    after: Reading | None,
) -> Iterator[Answer]:
    stop_ids = line_ends(trained.tokenizer)
    if after is None:
        reading = start(trained, document_ids=[conversation.number for conversation in conversations])
    else:
        reading = select(after, [0] * len(conversations))
    lanes = list(range(len(conversations)))
    read_so_far = [0] * len(lanes)
    for turn in range(max(map(len, chosen), default=0)):
        left = [row for row, lane in enumerate(lanes) if turn < len(chosen[lane])]
        reading, lanes = select(reading, left), [lanes[row] for row in left]
        places = [chosen[lane][turn] for lane in lanes]
        histories = [
            conversations[lane].tokens[read_so_far[lane] : place.start]
            for lane, place in zip(lanes, places, strict=True)
        ]
        reading = read(trained, reading, histories)
        streams = [_stream(conversations[lane], place) for lane, place in zip(lanes, places, strict=True)]
        written = generate(
            trained, reading, num_tokens=num_tokens, sampling=sampling, stop_ids=stop_ids, streams=streams
        )
        for lane, place, tokens in zip(lanes, places, written.tokens, strict=True):
            read_so_far[lane] = place.start
            yield _answer(trained, conversations[lane], place, tokens.numpy())


def _answer(trained: TrainedModel, conversation: Conversation, place: Reply, written: np.ndarray) -> Answer:
    decode = trained.tokenizer.decode
    reference = decode(conversation.tokens[place.start : place.stop])
    return Answer(conversation, place, line_of(decode(written)), line_of(reference))


def _stream(conversation: Conversation, place: Reply) -> int:
    """Return the random number stream of a reply, unique within a split."""
    return conversation.number * 2**32 + place.start
