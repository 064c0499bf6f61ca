"""Texts that continue prompts until one of their stop strings, in several lanes at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.generation.generate import Sampling, stream
from dist_mem.generation.reading import read, select, start
from dist_mem.generation.text import TextWriter
from dist_mem.runtime.progress import Progress


class Prompt(NamedTuple):
    """A text to continue."""

    tokens: tuple[int, ...]  # ids without BOS
    until: tuple[str, ...]  # the text ends before the first of them
    max_tokens: int
    sampling: Sampling


def write_until(trained: TrainedModel, prompts: Sequence[Prompt], *, num_lanes: int, shown: bool = False) -> list[str]:
    """Continue every prompt, `num_lanes` at a time; prompts of similar length share a batch, equal ones are read once.

    The number of a prompt is its random number stream, so that equal prompts differ unless the temperature is 0.

    Args:
        shown: print the progress to stderr.
    """
    alike: dict[tuple[Sampling, int], list[int]] = {}
    for number, prompt in enumerate(prompts):
        alike.setdefault((prompt.sampling, prompt.max_tokens), []).append(number)
    texts = [""] * len(prompts)
    with Progress(len(prompts), "writing", unit="texts", shown=shown) as progress:
        for numbers in alike.values():
            numbers.sort(key=lambda number: (len(prompts[number].tokens), prompts[number].tokens))
            for begin in range(0, len(numbers), num_lanes):
                chosen = numbers[begin : begin + num_lanes]
                written = _write(trained, [prompts[number] for number in chosen], chosen)
                for number, text in zip(chosen, written, strict=True):
                    texts[number] = text
                progress.add(len(chosen))
    return texts


def _write(trained: TrainedModel, prompts: Sequence[Prompt], streams: Sequence[int]) -> list[str]:
    """Continue prompts with the same sampling and length in one batch."""
    lanes = {tokens: lane for lane, tokens in enumerate(dict.fromkeys(prompt.tokens for prompt in prompts))}
    rows = [torch.tensor(tokens, dtype=torch.int64) for tokens in lanes]
    reading = read(trained, start(trained, len(rows)), rows)
    writers = [TextWriter(trained.tokenizer) for _ in prompts]
    ended = [False] * len(prompts)
    steps = stream(
        trained,
        select(reading, [lanes[prompt.tokens] for prompt in prompts]),
        num_tokens=prompts[0].max_tokens,
        sampling=prompts[0].sampling,
        streams=streams,
    )
    for step in steps:
        for lane, token in enumerate(step.tokens.tolist()):
            if not ended[lane]:
                ended[lane] = _add(writers[lane], token, prompts[lane].until)
        if all(ended):
            break
    for writer in writers:
        writer.end()
    return [before_stop(writer.text, prompt.until) for writer, prompt in zip(writers, prompts, strict=True)]


def _add(writer: TextWriter, token: int, until: Sequence[str]) -> bool:
    """Add a token, and return whether the text now contains a stop string."""
    longest = max(map(len, until), default=0)
    begin = max(0, len(writer.text) - longest)
    writer.add(token)
    return any(stop in writer.text[begin:] for stop in until)


def before_stop(text: str, until: Sequence[str]) -> str:
    """Return the text before the first of the stop strings."""
    places = [place for stop in until if (place := text.find(stop)) >= 0]
    return text[: min(places, default=len(text))]
