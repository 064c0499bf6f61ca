"""Llamas with memories: the contract, FLOPs, and memories that are refused."""

from __future__ import annotations

import pytest

from tests.support.contract_cases import check_rules
from tests.support.counted_flops import check_small
from tests.support.gpt2_models import build
from tests.support.llama_models import CASES, llama_config, llama_subject
from tests.support.messages import refused


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
