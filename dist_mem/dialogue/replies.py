"""The replies of a conversation, found in its tokens by what is scored: the shards say all there is to know.

Between two replies stands the tag of the next speaker, which is not scored; so every run of scored tokens is one reply,
with the end of its line as its last token (shards/build_cmu_dog.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dist_mem.data.shard import Index, check_document, read_mask, read_tokens
from dist_mem.data.tokenizers.base import Tokenizer

LEAKED = " (also in the released train split)"  # how titles of such conversations end


class Reply(NamedTuple):
    """Tokens [start, stop) of a conversation."""

    start: int  # the first token of what is said; the speaker's tag stands before it
    stop: int  # after the end of the line


def find_replies(scored: np.ndarray) -> list[Reply]:
    """The runs of scored tokens, in order.

    Args:
        scored: (num_tokens,) bool.
    """
    edges = np.flatnonzero(np.diff(scored.astype(np.int8), prepend=0, append=0))
    return [Reply(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def choose_replies(replies: Sequence[Reply], *, first: int, num_chosen: int | None) -> list[Reply]:
    """The replies from number `first` on (from 0), or `num_chosen` of these, spread over the conversation."""
    found = list(replies[first:])
    if num_chosen is None or num_chosen >= len(found):
        return found
    places = (np.arange(num_chosen) + 0.5) * len(found) / num_chosen
    return [found[place] for place in places.astype(int)]


def line_ends(tokenizer: Tokenizer) -> list[int]:
    """The tokens that end a reply: those that hold a newline."""
    return [token for token, piece in enumerate(tokenizer.pieces) if b"\n" in piece]


def is_leaked(title: str) -> bool:
    """Whether the released train split has a copy of the conversation with this title."""
    return title.endswith(LEAKED)


def line_of(text: str) -> str:
    """What a reply says: its text up to the end of the line, without outer spaces."""
    return text.split("\n", 1)[0].strip()


class Conversation(NamedTuple):
    """One document of a dialogue dataset."""

    number: int  # in its split: what memories that draw random numbers count as the document
    id: str
    title: str
    tokens: np.ndarray  # (num_tokens,)
    replies: list[Reply]


def read_conversations(index: Index) -> list[Conversation]:
    """The conversations of a split, in its order.

    Raises:
        ShardError: one is damaged.
        ValueError: nothing says which tokens are replies.
    """
    conversations = []
    for number, entry in enumerate(index.documents):
        check_document(index, number)
        scored = read_mask(index, number)
        if scored is None:
            raise ValueError(
                f"{index.split_dir}: document {entry.id} has no replies (no {entry.id}.mask.npy): point data.path at "
                "data of shards/build_cmu_dog.py"
            )
        replies = find_replies(np.asarray(scored, dtype=bool))
        conversations.append(Conversation(number, entry.id, entry.title, read_tokens(index, number), replies))
    return conversations
