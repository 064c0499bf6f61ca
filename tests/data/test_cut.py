"""`data.cut: end`: documents cut into segments from their end, so that the first one is the short one, and is kept."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dist_mem.block import model_spec
from dist_mem.config import ConfigError, change_config, load_config
from dist_mem.data.batch import IGNORE
from dist_mem.data.shard import Index
from dist_mem.memory import build_memory
from dist_mem.memory.infinite import Infinite
from dist_mem.model import MemoryLM
from tests.support.contract_cases import subject
from tests.support.counted_flops import check_small
from tests.support.messages import refused
from tests.support.published_infinite import layer_spec
from tests.support.scored_library import LENGTHS as SCORED_LENGTHS
from tests.support.scored_library import SEG_LEN as SCORED_LEN
from tests.support.scored_library import TOKENIZER, assert_same, make_config, make_document, score

OVER = {"kind": "infinite", "over": {"kind": "causal"}}
MEMORY = {**OVER, "num_basis": 16, "basis_widths": [0.05, 0.1], "num_samples": 12}
WIDTH = 8


@torch.no_grad()
def test_evaluation_scores_every_token_once_as_if_its_document_were_alone(index: Index) -> None:
    torch.manual_seed(0)
    config = make_config(model={"init_std": 0.3}, data={"cut": "end"})
    config = change_config(config, {"memory": MEMORY})
    model = MemoryLM(model_spec(config, TOKENIZER.vocab_size)).eval()
    report = score(index, model, cut="end")
    assert report.num_scored == index.num_tokens
    for number, length in enumerate(SCORED_LENGTHS):
        tokens = torch.from_numpy(make_document(number, length).tokens.astype(np.int64))
        inputs = torch.cat([torch.tensor([TOKENIZER.bos_id]), tokens[:-1]])
        state, total = model.init_state(torch.zeros(1, dtype=torch.int64), "cpu", torch.float32), 0.0
        short = length % SCORED_LEN
        sizes = ([short] if short else []) + [SCORED_LEN] * (length // SCORED_LEN)
        begin = 0
        for size in sizes:
            segment, targets = torch.zeros(1, SCORED_LEN, dtype=torch.int64), torch.full((1, SCORED_LEN), IGNORE)
            segment[0, :size], targets[0, :size] = inputs[begin : begin + size], tokens[begin : begin + size]
            output = model(segment, targets, torch.tensor([size]), state=state)
            state, total, begin = output.state, total + output.nll.double().sum().item(), begin + size
        assert report.documents[number].nll == pytest.approx(total, rel=1e-6)
    assert_same(score(index, model, num_lanes=7, micro_lanes=3, cut="end"), report)
    in_blocks = score(index, model, cut="end", blocks=True)
    num_segments = sum(-(-length // SCORED_LEN) for length in SCORED_LENGTHS)
    assert in_blocks.num_scored == index.num_tokens - num_segments


@pytest.mark.parametrize("padding", ["published", "none"])
@pytest.mark.parametrize("store", ["raw", "normed"])
def test_a_short_first_segment_enters_with_its_own_length(store: str, padding: str) -> None:
    """As in a memory for segments of that length; the second one is appended as ever."""
    seg_len, lengths = 6, torch.tensor([6, 1, 4])
    spec = layer_spec(d_model=WIDTH, num_heads=2, d_head=4, seg_len=seg_len)
    options = {**MEMORY, "store": store, "padding": padding, "memory_threshold": 10**6}  # signals of few rows may grow
    memory = build_memory(options, replace(spec, short_first=True)).double()
    assert isinstance(memory, Infinite)
    inputs = torch.randn(3, 3, seg_len, WIDTH, dtype=torch.float64)
    full = torch.full((3,), seg_len)
    state = memory(inputs[0], memory.init_state(torch.arange(3), "cpu", torch.float64), lengths).state
    second = memory(inputs[1], state, full).state
    third = memory(inputs[2], second, full).state
    assert second.num_tokens.tolist() == lengths.tolist() and third.num_tokens.tolist() == (lengths + 6).tolist()
    for lane, length in enumerate(lengths.tolist()):
        alone = build_memory(options, replace(spec, seg_len=length)).double()
        alone.load_state_dict(memory.state_dict())
        rows, one = inputs[0, lane : lane + 1, :length], torch.tensor([length])
        own = alone(rows, alone.init_state(torch.tensor([lane]), "cpu", torch.float64), one).state
        signal, num_tokens = alone.append_pending(own, torch.float64)
        torch.testing.assert_close(second.coefficients[lane], signal[0], rtol=0, atol=1e-10)
        later = second._replace(coefficients=signal.detach().expand(3, -1, -1))
        expected = memory.append_pending(later, torch.float64)[0][lane]
        torch.testing.assert_close(third.coefficients[lane], expected, rtol=0, atol=1e-10)
        assert num_tokens.tolist() == [length]


@pytest.mark.parametrize("case", ["infinite over causal", "infinite, as printed", "infinite, normed over causal"])
def test_flops_count_the_regression_of_the_first_segment(case: str) -> None:
    check_small(subject(case, cut="end"))


def test_streams_are_not_cut_from_their_end() -> None:
    with refused(ConfigError, "data.cut", "data.layout"):
        load_config(["train.steps=1", "data.cut=end", "data.layout=stream"])
