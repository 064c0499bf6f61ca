"""The rules of the memory contract (dist_mem/memory/base.py), each a function that raises BrokenRuleError.

`tests/memory/test_memory_contract.py` applies them to every memory of the package, `dist-mem check-memory` to yours.
dist_mem/contract/check_memory.py has the statement of each rule and the usual cause of breaking it.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dist_mem.contract.subject import (
    VOCAB,
    BrokenRuleError,
    CheckedMemory,
    PartitionedModel,
    ignore_padding,
    require,
    require_same,
    total_loss,
)
from dist_mem.memory.base import map_state, named_tensors
from dist_mem.model import LMState, MemoryLM, reset_lanes
from dist_mem.nn.stepping import places_of


def changes_nothing_it_was_given(subject: CheckedMemory) -> None:
    """Check that forward modifies no state, input, valid_len, parameter or buffer."""
    model = subject.model()
    state = subject.warm(model)
    before = map_state(torch.clone, state)
    parameters = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = subject.layer_inputs(model, state)
    inputs, valid_len = x.clone(), subject.full_lengths()
    for memory, block_state in zip(model.memories(), state.blocks, strict=True):
        memory(x, block_state, valid_len)
    require_same(state, before, "forward changes the state in place")
    require(torch.equal(x, inputs), "forward changes its input in place")
    require(torch.equal(valid_len, subject.full_lengths()), "forward changes valid_len in place")
    for name, tensor in model.state_dict().items():
        require(torch.equal(tensor, parameters[name]), f"forward changes the parameter or buffer {name}")


def is_a_function_of_its_arguments(subject: CheckedMemory) -> None:
    """Check that calls in between change neither output nor state for the same input."""
    model = subject.model()
    state, segment = subject.warm(model), subject.segments(1)[0]
    first = model(*segment, subject.full_lengths(), state=state)
    list(subject.read(model, subject.segments(2)))
    again = model(*segment, subject.full_lengths(), state=state)
    require(torch.equal(first.nll, again.nll), "the same input gives another output after other calls")
    require_same(first.state, again.state, "the same input gives another state after other calls")


def may_be_computed_twice(subject: CheckedMemory) -> None:
    """Check that activation checkpointing, which runs every memory again in the backward, changes nothing."""
    results = []
    for checkpointing in ("none", "blocks", "attention"):
        model = subject.model(dropout=0.2, checkpointing=checkpointing)
        torch.manual_seed(3)
        outputs = list(subject.read(model, is_window=True))
        torch.stack([total_loss(output) for output in outputs]).sum().backward()
        results.append((outputs, {name: parameter.grad for name, parameter in model.named_parameters()}))
    for saved, saved_grads in results[1:]:
        for one, other in zip(results[0][0], saved, strict=True):
            require(torch.equal(one.nll, other.nll), "activation checkpointing changes a loss")
            require_same(one.state, other.state, "activation checkpointing changes a state")
        for name, gradient in results[0][1].items():
            again = saved_grads[name]
            same = gradient is again or (gradient is not None and again is not None and torch.equal(gradient, again))
            require(same, f"activation checkpointing changes the gradient of {name}")


def state_keeps_its_form(subject: CheckedMemory) -> None:
    """Check fields, shapes, dtypes and finiteness of the state with fp32 and bf16 activations; check the logs."""
    wide, narrow = torch.float32, torch.bfloat16
    for activations, asked in ((wide, wide), (narrow, narrow), (narrow, wide)):
        model = subject.model().to(activations)
        state = subject.empty_state(model, asked)
        x = subject.layer_inputs(model, state).to(activations)
        for memory, old in zip(model.memories(), state.blocks, strict=True):
            # Check the memory's output directly: the model commits a `where` of the old and the new state.
            _require_form(old, memory(x, old, subject.full_lengths()).state, f"with {activations} activations")
        for output in subject.read(model, subject.segments(), state):
            _require_form(state, output.state, f"with {activations} activations")
            require(output.nll.dtype == torch.float32, "losses are not float32")
            for name, metric in output.logs.items():
                is_valid = re.fullmatch(r"[A-Za-z0-9._/-]+", name) is not None
                require(is_valid, f"logs has the name {name!r}, but a name consists of letters, digits and ._/-")
                require(torch.isfinite(metric).all(), f"the value logged as {name} is not finite")


def _require_form(old: Any, new: Any, where: str) -> None:
    require(type(new) is type(old), f"a {type(old).__name__} becomes a {type(new).__name__}")
    before, after = named_tensors(old), named_tensors(new)
    require(before.keys() == after.keys(), f"the new state has fields {sorted(after)}, the old one {sorted(before)}")
    for name, part in after.items():
        form, wanted = (tuple(part.shape), part.dtype), (tuple(before[name].shape), before[name].dtype)
        require(form == wanted, f"{name} was {wanted} and becomes {form} {where}")
        require(torch.isfinite(part).all(), f"{name} is not finite {where}")


def state_is_no_alias(subject: CheckedMemory) -> None:
    """Check that the state is no view of the block's input, which would keep its storage alive and change with it."""
    model = subject.model()
    fresh = subject.empty_state(model)
    x = subject.layer_inputs(model, fresh)
    for memory, state in zip(model.memories(), fresh.blocks, strict=True):
        for name, part in named_tensors(memory(x, state, subject.full_lengths()).state).items():
            require(part.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), f"{name} is a view of x")


def incomplete_segments_are_not_committed(subject: CheckedMemory) -> None:
    """Check that lanes with complete segments get the new state, and the others keep the old one."""
    model = subject.model()
    state, (tokens, targets) = subject.warm(model), subject.segments()[0]
    valid_len = subject.ragged_lengths()
    complete = model(tokens, targets, subject.full_lengths(), state=state).state
    ragged = model(tokens, targets, valid_len, state=state).state
    is_full = valid_len == subject.size.seg_len
    is_kept = valid_len > 0 if subject.cut == "end" else is_full
    require_same(ragged, complete, "a complete segment is not remembered beside incomplete ones", lanes=is_full)
    require_same(ragged, state, "an incomplete segment is remembered", lanes=~is_kept)


def rows_leave_it_when_it_is_full(subject: CheckedMemory) -> None:
    """Check that a memory evicts from the first segment on that finds it with `kept_len` tokens, and not before."""
    model = subject.model()
    state = subject.empty_state(model)
    for number, segment in enumerate(subject.segments()):
        x = subject.layer_inputs(model, state)
        for memory, block_state in zip(model.memories(), state.blocks, strict=True):
            is_full = number * subject.size.seg_len >= memory.kept_len
            evicts = memory(x, block_state, subject.full_lengths()).evicted.valid
            right = f"kept_len is {memory.kept_len}, so segment {number} must evict {'rows' if is_full else 'nothing'}"
            require(bool((evicts == is_full).all()), right)
        state = model(*segment, subject.full_lengths(), state=state).state


def no_output_depends_on_a_later_token(subject: CheckedMemory) -> None:
    """Change each token in turn, and check that no earlier loss changes and its prediction does."""
    model, seg_len = subject.model(), subject.size.seg_len
    before = subject.losses(model)
    for place in range(subject.size.segments * seg_len):
        after = subject.losses(model, altered=place)
        earlier = (after[:, :place] != before[:, :place]).any(0).nonzero().flatten().tolist()
        where = f"token {place % seg_len} of segment {place // seg_len}"
        require(not earlier, f"{where} changes earlier losses, at positions {earlier} of {place}")
        require((after[:, place] != before[:, place]).any(), f"{where} does not change its own prediction")


def padding_changes_no_real_token(subject: CheckedMemory) -> None:
    """Change the padding, and check that no loss and no state changes."""
    model = subject.model()
    state, (tokens, targets) = subject.warm(model), subject.segments()[0]
    valid_len = subject.ragged_lengths().clamp(max=subject.size.seg_len - 1)
    targets, padding = ignore_padding(targets, valid_len)
    one = model(tokens.masked_fill(padding, 0), targets, valid_len, state=state)
    other = model(tokens.masked_fill(padding, 7), targets, valid_len, state=state)
    require(torch.equal(one.nll, other.nll), "the content of the padding changes the loss of a real token")
    require_same(one.state, other.state, "the content of the padding is remembered")
    for name, loss in one.aux.items():
        require(torch.equal(loss, other.aux[name]), f"the content of the padding changes the loss {name}")
    is_read = valid_len > 0  # others are left out of the mean, and may have no value
    for name, metric in one.logs.items():
        is_same = torch.equal(metric[is_read], other.logs[name][is_read])
        require(is_same, f"the content of the padding changes the value logged as {name}")


def lanes_are_independent(subject: CheckedMemory) -> None:
    """Check that tokens, memories and lengths of lanes 1.. change no bit of lane 0, with a full memory and empty."""
    model = subject.model()
    warm, fresh, (tokens, targets) = subject.warm(model), subject.empty_state(model), subject.segments()[0]
    others = torch.arange(subject.size.lanes) > 0
    altered = torch.where(others[:, None], (tokens + 3) % VOCAB, tokens)
    for state in (warm, reset_lanes(warm, fresh, ~others)):
        one = model(tokens, targets, subject.full_lengths(), state=state)
        other = model(altered, targets, subject.ragged_lengths(), state=reset_lanes(state, fresh, others))
        require(torch.equal(one.nll[0], other.nll[0]), "lane 0 reads another loss when other lanes change")
        require_same(one.state, other.state, "lane 0 gets another state when other lanes change", lanes=slice(0, 1))
        for name, loss in one.aux.items():
            require(torch.equal(loss[0], other.aux[name][0]), f"lane 0 has another loss {name} when other lanes change")


def fewer_rows_give_the_same_outputs(subject: CheckedMemory) -> None:
    """Compare `Memory.min_seg_len` rows and more with T rows, in float64: products of another shape round otherwise."""
    model, seg_len = subject.model().double(), subject.size.seg_len
    tokens, fresh = subject.segments()[0][0], subject.empty_state(model, torch.float64)
    with torch.no_grad():
        for state in (fresh, subject.warm(model, torch.float64)):
            for num_rows in range(max(memory.min_seg_len for memory in model.memories()), seg_len):
                valid_len = subject.ragged_lengths().clamp(max=num_rows)
                is_real = torch.arange(num_rows) < valid_len[:, None]
                whole = model.features(tokens, valid_len, state=state).hidden[:, :num_rows]
                short = model.features(tokens[:, :num_rows], valid_len, state=state).hidden
                error = (short - whole)[is_real].abs().max()
                require(error < 1e-6, f"an output from {num_rows} rows differs by {error:.1e} from that of {seg_len}")


def further_rows_are_those_of_the_whole_segment(subject: CheckedMemory) -> None:
    """Step through a segment a row at a time and two at a time, the lanes at different places, in float64."""
    model, tokens = subject.model().double().eval(), subject.segments()[0][0]
    if not model.can_step:
        return
    with torch.no_grad():
        for state in (subject.empty_state(model, torch.float64), subject.warm(model, torch.float64)):
            before = map_state(torch.clone, state)
            whole = model.features(tokens, subject.full_lengths(), state=state).hidden
            for num_rows in (1, 2):
                error = (_read_by_steps(model, tokens, state, num_rows) - whole).abs().amax((0, 2))
                wrong = (~(error < 1e-6)).nonzero().flatten().tolist()
                require(not wrong, f"by steps of {num_rows} rows those at the places {wrong} of a segment are others")
            require_same(state, before, "open_segment or step_rows changes the state in place")


def _read_by_steps(model: MemoryLM, tokens: Tensor, state: LMState, num_rows: int) -> Tensor:
    """Return the last hidden states of a segment (B, T, D) by steps of at most R rows, fewer in every other lane."""
    num_lanes, seg_len = tokens.shape
    lanes, place = torch.arange(num_lanes), torch.zeros(num_lanes, dtype=torch.int64)
    opened, parts = model.open(state, tokens[:, 0]), [list[Tensor]() for _ in lanes]
    for number in range(2 * seg_len):
        num_real = (num_rows - (lanes + number) % 2).clamp(max=seg_len - place)
        places = places_of(place, num_real, num_rows=num_rows, seg_len=seg_len, device=tokens.device)
        hidden, opened = model.step_rows(tokens.gather(1, places.row), opened, places)
        for part, rows, count in zip(parts, hidden, num_real.tolist(), strict=True):
            part.append(rows[:count])
        place = place + num_real
    return torch.stack([torch.cat(part) for part in parts])


def a_lane_alone_equals_it_in_a_batch(subject: CheckedMemory) -> None:
    """Compare in float64 and with a tolerance, because products of another shape round differently."""
    model = subject.model().double()
    together = list(subject.read(model, subject.segments(), subject.empty_state(model, torch.float64)))
    for lane in range(subject.size.lanes):
        state = model.init_state(torch.tensor([lane]), "cpu", torch.float64)
        rows = slice(lane, lane + 1)
        for number, (tokens, targets) in enumerate(subject.segments()):
            output = model(tokens[rows], targets[rows], subject.lengths(number)[rows], state=state)
            state = output.state
            error = (output.nll - together[number].nll[rows]).abs().max()
            require(error < 1e-6, f"lane {lane} alone differs by {error:.1e} in segment {number}")


def a_reset_lane_equals_a_fresh_one(subject: CheckedMemory) -> None:
    """Check that reset lanes have the same losses and states as fresh ones, bit for bit."""
    model = subject.model()
    is_new_document = torch.arange(subject.size.lanes) % 2 == 0
    state = reset_lanes(subject.warm(model), subject.empty_state(model), is_new_document)
    pairs = zip(subject.read(model, state=state), subject.read(model), strict=True)
    for number, (reset, fresh) in enumerate(pairs):
        same = torch.equal(reset.nll[is_new_document], fresh.nll[is_new_document])
        require(same, f"a reset lane reads another loss than a fresh one in segment {number}")
        require_same(reset.state, fresh.state, "a reset lane's state differs from a fresh one's", lanes=is_new_document)


def nothing_branches_on_data(subject: CheckedMemory) -> None:
    """Run with fake tensors, which have no values: a branch, an .item() or a shape that depends on data raises."""
    model, size = subject.model(), subject.size
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            tokens = torch.zeros(size.lanes, size.seg_len, dtype=torch.int64)
            state = subject.empty_state(model)
            for _ in range(2):  # a window of two segments
                output = model(tokens, tokens, subject.full_lengths(), state=state)
                state = reset_lanes(output.state, subject.empty_state(model), torch.zeros(size.lanes, dtype=torch.bool))
            total_loss(output).backward()
    except RuntimeError as error:  # torch's errors about values and shapes that depend on data
        raise BrokenRuleError(f"forward depends on values: {str(error).splitlines()[0]}") from error


def parameters_are_used_where_they_are_registered(subject: CheckedMemory) -> None:
    """Compare losses with those of a `PartitionedModel`, where parameters have no value elsewhere."""
    expected = subject.losses(subject.model())
    for elsewhere in ("empty", "nan"):
        model = subject.model()
        PartitionedModel(model, elsewhere=elsewhere)
        try:
            found = subject.losses(model)
        except (RuntimeError, IndexError) as error:  # shapes do not fit, because the parameter is empty
            text = f"a parameter is used outside the forward of its module: {str(error).splitlines()[0]}"
            raise BrokenRuleError(text) from error
        require(torch.equal(expected, found), "a parameter is used outside the forward of the module that registers it")


def no_generator_is_touched(subject: CheckedMemory) -> None:
    """Check that, without dropout, a forward and a backward in training do not advance torch's generator."""
    model = subject.model().train()
    before = torch.get_rng_state()
    for output in subject.read(model):
        total_loss(output).backward()
    require(torch.equal(torch.get_rng_state(), before), "torch's random generator was used")


def it_remembers(subject: CheckedMemory) -> None:
    """Check that a token of the first segment changes losses of a later one; otherwise the other rules test little."""
    model = subject.model()
    if not named_tensors(subject.empty_state(model)):
        return  # a memory without state remembers nothing by design
    change = (subject.losses(model) - subject.losses(model, altered=1))[:, subject.size.seg_len :].abs().max()
    require(change > 1e-6, "no later segment depends on a token of the first")
