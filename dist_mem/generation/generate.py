"""Generate text token by token, with one forward pass per token whatever the length of the text read before."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.arguments import check_ids, check_int, counted, wrong_type
from dist_mem.generation.reading import Reading, append, check_reading, look_ahead
from dist_mem.generation.sampling import Sampling, choose


class Step(NamedTuple):
    """One generation step: the next token of every lane that has not stopped."""

    tokens: Tensor  # (B,) int64, on the CPU; undefined in lanes that have stopped
    writing: Tensor  # (B,) bool, on the CPU: lanes that had not stopped before this token
    reading: Reading  # after reading these tokens


class Generated(NamedTuple):
    """The result of `generate`."""

    tokens: list[Tensor]  # (num_tokens,) int64 per lane, including the stop token that ended it
    reading: Reading  # after the prompt and the tokens; generation can continue from it


def stream(
    trained: TrainedModel,
    reading: Reading,
    *,
    num_tokens: int,
    sampling: Sampling,
    stop_ids: Collection[int] = (),
    streams: Sequence[int] | None = None,
    first_step: int = 0,
) -> Iterator[Step]:
    """Generate token by token in every lane, until `num_tokens` or a stop token.

    Args:
        stop_ids: the first of these tokens ends a lane; the lane reads it too.
        streams: random number stream of each lane, see `choose`; None: 0, 1, ..., so that lanes with the same prompt
            differ.
        first_step: index of the first draw; a second call on the same streams passes the number of draws of the first.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
    """
    num_lanes = len(check_reading(trained, reading).open_len)
    check_int("num_tokens", num_tokens, least=0)
    check_int("first_step", first_step, least=0)
    if not isinstance(sampling, Sampling):
        raise wrong_type("sampling", sampling, "a Sampling, as dist_mem.Sampling(temperature=0.8)")
    check_ids("stop_ids", stop_ids, trained.tokenizer.vocab_size)
    if streams is not None and len(streams) != num_lanes:
        numbers, lanes = counted(len(streams), "number"), counted(num_lanes, "lane")
        raise ValueError(f"streams has {numbers}, but the reading has {lanes}")
    steps = range(first_step, first_step + num_tokens)
    return _stream(trained, reading, steps, sampling, stop_ids, range(num_lanes) if streams is None else streams)


def _stream(
    trained: TrainedModel,
    reading: Reading,
    steps: range,
    sampling: Sampling,
    stop_ids: Collection[int],
    streams: Sequence[int],
) -> Iterator[Step]:
    mask = _text_mask(trained, stop_ids)
    numbers = torch.as_tensor(streams, dtype=torch.int64)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.int64)
    writing = torch.ones(len(numbers), dtype=torch.bool)
    for step in steps:
        ahead = look_ahead(trained, reading)
        allowed = ahead.log_probs + mask
        tokens = choose(allowed, sampling, stream=numbers, step=step)
        reading = append(reading, tokens, ahead, grows=writing)
        yield Step(tokens, writing, reading)
        writing = writing & ~torch.isin(tokens, stops)
        if not writing.any():
            return


def _text_mask(trained: TrainedModel, stop_ids: Collection[int]) -> Tensor:
    """Return (V,): -inf for tokens without text that are no stop tokens, as BOS, which no document contains; else 0."""
    is_text = [bool(piece) or token in stop_ids for token, piece in enumerate(trained.tokenizer.pieces)]
    return torch.where(torch.tensor(is_text), 0.0, -math.inf).to(trained.device)


def generate(
    trained: TrainedModel,
    reading: Reading,
    *,
    num_tokens: int,
    sampling: Sampling,
    stop_ids: Collection[int] = (),
    streams: Sequence[int] | None = None,
    first_step: int = 0,
) -> Generated:
    """Generate as `stream`, and return all tokens at once."""
    steps = stream(
        trained,
        reading,
        num_tokens=num_tokens,
        sampling=sampling,
        stop_ids=stop_ids,
        streams=streams,
        first_step=first_step,
    )
    written: list[list[Tensor]] = [[] for _ in reading.open_len]
    for step in steps:
        reading = step.reading
        for lane in step.writing.nonzero().flatten().tolist():
            written[lane].append(step.tokens[lane])
    return Generated([torch.stack(lane) if lane else torch.zeros(0, dtype=torch.int64) for lane in written], reading)
