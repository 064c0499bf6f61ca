"""The memory contract (dist_mem/memory/base.py): every rule on every memory of the package, found by file name.

A new memory is tested as soon as its file is there; `small_options` says how it fits short segments. The rules
themselves stand in dist_mem/contract/. Rule 9, parity with published vectors, has a test file for each memory.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from dist_mem.memory import build_memory, memory_kinds
from tests.support.contract_cases import CASES, case_params, check_rules, subject, takes_short_first
from tests.support.messages import refused


@pytest.mark.parametrize(
    ("case", "norm"),
    [
        pytest.param(case, norm, marks=pytest.mark.core if norm == "pre" and case in memory_kinds() else ())
        for case, norm in product(CASES, ["pre", "post"])
    ],
)
def test_memory_keeps_the_contract(case: str, norm: str) -> None:
    check_rules(subject(case, norm))


@pytest.mark.parametrize("case", case_params(filter(takes_short_first, CASES)))
def test_memory_keeps_the_contract_with_short_first_segments(case: str) -> None:
    """Documents that are cut from their end (`data.cut`)."""
    check_rules(subject(case, cut="end"))


@pytest.mark.parametrize("case", case_params((case for case in CASES if not takes_short_first(case)), every=True))
def test_other_memories_refuse_documents_that_are_cut_from_their_end(case: str) -> None:
    with refused(ValueError, "data.cut"):
        subject(case, cut="end").model()


@pytest.mark.parametrize("case", case_params(every=True))
def test_tf32_is_refused_where_a_memory_computes_in_float32(case: str) -> None:
    """A regression whose errors would add up over a document; all other products of float32 may be rounded."""
    made = subject(case)
    memory = made.model().memories()[0]
    block, rounded = made.block(made.size.seg_len), replace(memory.spec, tf32=True)
    if memory.needs_exact_products:
        with refused(ValueError, "train.tf32"):
            build_memory(block, rounded)
    else:
        assert build_memory(block, rounded).spec.tf32


@pytest.mark.parametrize(("key", "value"), [("clamp_len", 1), ("same_length", True)])
@pytest.mark.parametrize("case", case_params(every=True))
def test_a_key_of_attention_changes_the_losses_or_is_refused(case: str, key: str, value: object) -> None:
    """A key without an effect would be recorded as the protocol of an evaluation."""
    plain = subject(case)
    keyed = replace(plain, keys={key: value})
    try:
        model = keyed.model()
    except ValueError as error:
        assert f"model.{key}" in str(error)
        return
    assert not torch.equal(keyed.losses(model), plain.losses(plain.model()))
