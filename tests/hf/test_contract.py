"""The memory contract in GPT-2 and Llama; FLOPs of Llamas, and memories that are refused."""

from typing import Any

import pytest

from dist_mem.contract.subject import CheckedMemory
from dist_mem.memory import memory_kinds
from tests.support import contract_cases
from tests.support.contract_cases import SEG_LEN, SIZE, check_rules, small_block
from tests.support.counted_flops import check_small
from tests.support.gpt2_models import build
from tests.support.llama_models import CASES, llama_config, llama_subject
from tests.support.messages import refused

GPT2 = {"kind": "gpt2", "num_positions": SEG_LEN, "d_head": None}


def in_one_block(kind: str, **options: Any) -> dict[str, Any]:
    """Return GPT-2's own attention in all blocks but the second."""
    return {"kind": "per_block", "default": {"kind": "causal"}, "1": small_block(kind, **options)}


BLOCKS = {
    **{kind: contract_cases.CASES[kind] for kind in memory_kinds()},
    "infinite over causal": contract_cases.CASES["infinite over causal"],
    "infinite, gibbs": contract_cases.CASES["infinite, gibbs"],
    "a block with infinite": in_one_block("infinite", over={"kind": "causal"}),
    "a block with infini": in_one_block("infini"),
    "a block with memorizing": in_one_block("memorizing"),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_memory_keeps_the_contract_in_gpt2(case: str) -> None:
    check_rules(CheckedMemory(lambda _: BLOCKS[case], SIZE, keys=GPT2))


@pytest.mark.parametrize("case", CASES)
def test_memories_keep_the_contract_with_rotary_positions(case: str) -> None:
    check_rules(llama_subject(case))


@pytest.mark.parametrize("case", CASES)
def test_the_count_equals_torchs_of_real_steps(case: str) -> None:
    check_small(llama_subject(case))


def test_memories_with_positions_of_their_own_are_refused() -> None:
    for memory, key in (
        ({"kind": "lamemo"}, "memory.kind"),
        ({"kind": "memorizing"}, "memory.kind"),
        ({"kind": "infinite", "over": {"kind": "lamemo"}}, "memory.over.kind"),
        ({"kind": "compressive", "positions": "alibi"}, "memory.positions"),
        ({"kind": "transformer_xl", "positions": "relative"}, "memory.positions"),
    ):
        with refused(ValueError, key):
            build(llama_config(memory, train={"seg_len": 64}))
