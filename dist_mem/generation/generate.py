"""Generate text token by token: a token costs a row, or the open segment, whatever the length of the text read before.

The next token is the likeliest, or drawn by temperature, from the k likeliest (top-k) or from the nucleus (top-p).
A text also ends with the EOS of a published model's tokenizer, in every lane on its own (`Tokenizer.end_ids`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_mem.evaluation.scoring import EvaluationError
from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.arguments import check_ids, check_int, wrong_type
from dist_mem.generation.reading import Reading, check_reading
from dist_mem.generation.writing import write
from dist_mem.memory.parts.counter_hash import uniform
from dist_mem.runtime.terminal import count_noun

DRAWS = 64  # steps whose random numbers are computed at once


class NextTokens(NamedTuple):
    """One generation step: the next token of every lane that has not stopped."""

    tokens: Tensor  # (B,) int64, on the CPU; undefined in lanes that have stopped
    writing: Tensor  # (B,) bool, on the CPU: lanes that had not stopped before this token
    reading: Reading  # after reading these tokens


class GenerationResult(NamedTuple):
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
) -> Iterator[NextTokens]:
    """Generate token by token in every lane, until `num_tokens` or a stop token.

    Args:
        stop_ids: the first of these tokens, or of the tokenizer's `end_ids`, ends a lane; the lane reads it too.
        streams: random number stream of each lane, see `choose`; None: 0, 1, ..., so that lanes with the same prompt
            differ.
        first_step: index of the first draw; a second call on the same streams passes the number of draws of the first.

    Raises:
        EvaluationError: by a step; the log-probabilities of its token are nan.
        TypeError, ValueError: an argument is invalid; the message names it.
    """
    num_lanes = len(check_reading(trained, reading).open_len)
    check_int("num_tokens", num_tokens, least=0)
    check_int("first_step", first_step, least=0)
    if not isinstance(sampling, Sampling):
        raise wrong_type("sampling", sampling, "a Sampling, as dist_mem.Sampling(temperature=0.8)")
    check_ids("stop_ids", stop_ids, trained.tokenizer.vocab_size)
    if streams is not None and len(streams) != num_lanes:
        numbers, lanes = count_noun(len(streams), "number"), count_noun(num_lanes, "lane")
        raise ValueError(f"streams has {numbers}, but the reading has {lanes}")
    steps = range(first_step, first_step + num_tokens)
    stops = trained.tokenizer.end_ids.union(stop_ids)
    return _stream(trained, reading, steps, sampling, stops, range(num_lanes) if streams is None else streams)


def _stream(
    trained: TrainedModel,
    reading: Reading,
    steps: range,
    sampling: Sampling,
    stop_ids: Collection[int],
    streams: Sequence[int],
) -> Iterator[NextTokens]:
    mask = _text_mask(trained, stop_ids)
    numbers = torch.as_tensor(streams, dtype=torch.int64)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.int64)
    writing = torch.ones(len(numbers), dtype=torch.bool)
    written = write(trained, reading)
    for draw in _draws(sampling, numbers, steps):
        log_probs = written.next_log_probs()
        if (log_probs.isnan().any(dim=-1).cpu() & writing).any():  # those of stopped lanes are undefined
            raise EvaluationError("the log-probability of a next token is nan: the model has diverged")
        allowed = log_probs + mask
        tokens = choose(allowed, sampling, draw=draw)
        written.append(tokens, writing)
        yield NextTokens(tokens, writing, written.reading)
        if stop_ids:
            writing = writing & ~torch.isin(tokens, stops)
            if not writing.any():
                return


def _draws(sampling: Sampling, streams: Tensor, steps: range) -> Iterator[Tensor]:
    """Yield `draw_uniform` of every step; many are computed at once, because each is a hundred small operations."""
    for begin in range(0, len(steps), DRAWS):
        part = torch.tensor(steps[begin : begin + DRAWS])
        yield from draw_uniform(sampling, stream=streams, step=part[:, None])


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
) -> GenerationResult:
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
    return GenerationResult(
        [torch.stack(lane) if lane else torch.zeros(0, dtype=torch.int64) for lane in written], reading
    )


@dataclass(frozen=True)
class Sampling:
    """Sampling settings: temperature is applied first, then top-k, then top-p on the remaining tokens."""

    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int | None = None  # only the k likeliest tokens; None: all
    top_p: float | None = None  # only the likeliest tokens that together reach this probability; None: all
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise TypeError for a value that is not a number, and ValueError for a number out of range."""
        for name, value in vars(self).items():
            if not (_is_number(name, value) or (value is None and name.startswith("top_"))):
                raise TypeError(f"{name} is {value!r}, but must be {'an integer' if name in _INTEGERS else 'a number'}")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}, but must be 0 (greedy) or more")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}, but must be at least 1")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}, but must be greater than 0 and at most 1")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}, but must be a signed number of 64 bits")


_INTEGERS = ("top_k", "seed")


def _is_number(name: str, value: Any) -> bool:
    return isinstance(value, int if name in _INTEGERS else int | float) and not isinstance(value, bool)


def draw_uniform(sampling: Sampling, *, stream: Tensor, step: Tensor | int) -> Tensor:
    """Return random numbers in [0, 1), float64 on the CPU, which (seed, stream, step) determine.

    Args:
        stream: int64, random number stream of each lane.
        step: int64 or an int, index of the draw in the stream; both together have the shape of the result.
    """
    streams, steps = torch.broadcast_tensors(stream, torch.as_tensor(step))
    return uniform(1, sampling.seed, streams.flatten(), steps.flatten()).view(streams.shape)


def choose(log_probs: Tensor, sampling: Sampling, *, draw: Tensor) -> Tensor:
    """Draw one token per lane, (B,) int64 on the CPU, independent of other lanes.

    Args:
        log_probs: (B, V), of the next token; -inf for tokens that must not be drawn.
        draw: (B,) float64, see `draw_uniform`.
    """
    if sampling.temperature == 0.0:
        return log_probs.argmax(dim=-1).cpu()
    probs = kept_probabilities(log_probs, sampling)
    # In vocabulary order: in order of probability, another tie-break would map the same draw to another token.
    total = probs.cumsum(dim=-1)
    end = total[:, -1:].contiguous()
    token = torch.searchsorted(total, draw.to(probs.device)[:, None] * end, right=True).squeeze(1)
    last = torch.searchsorted(total, end).squeeze(1)  # that can be drawn; rounding may exceed it
    return torch.minimum(token, last).cpu()


def kept_probabilities(log_probs: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities of the tokens that may be drawn, 0 for the others: (B, V) float64, rows sum to 1.

    The nucleus is the smallest set of likeliest tokens whose probability is at least p (Holtzman et al. 2020, "The
    curious case of neural text degeneration", sec. 3.1), so it includes the first token that reaches p.
    """
    # In place where it can be: of many lanes, each tensor would be pages that the system has to fill with zeros first.
    scores = log_probs.to(torch.float64) - log_probs.amax(dim=-1, keepdim=True)
    scores /= sampling.temperature
    if sampling.top_k is None and sampling.top_p is None:
        return scores.softmax(dim=-1)
    order = likeliest_first(log_probs)
    ranked = scores.gather(-1, order)
    if sampling.top_k is not None:
        ranked[:, sampling.top_k :] = -math.inf
    probs = ranked.softmax(dim=-1)
    if sampling.top_p is not None:
        before = probs.cumsum(dim=-1)[:, :-1]  # of all but the likeliest token, which is always in
        probs[:, 1:].masked_fill_(before >= sampling.top_p, 0.0)
        probs /= probs.sum(dim=-1, keepdim=True)
    return torch.empty_like(probs).scatter_(-1, order, probs)


def likeliest_first(log_probs: Tensor) -> Tensor:
    """Return the order of a stable descending sort of log-probabilities (B, V): (B, V) int64.

    Of float32 on a CPU, number and place are put into one int64 each, which numpy sorts by vector instructions: in a
    sixth to a tenth of torch's time for 4,096 tokens.
    """
    if log_probs.dtype != torch.float32 or log_probs.device.type != "cpu":
        return log_probs.argsort(dim=-1, descending=True, stable=True)
    bits = (log_probs + 0.0).view(torch.int32)  # + 0.0: -0.0 is no other number than 0.0
    falling = torch.where(bits < 0, bits ^ -(2**31), ~bits)  # as integers in the opposite order of the numbers
    keys = falling.long().bitwise_left_shift_(32).bitwise_or_(torch.arange(log_probs.shape[-1]))
    keys.numpy().sort(axis=-1)
    return keys.bitwise_and_(2**32 - 1)
