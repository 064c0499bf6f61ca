"""Argument checks for the functions behind the Python API.

A wrong type raises TypeError and a wrong value ValueError, before any computation. The message contains the argument,
its value and the accepted values.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dist_mem.evaluation.trained_model import TrainedModel

ROWS = "a list with one row of ids per lane, as [trained.tokenizer.encode('It was')]"


def wrong_type(name: str, value: Any, wanted: str) -> TypeError:
    """Return the TypeError for an argument of a wrong type."""
    return TypeError(f"{name} is {reprlib.repr(value)}, but must be {wanted}")


def check_trained(trained: Any) -> None:
    """Raise TypeError unless `trained` is a TrainedModel."""
    if not isinstance(trained, TrainedModel):
        raise wrong_type("trained", trained, "a model that load_model returned")


def check_int(name: str, value: Any, *, least: int) -> None:
    """Raise TypeError or ValueError unless `value` is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise wrong_type(name, value, "an int")
    if value < least:
        raise ValueError(f"{name} is {value}, but must be at least {least}")


def id_row(name: str, row: Any, vocab_size: int) -> Tensor:
    """Return a row of token ids as a tensor (num_tokens,) int64 on the CPU.

    Args:
        row: a sequence of ints, or an array or tensor of any integer type.

    Raises:
        TypeError: the elements are not integers.
        ValueError: the row has more than one dimension, or an id outside the vocabulary.
    """
    ids = row.detach().cpu().numpy() if isinstance(row, Tensor) else np.asarray(row)
    if ids.ndim == 0:
        raise wrong_type(name, row, "a row of ids")
    if ids.ndim > 1:
        raise ValueError(f"{name} has {ids.ndim} dimensions, but must be a row of ids")
    if len(ids) and not np.issubdtype(ids.dtype, np.integer):
        raise wrong_type(name, row, "a row of ids")
    check_ids(name, ids.tolist(), vocab_size)
    return torch.from_numpy(ids.astype(np.int64))


def check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Raise ValueError unless all ids are in the vocabulary."""
    for wrong in (token for token in ids if not 0 <= token < vocab_size):
        raise ValueError(f"{name} has the id {wrong}, but ids of this model range from 0 to {vocab_size - 1}")


def id_rows(name: str, rows: Any, *, num_lanes: int, vocab_size: int) -> list[Tensor]:
    """Return one row of token ids per lane. Raises as `id_row`, and ValueError for a wrong number of rows."""
    if isinstance(rows, str | bytes) or not hasattr(rows, "__len__"):
        raise wrong_type(name, rows, ROWS)
    found = [id_row(f"{name}[{lane}]", row, vocab_size) for lane, row in enumerate(rows)]
    if len(found) != num_lanes:
        lanes = counted(len(found), "lane")
        raise ValueError(f"{name} has rows for {lanes}, but the reading has {num_lanes}; give {ROWS}")
    return found


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 lane`, `2 lanes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
