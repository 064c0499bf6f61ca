"""The memory contract (dist_mem/memory/base.py): every rule on every memory of the package, found by file name.

A new memory is tested as soon as its file is there; `small_options` says how it fits segments of SEG_LEN tokens. Rule
9, parity with published vectors, has a test file for each memory.
"""

from __future__ import annotations

import pytest
import torch
from contract_cases import (
    CASES,
    LANES,
    SEG_LEN,
    SEGMENTS,
    VOCAB,
    WIDTH,
    Partitioned,
    assert_same,
    copied,
    fresh_state,
    full_lanes,
    random_segments,
    read,
    small_model,
    total_loss,
    warm_state,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from dist_mem.data.batch import IGNORE
from dist_mem.memory.base import named_tensors
from dist_mem.model import reset_lanes

every_memory = pytest.mark.parametrize("case", CASES)
every_norm = pytest.mark.parametrize("norm", ["pre", "post"])


@every_memory
def test_rule_1_forward_changes_nothing_it_was_given(case: str) -> None:
    model = small_model(case)
    state = warm_state(model)
    before = copied(state)
    parameters = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x, _ = model.stem(torch.randn(LANES, SEG_LEN, WIDTH), state.stem)
    inputs, valid_len = x.clone(), full_lanes()
    for block, block_state in zip(model.blocks, state.blocks, strict=True):
        block.memory(x, block_state, valid_len)
    assert_same(state, before)
    assert torch.equal(x, inputs) and torch.equal(valid_len, full_lanes())
    assert all(torch.equal(tensor, parameters[name]) for name, tensor in model.state_dict().items())


@every_memory
def test_rule_1_the_same_input_gives_the_same_output_whatever_came_between(case: str) -> None:
    model = small_model(case)
    state, segment = warm_state(model), random_segments(1)[0]
    first = model(*segment, full_lanes(), state=state)
    list(read(model, random_segments(2), fresh_state(model)))
    again = model(*segment, full_lanes(), state=state)
    assert torch.equal(first.nll, again.nll)
    assert_same(first.state, again.state)


@every_memory
def test_rule_1_activation_checkpointing_changes_no_bit(case: str) -> None:
    """Losses, states and gradients, with dropout; the backward runs every memory a second time."""
    results = []
    for checkpointing in (False, True):
        model = small_model(case, dropout=0.2, checkpointing=checkpointing)
        torch.manual_seed(3)
        outputs = list(read(model, random_segments(), fresh_state(model)))
        sum(total_loss(output) for output in outputs).backward()
        results.append((outputs, [parameter.grad for parameter in model.parameters()]))
    (plain, plain_grads), (saved, saved_grads) = results
    for one, other in zip(plain, saved, strict=True):
        assert torch.equal(one.nll, other.nll)
        assert_same(one.state, other.state)
    assert all(torch.equal(one, other) for one, other in zip(plain_grads, saved_grads, strict=True))


@every_memory
@pytest.mark.parametrize(
    ("activations", "asked"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
def test_rule_2_the_state_keeps_structure_shapes_and_dtypes_and_has_no_gradient(
    case: str, activations: str, asked: str
) -> None:
    model = small_model(case).to(getattr(torch, activations))
    state = fresh_state(model, getattr(torch, asked))
    for output in read(model, random_segments(), state):
        old, new = named_tensors(state), named_tensors(output.state)
        assert type(output.state) is type(state)
        assert {name: (part.shape, part.dtype) for name, part in old.items()} == {
            name: (part.shape, part.dtype) for name, part in new.items()
        }
        for name, part in new.items():
            assert part.shape[0] == LANES, f"{name}: the first axis is the lane"
            assert not part.requires_grad and part.grad_fn is None, name
            assert torch.isfinite(part).all(), name
        assert output.nll.dtype == torch.float32


@every_memory
def test_rule_2_the_state_is_no_alias_of_an_activation(case: str) -> None:
    """A view of the block's input would keep its storage alive, and change with it."""
    model = small_model(case)
    fresh = fresh_state(model)
    x, _ = model.stem(torch.randn(LANES, SEG_LEN, WIDTH), fresh.stem)
    for block, state in zip(model.blocks, fresh.blocks, strict=True):
        for name, part in named_tensors(block.memory(x, state, full_lanes()).state).items():
            assert part.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), name


@every_memory
def test_rule_3_only_complete_segments_are_committed(case: str) -> None:
    model = small_model(case)
    state = warm_state(model)
    tokens, targets = random_segments()[0]
    complete = model(tokens, targets, full_lanes(), state=state).state
    valid_len = torch.tensor([SEG_LEN, SEG_LEN - 1, 1, 0])
    ragged = model(tokens, targets, valid_len, state=state).state
    assert_same(ragged, complete, lanes=slice(0, 1))
    assert_same(ragged, state, lanes=slice(1, None))
    pairs = zip(named_tensors(state).values(), named_tensors(complete).values(), strict=True)
    changed = [not torch.equal(old[0], new[0]) for old, new in pairs]
    assert any(changed) or not changed, "a complete segment is remembered"


@every_memory
@every_norm
def test_rule_4_no_output_depends_on_a_later_token(case: str, norm: str) -> None:
    """Over several segments and blocks: changing token j leaves every loss before j bit for bit."""
    model = small_model(case, norm=norm)
    segments = random_segments()
    with torch.no_grad():
        before = torch.cat([output.nll for output in read(model, segments, fresh_state(model))], dim=1)
        for j in range(SEGMENTS * SEG_LEN):
            altered = [(tokens.clone(), targets) for tokens, targets in segments]
            tokens = altered[j // SEG_LEN][0]
            tokens[:, j % SEG_LEN] = (tokens[:, j % SEG_LEN] + 1) % VOCAB
            after = torch.cat([output.nll for output in read(model, altered, fresh_state(model))], dim=1)
            assert torch.equal(after[:, :j], before[:, :j]), f"token {j} changes an earlier loss"
            assert (after[:, j] != before[:, j]).any(), f"token {j} does not change its own prediction"


@every_memory
def test_rule_4_padding_changes_no_real_token(case: str) -> None:
    model = small_model(case)
    state, (tokens, targets) = warm_state(model), random_segments()[0]
    valid_len = torch.tensor([3, 2, 1, 3])
    padding = torch.arange(SEG_LEN) >= valid_len[:, None]
    targets = targets.masked_fill(padding, IGNORE)
    one = model(tokens.masked_fill(padding, 0), targets, valid_len, state=state)
    other = model(tokens.masked_fill(padding, 7), targets, valid_len, state=state)
    assert torch.equal(one.nll, other.nll)
    for name, loss in one.aux.items():
        assert torch.equal(loss, other.aux[name]), name


@every_memory
def test_rule_5_lanes_are_independent(case: str) -> None:
    """Other tokens, other memories and other lengths in lanes 1.. leave lane 0 bit for bit."""
    model = small_model(case)
    state, fresh, (tokens, targets) = warm_state(model), fresh_state(model), random_segments()[0]
    others = torch.tensor([False, True, True, True])
    one = model(tokens, targets, full_lanes(), state=state)
    altered_tokens = torch.where(others[:, None], (tokens + 3) % VOCAB, tokens)
    valid_len = torch.tensor([SEG_LEN, 0, 2, SEG_LEN])
    other = model(altered_tokens, targets, valid_len, state=reset_lanes(state, fresh, others))
    assert torch.equal(one.nll[0], other.nll[0])
    assert_same(one.state, other.state, lanes=slice(0, 1))
    for name, loss in one.aux.items():
        assert torch.equal(loss[0], other.aux[name][0]), name


@every_memory
def test_rule_5_a_lane_alone_equals_the_lane_in_a_batch(case: str) -> None:
    """Products of another shape round differently, hence float64 and a tolerance."""
    model = small_model(case).double()
    together = list(read(model, random_segments(), fresh_state(model, torch.float64)))
    for lane in range(LANES):
        state = model.init_state(torch.tensor([lane]), "cpu", torch.float64)
        for (tokens, targets), expected in zip(random_segments(), together, strict=True):
            rows = slice(lane, lane + 1)
            output = model(tokens[rows], targets[rows], full_lanes()[rows], state=state)
            state = output.state
            torch.testing.assert_close(output.nll, expected.nll[rows], rtol=0, atol=1e-10)


@every_memory
def test_rule_5_a_reset_lane_equals_a_fresh_lane(case: str) -> None:
    model = small_model(case)
    fresh = fresh_state(model)
    is_new_document = torch.tensor([True, False, True, False])
    state = reset_lanes(warm_state(model), fresh, is_new_document)
    pairs = zip(read(model, random_segments(), state), read(model, random_segments(), fresh), strict=True)
    for reset, never_used in pairs:
        assert torch.equal(reset.nll[is_new_document], never_used.nll[is_new_document])
        assert_same(reset.state, never_used.state, lanes=is_new_document)


@every_memory
@every_norm
@pytest.mark.parametrize("idle", ["some", "all"])
def test_rule_6_every_parameter_gets_a_gradient_in_every_step(case: str, norm: str, idle: str) -> None:
    """From the first segment, when memories are empty, with idle and incomplete lanes, or with idle lanes only."""
    model = small_model(case, norm=norm)
    state = fresh_state(model)
    valid_len = torch.tensor([SEG_LEN, SEG_LEN, 2, 0]) if idle == "some" else torch.zeros(LANES, dtype=torch.int64)
    padding = torch.arange(SEG_LEN) >= valid_len[:, None]
    for tokens, targets in random_segments():
        model.zero_grad()
        output = model(tokens, targets.masked_fill(padding, IGNORE), valid_len, state=state)
        state = output.state
        total_loss(output).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            assert torch.isfinite(parameter.grad).all(), f"the gradient of {name} is not finite"


@every_memory
def test_rule_6_nothing_branches_on_data(case: str) -> None:
    """Fake tensors have no values: a branch, an .item() or a shape that depends on data raises."""
    model = small_model(case)
    with FakeTensorMode(allow_non_fake_inputs=True):
        tokens = torch.zeros(LANES, SEG_LEN, dtype=torch.int64)
        state = fresh_state(model)
        for _ in range(2):
            output = model(tokens, tokens, full_lanes(), state=state)
            state = reset_lanes(output.state, fresh_state(model), torch.zeros(LANES, dtype=torch.bool))
        total_loss(output).backward()


@every_memory
@every_norm
@pytest.mark.parametrize("elsewhere", ["empty", "nan"])
def test_rule_7_parameters_are_used_in_a_module_that_registers_them(case: str, norm: str, elsewhere: str) -> None:
    model = small_model(case, norm=norm)
    with torch.no_grad():
        expected = [output.nll for output in read(model, random_segments(), fresh_state(model))]
        Partitioned(model, elsewhere=elsewhere)
        found = [output.nll for output in read(model, random_segments(), fresh_state(model))]
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@every_memory
def test_rule_8_no_generator_is_touched(case: str) -> None:
    """Draws are a counter hash: apart from dropout, a forward in training leaves torch's generator where it was."""
    model = small_model(case).train()
    state = fresh_state(model)
    before = torch.get_rng_state()
    for output in read(model, random_segments(), state):
        total_loss(output).backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("case", [case for case in CASES if case != "none"])
def test_a_memory_remembers(case: str) -> None:
    """A token of the first segment changes losses of the second; otherwise the rules above say little."""
    model = small_model(case)
    segments = random_segments()
    altered = [(tokens.clone(), targets) for tokens, targets in segments]
    altered[0][0][:, 1] = (altered[0][0][:, 1] + 1) % VOCAB
    with torch.no_grad():
        one = list(read(model, segments, fresh_state(model)))[1].nll
        other = list(read(model, altered, fresh_state(model)))[1].nll
    assert ((one - other).abs().amax(dim=1) > 1e-6).all()
