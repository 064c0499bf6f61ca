"""The metadata of a configuration key: its choices and limits, what it affects, and which commands may set it when.

A dataclass gives them beside type, default and meaning of a key, and nothing repeats them elsewhere:

    dropout: float = key(0.1, at_least=0, below=1, resume=ALLOWED)  # on embeddings, positions and sub-layers
    threads: int | None = key(None, at_least=1, resume=FREE, affects=SPEED, per_node=True)  # per rank, on CPUs

All checks and docs/reference/config.md read them with `keys_of`. Memories declare their options in the same way.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from enum import Flag, auto
from functools import cache
from typing import Any, NamedTuple, TypeVar, cast

from dist_mem.config.check import (
    Problem,
    block_of,
    fields_of,
    flatten,
    format_value,
    is_optional,
    item_schema,
    join,
    nearest,
)
from dist_mem.runtime.files import at_home

# Upper bounds: the limits of machines, formats and libraries. Larger numbers are refused before anything is allocated.
# A model within the bounds may still be too large for a machine.
SEED = 2**63 - 1  # random numbers are hashes of signed integers of 64 bits
STEPS = 99_999_999  # the names of checkpoints have eight digits
WIDTH = 2**20  # 80 times the widest published models
TOKENS = 2**24  # of a segment or a memory; its attention is computed as one matrix
LANES = 2**20
TEXT = 2**40  # tokens of a document; more than any existing text has
VOCABULARY = 2**31 - 1  # tokenizers count in 32 bits
SECONDS = 1_000_000  # libraries add them to a date

ValueT = TypeVar("ValueT")


class ResumeRule(NamedTuple):
    """Whether a key may change when a run is resumed: FREE, ALLOWED or `forbid`."""

    name: str
    reason: str = ""  # why a fixed key must not change


FREE = ResumeRule("free")  # may change: it does not affect the contents of the checkpoint
# Changes what the run computes from now on: needs `--allow KEY`, so that no typo changes it.
ALLOWED = ResumeRule("allowed")


def forbid(reason: str) -> ResumeRule:
    """Return the rule of a key that determines the contents of the checkpoint, and must not change for this reason."""
    return ResumeRule("fixed", reason)


class Affects(Flag):
    """What a key affects: the first of these that is true of it."""

    RESULT = auto()  # what a training computes
    DRAW = auto()  # its random numbers: runs that differ only in such keys are repetitions of one another
    DATA = auto()  # the data, by their place: equal results from equal fingerprints
    SCORE = auto()  # what an evaluation computes
    SPEED = auto()  # time, device memory, the order of sums and of random numbers: otherwise equal results
    PLACE = auto()  # places, names, supervision, saving and logging: equal results


RESULT, DRAW, DATA, SCORE, SPEED, PLACE = Affects


class Command(Flag):
    """Commands on a trained run that may set a key of it. A training sets all keys."""

    EVALUATION = auto()  # all that load its model: evaluate, generate, inspect, ...
    RECOMPUTATION = auto()  # batch and recompute, which repeat its training


EVALUATION, RECOMPUTATION = Command


@dataclasses.dataclass(frozen=True)
class KeyMetadata:
    """Metadata of a key. For a list, limits and choices are those of its items."""

    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()
    is_path: bool = False  # a path or an address, in which a leading `~` is the home directory
    is_expanded: bool = False  # of a path: the shell of the job expands $NAME in it
    in_path: bool = False  # a plain name in a path: runtime/names.py
    may_nest: bool = False  # of such a name: it may be several, joined by /
    is_store: bool = False  # a path or an address of MLflow's, which tracking/mlflow/store.py checks; `~` as in a path
    may_be_empty: bool = False
    credentials: str = ""  # of an address, in which a user or password is refused: what to do instead
    per_node: bool = False  # nodes of one job may have different values
    command_line_only: bool = False  # no file may set it
    # Of these three, a key has that of its block unless it has its own.
    resume: ResumeRule | None = None
    affects: Affects | None = None
    set_by: Command | None = None  # in addition to a training

    @property
    def is_place(self) -> bool:
        """Whether the key is a path, of dist_mem or of MLflow."""
        return self.is_path or self.is_store

    def inside(self, block: KeyMetadata) -> KeyMetadata:
        """Return the metadata of a key in a block."""
        found = {name: getattr(self, name) or getattr(block, name) for name in ("resume", "affects", "set_by")}
        return dataclasses.replace(self, **found)

    def limits(self, *words: str) -> list[str]:
        """Return the limits as text.

        Args:
            words: for `at_least`, `above`, `below` and, if it is wanted, `at_most`.
        """
        numbers = (self.at_least, self.above, self.below, self.at_most)
        return [f"{word} {number:,}" for word, number in zip(words, numbers, strict=False) if number is not None]


def key(default: ValueT, **metadata: Any) -> ValueT:
    """Return the field of a key with this default, of which every instance gets a copy, and with `KeyMetadata`."""
    given: dict[str, Any] = {"metadata": {"key": KeyMetadata(**metadata)}}
    if isinstance(default, list | dict) or dataclasses.is_dataclass(default):
        return cast(ValueT, dataclasses.field(default_factory=lambda: copy.deepcopy(default), **given))
    field: ValueT = dataclasses.field(default=default, **given)
    return field


class Key(NamedTuple):
    """A key of a schema."""

    schema: Any  # its type
    metadata: KeyMetadata  # with what its block has
    field: dataclasses.Field[Any]
    owner: type  # the dataclass of the field

    def problem(self, value: Any) -> str | None:
        """Return why a value of the right type is refused; None if it is not."""
        metadata = self.metadata
        if metadata.choices and value not in (*metadata.choices, None):
            close = nearest(str(value), metadata.choices)
            meant = f"; did you mean {close}?" if close else ""
            return f"is {format_value(value)}, but must be one of {', '.join(metadata.choices)}{meant}"
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        if (
            not math.isfinite(value)
            or (metadata.at_least is not None and value < metadata.at_least)
            or (metadata.above is not None and value <= metadata.above)
            or (metadata.below is not None and value >= metadata.below)
        ):
            must = " and ".join(metadata.limits("at least", "greater than", "less than")) or "a finite number"
            return f"is {value!r}, but must be {must}" + (
                "; use null for none" if is_optional(self.schema) and value <= 0 else ""
            )
        if metadata.at_most is not None and value > metadata.at_most:
            return f"is {format_value(value)}, but must be at most {metadata.at_most:,}"
        return None


@cache
def keys_of(schema: type) -> dict[str, Key]:
    """Return the keys of a dataclass at any depth by dotted name; a block comes before its keys, `groups[].lr`."""
    return dict(_walk(schema, "", KeyMetadata()))


def _walk(schema: type, prefix: str, of_block: KeyMetadata) -> Iterator[tuple[str, Key]]:
    kinds = fields_of(schema) or {}
    for field in dataclasses.fields(schema):
        kind, metadata = kinds[field.name], field.metadata.get("key", KeyMetadata()).inside(of_block)
        yield f"{prefix}{field.name}", Key(kind, metadata, field, schema)
        if block := block_of(kind):
            yield from _walk(block, f"{prefix}{field.name}{'[]' if item_schema(kind) else ''}.", metadata)


def find_key(schema: type, name: str) -> Key | None:
    """Return a key by its name, `groups[0].lr` or `groups.0.lr`; None for one inside a block without a schema."""
    return keys_of(schema).get(re.sub(r"\[\d+\]|\.\d+(?=\.|$)", "[]", name).removesuffix("[]"))


def type_of(schema: type, name: str) -> Any:
    """Return the type of a key; Any if it has none in the schema, as the options of a memory."""
    found = find_key(schema, name)
    return Any if found is None else found.schema


def is_path(schema: type, name: str) -> bool:
    """Return whether a key of this name is a path, of MLflow or of another program."""
    found = find_key(schema, name)
    return found is not None and found.metadata.is_place


def with_homes(tree: Any, chooses: Callable[[str], bool], name: str = "") -> Any:
    """Return a tree in which a leading `~` of paths is the home directory.

    Args:
        chooses: returns whether the key of a text is a path.
        name: of the tree.
    """
    if isinstance(tree, Mapping):
        return {part: with_homes(child, chooses, join(name, part)) for part, child in tree.items()}
    if isinstance(tree, list):
        return [with_homes(child, chooses, f"{name}[{index}]") for index, child in enumerate(tree)]
    return at_home(tree) if isinstance(tree, str) and "~" in tree and chooses(name) else tree


def check_values(schema: type, tree: Mapping[str, Any], block: str = "") -> Iterator[Problem]:
    """Yield the values that violate limits and choices.

    Args:
        tree: plain and resolved, with values of the right types.
        block: full key of the tree, for messages.
    """
    for name, value in flatten(tree).items():
        found = find_key(schema, name)
        if found is not None and (text := found.problem(value)):
            yield Problem(f"{block}.{name}" if block else name, text)
