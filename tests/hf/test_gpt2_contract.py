"""The memory contract in GPT-2: every rule on every memory, found by file name, and on maps of blocks."""

from __future__ import annotations

from typing import Any

import pytest

from dist_mem.contract.subject import CheckedMemory
from dist_mem.memory import memory_kinds
from tests.support.contract_cases import CASES, SEG_LEN, SIZE, check_rules, small_block

GPT2 = {"kind": "gpt2", "num_positions": SEG_LEN, "d_head": None}


def in_one_block(kind: str, **options: Any) -> dict[str, Any]:
    """Return GPT-2's own attention in all blocks but the second."""
    return {"kind": "per_block", "default": {"kind": "causal"}, "1": small_block(kind, **options)}


BLOCKS = {
    **{kind: CASES[kind] for kind in memory_kinds()},
    "infinite over causal": CASES["infinite over causal"],
    "infinite, gibbs": CASES["infinite, gibbs"],
    "a block with infinite": in_one_block("infinite", over={"kind": "causal"}),
    "a block with infini": in_one_block("infini"),
    "a block with memorizing": in_one_block("memorizing"),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_memory_keeps_the_contract_in_gpt2(case: str) -> None:
    check_rules(CheckedMemory(lambda _: BLOCKS[case], SIZE, keys=GPT2))
