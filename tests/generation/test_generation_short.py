"""Open segments are given to a model with fewer than T rows where its memories take them: nothing changes but time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_mem.config.memory_blocks import PER_BLOCK
from dist_mem.contract.subject import VOCAB, Size, Subject
from dist_mem.generation.reading import ROW_STEP as STEP
from dist_mem.generation.reading import num_rows
from dist_mem.memory import memory_class
from dist_mem.model import MemoryLM
from tests.support.contract_cases import CASES, case_params, memories_of
from tests.support.contract_cases import SEG_LEN as CASES_LEN
from tests.support.paths import EXAMPLES

SEG_LEN = 3 * STEP


def model_of(block: dict[str, Any]) -> MemoryLM:
    return Subject(lambda _: block, Size(lanes=2, seg_len=SEG_LEN, segments=4, layers=3)).model().double().eval()


def blocks() -> dict[str, dict[str, Any]]:
    """The cases of the contract tests whose memories compute less than T rows, in the options that fit this segment."""
    longest = {name: max(memory.min_seg_len for memory in memories_of(name)) for name in CASES}
    return {name: fitted(CASES[name]) for name, length in longest.items() if length < CASES_LEN}


def fitted(block: dict[str, Any]) -> dict[str, Any]:
    if block["kind"] == PER_BLOCK:
        return {name: part if name == "kind" else fitted(part) for name, part in block.items()}
    small = memory_class(block["kind"]).small_options
    return {**block, **dict(small(SEG_LEN).items() - small(CASES_LEN).items())}  # what depends on the length


@pytest.mark.parametrize("case", case_params(blocks()))
@torch.no_grad()
def test_fewer_rows_give_the_same_outputs(case: str) -> None:
    model = model_of(blocks()[case])
    generator = torch.Generator().manual_seed(1)
    state = model.init_state(torch.arange(2), "cpu", torch.float64)
    for number in range(5):  # from empty memories to full ones
        tokens = torch.randint(0, VOCAB, (2, SEG_LEN), generator=generator)
        for longest in (2, STEP, STEP + 1):
            valid_len = torch.tensor([longest, 1])
            rows = num_rows(model, longest)
            assert longest <= rows < SEG_LEN
            whole = model.features(tokens, valid_len, state=state).hidden
            short = model.features(tokens[:, :rows], valid_len, state=state).hidden
            for lane, length in enumerate(valid_len.tolist()):
                torch.testing.assert_close(short[lane, :length], whole[lane, :length], rtol=0, atol=1e-11)
        state = model.features(tokens, torch.tensor([SEG_LEN, SEG_LEN if number else 0]), state=state).state


def test_a_complete_segment_has_all_its_rows() -> None:
    model = model_of({"kind": "none"})
    assert [num_rows(model, open_len) for open_len in (1, STEP, STEP + 1, 2 * STEP + 1, SEG_LEN)] == [
        STEP, STEP, 2 * STEP, SEG_LEN, SEG_LEN
    ]  # fmt: skip


def test_compression_has_as_many_rows_as_one_compressed_row_takes() -> None:
    block = {"kind": "compressive", "mem_len": SEG_LEN, "cmem_len": 4, "compression_rate": STEP + 1}
    assert num_rows(model_of(block), 1) == 2 * STEP


def test_a_memory_gets_whole_segments_unless_it_says_otherwise() -> None:
    assert num_rows(model_of({"kind": "transformer_xl", "mem_len": SEG_LEN}), 1) == STEP
    assert num_rows(model_of({"kind": str(EXAMPLES / "averages.py:Averages")}), 1) == SEG_LEN
    assert num_rows(model_of(CASES["infinite"]), 1) == SEG_LEN
    assert [num_rows(model_of({"kind": "rmt", "num_tokens": number}), 1) for number in (2, 3)] == [STEP, SEG_LEN]
