"""What Hugging Face's files of one kind of model contain, and where it is in our model (gpt2.py, llama.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dist_mem.config import ModelConfig
from dist_mem.model import MemoryLM
from dist_mem.nn.layers import AttentionLayer
from dist_mem.runtime.file_schema import Schema, integer, leaf

SIZE = integer(1, 2**31 - 1)
POSITIVE = leaf("a number above 0", lambda value: type(value) in (int, float) and 0 < value < 1e30)
NOT_NEGATIVE = leaf("a number of at least 0", lambda value: type(value) in (int, float) and 0 <= value < 1e30)
FLAG = leaf("true or false", lambda value: isinstance(value, bool))


class Pair(NamedTuple):
    """Parameters that, stacked by rows, equal published tensors of equal sizes, stacked by rows."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    transposed: bool = False  # the published matrix is transposed


class UnsupportedKey(NamedTuple):
    """A key of config.json with a value that is not computed here."""

    key: str
    value: Any
    allowed: str


@dataclass(frozen=True)
class Layout:
    """Of one kind of model; `published` is always the content of its config.json."""

    name: str  # for messages, with an article
    prefix: str  # of the names of all weights but the softmax's, which a file of the model without it lacks
    ignored: str  # regular expression: names in old files that are no weights
    attention: type[AttentionLayer]  # of its blocks
    plain: tuple[str, ...]  # memory.kind: the model as published
    fix: str  # for a memory with another attention; {key} is its key
    types: Mapping[str, Schema]  # of the keys of config.json that are read
    optional: frozenset[str]  # those of `types` that a file may lack
    sizes: Callable[[dict[str, Any]], dict[str, Any]]  # published -> our keys of `model`
    unsupported: Callable[[dict[str, Any]], Iterator[UnsupportedKey]]  # of published
    pairs: Callable[[MemoryLM, list[str]], Iterator[Pair]]  # paths of the memories with attention -> all weights
    content: Callable[[ModelConfig], dict[str, Any]]  # published, but what the tokenizer and the memory decide
