"""Find the replies of a conversation from the mask of scored tokens in its shards, and generate a model's own.

The tag of the next speaker separates two replies and is not scored. Every sequence of consecutive scored tokens is
therefore one reply, and its last token ends the line (datasets/recipes/cmu_dog.py).

A conversation is read once, from its first token. At each chosen reply, the model generates from a kept reading and the
generated text is dropped; then the person's reply is read, and the conversation continues. The input of a reply thus
never contains its reference or anything after it. (The published evaluation gave every context of a dialogue the same
list, filled up to the second to last turn, so that nearly all references were in the input.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dist_mem.data.shard import Index, check_document, read_mask, read_tokens
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.datasets.recipes.cmu_dog import LEAKED
from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.generate import Sampling, generate
from dist_mem.generation.reading import Reading, read, select, start


class Reply(NamedTuple):
    """Tokens [start, stop) of a conversation."""

    start: int  # the first token of the reply, after the speaker's tag
    stop: int  # after the end of the line


def find_replies(scored: np.ndarray) -> list[Reply]:
    """Return the sequences of consecutive scored tokens, in order.

    Args:
        scored: (num_tokens,) bool.
    """
    edges = np.flatnonzero(np.diff(scored.astype(np.int8), prepend=0, append=0))
    return [Reply(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def choose_replies(replies: Sequence[Reply], *, first: int, num_chosen: int | None) -> list[Reply]:
    """Return the replies from index `first` on, or `num_chosen` of them, spread evenly over the conversation."""
    found = list(replies[first:])
    if num_chosen is None or num_chosen >= len(found):
        return found
    places = (np.arange(num_chosen) + 0.5) * len(found) / num_chosen
    return [found[place] for place in places.astype(int)]


def line_ends(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end a reply: those that contain a newline."""
    return [token for token, piece in enumerate(tokenizer.pieces) if b"\n" in piece]


def is_leaked(title: str) -> bool:
    """Return whether the released train split contains a copy of the conversation with this title."""
    return title.endswith(LEAKED)


def line_of(text: str) -> str:
    """Return the text of a reply up to the end of the line, stripped of outer spaces."""
    return text.split("\n", 1)[0].strip()


class Conversation(NamedTuple):
    """One document of a dialogue dataset."""

    number: int  # in its split; the document number for memories that draw random numbers
    id: str
    title: str
    tokens: np.ndarray  # (num_tokens,)
    replies: list[Reply]


def read_conversations(index: Index) -> list[Conversation]:
    """Read the conversations of a split, in its order.

    Raises:
        ShardError: one is damaged.
        ValueError: a conversation has no mask of its replies.
    """
    conversations = []
    for number, entry in enumerate(index.documents):
        check_document(index, number)
        scored = read_mask(index, number)
        if scored is None:
            raise ValueError(
                f"{index.split_dir}: document {entry.id} has no replies (no {entry.id}.mask.npy): point data.path at "
                "data built by `dist-mem data build cmu_dog`"
            )
        replies = find_replies(np.asarray(scored, dtype=bool))
        conversations.append(Conversation(number, entry.id, entry.title, read_tokens(index, number), replies))
    return conversations


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
            parts = tokens.numpy(), conversations[lane].tokens[place.start : place.stop]
            yield Answer(conversations[lane], place, *(line_of(trained.tokenizer.decode(part)) for part in parts))


def _stream(conversation: Conversation, place: Reply) -> int:
    """Return the random number stream of a reply, unique within a split."""
    return conversation.number * 2**32 + place.start
