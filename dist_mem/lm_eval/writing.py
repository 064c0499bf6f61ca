"""Texts that continue prompts until one of their stop strings, in several lanes at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from dist_mem.evaluation.trained_model import TrainedModel, init_state
from dist_mem.generation.generate import Sampling, stream
from dist_mem.generation.reading import Reading, with_open_segment
from dist_mem.generation.text import TextWriter
from dist_mem.lm_eval.segment_tree import Branches, Node, add_text, copy_lane, join_lanes, read_tree
from dist_mem.model import LMState
from dist_mem.runtime.progress import Progress

_MAX_BATCHES_WAITING = 2  # each prompt that waits for others of its length may keep a memory


class Prompt(NamedTuple):
    """A text to continue."""

    tokens: np.ndarray  # (num_tokens,) ids of any integer type, without BOS
    until: tuple[str, ...]  # the text ends before the first of them
    max_tokens: int
    sampling: Sampling


def write_until(
    trained: TrainedModel,
    prompts: Mapping[int, Prompt],
    *,
    num_lanes: int,
    shown: bool = False,
    finished: Callable[[int, str], None] = lambda number, text: None,
) -> dict[int, str]:
    """Continue every prompt, `num_lanes` at a time; the segments with which several prompts begin are read once.

    The number of a prompt is its random number stream, so that equal prompts differ unless the temperature is 0.

    Args:
        shown: print the progress to stderr.
        finished: called with the number of a prompt and its text as soon as that is written.
    """
    texts: dict[int, str] = {}
    with Progress(len(prompts), "writing", unit="texts", shown=shown) as progress:
        for numbers, reading in _read(trained, prompts, num_lanes=num_lanes):
            chosen = [prompts[number] for number in numbers]
            for number, text in zip(numbers, _write(trained, chosen, reading, numbers), strict=True):
                texts[number] = text
                finished(number, text)
            progress.add(len(numbers))
    return texts


def _read(
    trained: TrainedModel, prompts: Mapping[int, Prompt], *, num_lanes: int
) -> Iterator[tuple[list[int], Reading]]:
    """Yield the numbers of up to `num_lanes` prompts that are written alike, and the reading of them, one lane each.

    All prompts are one tree: the questions of several tasks about one book differ in `max_tokens`.
    """
    seg_len, empty = trained.config.train.seg_len, init_state(trained)
    roots: Branches = {}
    ends: dict[Node, list[int]] = {}  # prompts of which this is the last complete segment before the open one
    opened: dict[int, torch.Tensor] = {}
    # Prompts with the memory of all their complete segments, by what one batch has in common.
    ready: dict[tuple[Sampling, int], list[tuple[int, LMState]]] = {}

    def add_ready(number: int, state: LMState) -> None:
        ready.setdefault((prompts[number].sampling, prompts[number].max_tokens), []).append((number, state))

    def take(alike: list[tuple[int, LMState]]) -> tuple[list[int], Reading]:
        chosen, alike[:] = alike[:num_lanes], alike[num_lanes:]
        numbers = [number for number, _ in chosen]
        state = join_lanes([state for _, state in chosen])
        return numbers, with_open_segment(state, [opened.pop(number) for number in numbers], seg_len=seg_len)

    for number, prompt in prompts.items():
        inputs = np.concatenate(([trained.tokenizer.bos_id], prompt.tokens)).astype(np.int32)
        complete = (len(inputs) - 1) // seg_len  # the last input is in the open segment, also where it fills it
        edges = range(0, complete * seg_len + 1, seg_len)
        opened[number] = torch.from_numpy(inputs[edges[-1] :].astype(np.int64))
        path = [node for _, node in add_text(roots, inputs, edges, [seg_len] * complete)]
        if path:
            ends.setdefault(path[-1], []).append(number)
        else:
            add_ready(number, empty)
    for nodes, output in read_tree(trained, roots, num_lanes=num_lanes):
        for lane, node in enumerate(nodes):
            if node in ends:
                state = copy_lane(output.state, lane)
                for number in ends.pop(node):
                    add_ready(number, state)
        while (alike := max(ready.values(), key=len, default=[])) and (
            len(alike) >= num_lanes or sum(map(len, ready.values())) > _MAX_BATCHES_WAITING * num_lanes
        ):
            yield take(alike)
    for alike in ready.values():
        while alike:
            yield take(alike)


def _write(trained: TrainedModel, prompts: Sequence[Prompt], reading: Reading, streams: Sequence[int]) -> list[str]:
    """Continue prompts with the same sampling and length in one batch."""
    writers = [TextWriter(trained.tokenizer) for _ in prompts]
    ended = [False] * len(prompts)
    steps = stream(trained, reading, num_tokens=prompts[0].max_tokens, sampling=prompts[0].sampling, streams=streams)
    for step in steps:
        for lane in step.writing.nonzero().flatten().tolist():
            if not ended[lane]:
                ended[lane] = _add(writers[lane], int(step.tokens[lane]), prompts[lane].until)
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
