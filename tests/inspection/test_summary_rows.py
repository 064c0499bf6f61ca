"""Memories that hold something of all the past: what they show of tokens, and of what belongs to no token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dist_mem.memory.block_recurrent import BlockRecurrent
from dist_mem.memory.infini import Infini
from dist_mem.memory.parts.inspection import Inspection, Rows, Spans, of_tokens
from dist_mem.memory.parts.inspector import Inspector
from dist_mem.memory.rmt import RecurrentMemory
from tests.support.contract_cases import LANES, SEG_LEN, fresh_state, full_lanes, random_segments, read, small_model


def inspected(case: str) -> list[list[Inspection]]:
    """What every layer of a small model read, by segment."""
    model = small_model(case)
    found = []
    with torch.no_grad(), Inspector(model.memories()) as inspector:
        for _ in read(model, random_segments(), fresh_state(model)):
            found.append(list(inspector.layers))
            inspector.commit()
    return found


@pytest.mark.parametrize("case", ["rmt, cache", "rmt, read cache", "rmt, not at end"])
def test_a_cached_row_is_that_of_its_token_or_of_all_before_its_place(case: str) -> None:
    """Against a list of all rows that the first block has read, each with its tokens."""
    model = small_model(case)
    memory = model.memories()[0]
    assert isinstance(memory, RecurrentMemory)
    num_tokens, mem_len, inputs = memory.options.num_tokens, memory.options.mem_len, list[Tensor]()
    memory.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    labels: list[tuple[int, int]] = []
    with torch.no_grad():
        for number, output in enumerate(read(model, random_segments(), fresh_state(model)), start=1):
            first, after = (number - 1) * SEG_LEN, number * SEG_LEN
            labels += [(0, first)] * num_tokens + [(token, token + 1) for token in range(first, after)]
            labels += [(0, after)] * memory.num_after
            cache, newest = output.state.blocks[0].cache, labels[-mem_len:]
            spans, of_token = memory.cache_spans(cache.length, torch.full((LANES,), after))
            assert torch.equal(cache.hidden[:, -len(newest) :], torch.cat(inputs, dim=1)[:, -mem_len:])
            found = torch.stack([part[:, -len(newest) :] + after for part in spans], dim=-1)
            held = [label if label[0] < label[1] else (label[1], label[1]) for label in newest]
            assert found.tolist() == [[list(label) for label in held]] * LANES
            assert (spans.begin == spans.end)[:, : -len(newest)].all()
            assert of_token[-len(newest) :].tolist() == [
                place % memory.num_rows in range(num_tokens, num_tokens + SEG_LEN)
                for place in range(len(labels) - len(newest), len(labels))
            ]


@pytest.mark.parametrize("case", ["rmt", "infini"])
def test_a_summary_is_of_all_tokens_before_the_segment(case: str) -> None:
    for number, layers in enumerate(inspected(case)):
        for layer in layers:
            weights, (begin, end) = layer.rows["summary"]
            assert (begin == -number * SEG_LEN).all() and (end == 0).all()
            assert bool(weights.any()) == (number > 0), "learned first rows, or an empty matrix, are of no token"


def test_the_weight_of_a_matrix_is_the_gate_of_the_forward() -> None:
    memory = small_model("infini").memories()[0]
    assert isinstance(memory, Infini)
    share = memory.beta.detach().sigmoid()
    for layers in inspected("infini")[1:]:
        weights = layers[0].rows["summary"].weights
        torch.testing.assert_close(weights, share[:, None, None, None].expand_as(weights))


@pytest.mark.parametrize("row", range(SEG_LEN // 2))
def test_a_kept_row_has_weight_for_the_queries_whose_output_it_changes(row: int) -> None:
    """In the first window, whose tokens read the states as they were before it."""
    model = small_model("block_recurrent")
    *_, output = read(model, random_segments(), fresh_state(model))
    memory, state = model.memories()[0], output.state.blocks[0]
    assert isinstance(memory, BlockRecurrent)
    x = torch.randn(LANES, SEG_LEN, 12, generator=torch.Generator().manual_seed(0))
    values = state.values.clone()
    values[:, :, row] += 1.0
    with torch.no_grad():
        before, after = (memory(x, each, full_lanes()).y for each in (state, state._replace(values=values)))
        weights, spans = memory.inspect(x, state, full_lanes()).rows["memory"]
    changed, window = (before != after).any(-1), slice(0, memory.window)
    assert torch.equal(changed[:, window], (weights[..., row] > 0).any(0)[:, window])
    assert (spans.begin[:, row] == row - memory.window).all()


def test_what_is_read_of_no_token_is_left_out_of_the_shares() -> None:
    weights = torch.tensor([[[[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]]])
    spans = Spans(torch.tensor([[0, -2, -1]]), torch.tensor([[0, -1, 0]]))
    found = of_tokens({"memory": Rows(weights, spans)})["memory"].weights
    assert torch.equal(found, torch.tensor([[[[0.0, 0.375, 0.625], [0.0, 0.0, 0.0]]]]))
