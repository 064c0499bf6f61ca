"""Find the replies of a conversation from the mask of scored tokens in its shards.

The tag of the next speaker separates two replies and is not scored. Every sequence of consecutive scored tokens is
therefore one reply, and its last token ends the line (datasets/recipes/cmu_dog.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dist_mem.data.shard import Index, check_document, read_mask, read_tokens
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.datasets.recipes.cmu_dog import LEAKED


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
