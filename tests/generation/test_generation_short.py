"""Open segments are given to a model with fewer than T rows where its memories take them: nothing changes but time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dist_mem.contract.subject import VOCAB, Size, Subject
from dist_mem.generation.short_segments import FEWEST, STEP, num_rows
from dist_mem.memory import memory_class
from dist_mem.memory.base import Memory
from dist_mem.model import MemoryLM
from tests.support.contract_cases import CASES

SEG_LEN = 3 * STEP


def blocks() -> dict[str, dict[str, Any]]:
    """The cases of the contract tests whose memories may be short, in the options that fit this segment."""
    kinds = {name: block for name, block in CASES.items() if memory_class(block["kind"]) in FEWEST}
    return {name: {**block, **memory_class(block["kind"]).small_options(SEG_LEN)} for name, block in kinds.items()}


def model_of(block: dict[str, Any]) -> MemoryLM:
    return Subject(lambda _: block, Size(lanes=2, seg_len=SEG_LEN, segments=4, layers=3)).model().double().eval()


@pytest.mark.parametrize("case", blocks())
@torch.no_grad()
def test_fewer_rows_give_the_same_outputs(case: str) -> None:
    model = model_of(blocks()[case])
    generator = torch.Generator().manual_seed(1)
    state = model.init_state(torch.arange(2), "cpu", torch.float64)
    for number in range(5):  # from empty memories to full ones
        tokens = torch.randint(0, VOCAB, (2, SEG_LEN), generator=generator)
        for longest in (2, STEP, STEP + 1):
            valid_len = torch.tensor([longest, 1])
            rows = num_rows(model, longest, seg_len=SEG_LEN)
            assert longest <= rows < SEG_LEN
            whole = model.features(tokens, valid_len, state=state).hidden
            short = model.features(tokens[:, :rows], valid_len, state=state).hidden
            for lane, length in enumerate(valid_len.tolist()):
                torch.testing.assert_close(short[lane, :length], whole[lane, :length], rtol=0, atol=1e-11)
        state = model.features(tokens, torch.tensor([SEG_LEN, SEG_LEN if number else 0]), state=state).state


def test_a_complete_segment_has_all_its_rows() -> None:
    model = model_of({"kind": "none"})
    assert [num_rows(model, longest, seg_len=SEG_LEN) for longest in (1, STEP, STEP + 1, 2 * STEP + 1, SEG_LEN)] == [
        STEP, STEP, 2 * STEP, SEG_LEN, SEG_LEN
    ]  # fmt: skip
    assert num_rows(model, 40, seg_len=40) == 40


def test_compression_has_as_many_rows_as_one_compressed_row_takes() -> None:
    block = {"kind": "compressive", "mem_len": SEG_LEN, "cmem_len": 4, "compression_rate": STEP + 1}
    assert num_rows(model_of(block), 1, seg_len=SEG_LEN) == 2 * STEP


def test_memories_that_were_not_tried_get_whole_segments() -> None:
    class Unknown(memory_class("transformer_xl")):  # type: ignore[misc]
        pass

    model = model_of({"kind": "transformer_xl", "mem_len": SEG_LEN})
    assert num_rows(model, 1, seg_len=SEG_LEN) == STEP
    last = model.blocks[-1]
    assert isinstance(last.memory, Memory)
    last.memory = Unknown(last.memory.spec, last.memory.options)
    assert num_rows(model, 1, seg_len=SEG_LEN) == SEG_LEN
    assert num_rows(model_of(CASES["infinite"]), 1, seg_len=SEG_LEN) == SEG_LEN
    assert num_rows(torch.nn.Linear(1, 1), 1, seg_len=SEG_LEN) == SEG_LEN
