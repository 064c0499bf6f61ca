"""Token types of GPT-2: each token's embedding is added to that of a token that stands for the speaker.

Hugging Face's GPT-2 embeds `token_type_ids` with the table of the tokens, and the authors of the infinity-former set
them to the ids of their document and speaker tokens in dialogues. Here they are derived from the text: a type begins
with the last token of its marker, a sequence of tokens such as "A" and ":", and lasts until another begins. So a type
depends on earlier tokens only, and only the last tokens and the current type are carried from segment to segment. Shape
letters: B lanes, T segment, W tokens of the longest marker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dist_mem.config import TokenTypeConfig
from dist_mem.nn.constants import constant


class TokenTypeState(NamedTuple):
    newest: Tensor  # (B, W) int64, the last tokens read; -1 before a document's first
    current: Tensor  # (B,) int64, index of the type of the last token read


class Types(NamedTuple):
    ids: Tensor  # (B, T) int64, the tokens whose embeddings are added
    state: TokenTypeState  # after the segment


class TokenTypes:
    """The token types of a configuration, `model.token_types`; it has no parameters."""

    def __init__(self, types: Sequence[TokenTypeConfig], vocab_size: int) -> None:
        """Raise ValueError if a token is not in the vocabulary."""
        self.ids = [token_type.id for token_type in types]
        self.markers = [list(token_type.after) for token_type in types]
        largest = max([*self.ids, *(token for marker in self.markers for token in marker)])
        if largest >= vocab_size:
            raise ValueError(f"model.token_types has token {largest}, but the vocabulary has only {vocab_size}")
        self.width = max(1, *(len(marker) for marker in self.markers))

    def init_state(self, num_lanes: int, device: torch.device | str) -> TokenTypeState:
        """Return the state of lanes that begin a document: the first type, and no token read."""
        return TokenTypeState(
            torch.full((num_lanes, self.width), -1, device=device, dtype=torch.int64),
            torch.zeros(num_lanes, device=device, dtype=torch.int64),
        )

    def __call__(self, tokens: Tensor, valid_len: Tensor, state: TokenTypeState) -> Types:
        """Return the types of a segment's tokens (B, T), of which `valid_len` (B,) are real."""
        num_tokens, width = tokens.shape[1], self.width
        seen = torch.cat([state.newest, tokens], dim=1)  # token t is at W + t
        begun = torch.full_like(tokens, -1)  # the type that begins with a token
        for index, marker in enumerate(self.markers[1:], start=1):
            first = width - len(marker) + 1
            matches = [seen[:, first + place :][:, :num_tokens] == token for place, token in enumerate(marker)]
            begun = torch.where(torch.stack(matches).all(dim=0), index, begun)
        place = torch.arange(num_tokens, device=tokens.device)
        last = torch.where(begun >= 0, place, -1).cummax(dim=1).values  # where the current type began
        types = torch.where(last >= 0, begun.gather(1, last.clamp(min=0)), state.current[:, None])
        newest = seen.gather(1, valid_len[:, None] + torch.arange(width, device=tokens.device))
        so_far = torch.cat([state.current[:, None], types], dim=1).gather(1, valid_len[:, None])
        ids = constant(tuple(self.ids), device=tokens.device, dtype=torch.int64)
        return Types(ids[types], TokenTypeState(newest, so_far[:, 0]))
