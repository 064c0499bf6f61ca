"""Rules of the memory contract about gradients: which parameters get one, and whether it flows through the state."""

from __future__ import annotations

import torch

from dist_mem.contract.subject import BrokenRuleError, CheckedMemory, ignore_padding, require, total_loss
from dist_mem.memory.base import detach_state, map_state, named_tensors

WRITES = (
    "writes get no gradient: it changes the state after a segment, and no loss of that segment; to the next update the "
    "state is a constant. Keep the segment's rows in the state, and let the next forward write them before it reads, "
    "as in examples/infini_attention.py and dist_mem/memory/infinite.py"
)


def gradient_flows_as_declared(subject: CheckedMemory) -> None:
    """Check that the state carries no gradient; or, with `carries_gradient`, that a later loss has one through it."""
    model = subject.model()
    if not any(memory.carries_gradient for memory in model.memories()):
        for output in subject.read(model):
            for name, part in named_tensors(output.state).items():
                require(not part.requires_grad and part.grad_fn is None, f"{name} carries a gradient")
        return
    *_, last = subject.read(model, is_window=True)
    state = map_state(lambda part: part.requires_grad_(part.is_floating_point()), subject.warm(model))
    learned = [part for part in named_tensors(state).values() if part.requires_grad]
    output = model(*subject.segments(1)[0], subject.full_lengths(), state=state)
    gradients = torch.autograd.grad(total_loss(output), learned, allow_unused=True)
    reached = [gradient for gradient in gradients if gradient is not None and gradient.abs().sum() > 0]
    require(bool(reached), "no loss has a gradient for the state that was read, though carries_gradient is true")
    require(
        any(part.grad_fn is not None for part in named_tensors(last.state).values()), "the new state has no gradient"
    )


def every_parameter_gets_a_gradient(subject: CheckedMemory) -> None:
    """Check every step: with empty memories, with incomplete and idle lanes, and with idle lanes only."""
    for valid_len in (subject.full_lengths(), subject.ragged_lengths(), torch.zeros_like(subject.full_lengths())):
        model = subject.model()
        state = subject.empty_state(model)
        for number, (tokens, targets) in enumerate(subject.segments()):
            model.zero_grad()
            output = model(tokens, ignore_padding(targets, valid_len)[0], valid_len, state=state)
            state = detach_state(output.state)
            total_loss(output).backward()
            where = f"in segment {number} with valid_len {valid_len.tolist()}"
            for name, parameter in model.named_parameters():
                if parameter.grad is None:
                    cause = WRITES if _changes_only_the_state(subject, name) else None
                    raise BrokenRuleError(f"{name} has no gradient {where}", cause)
                require(torch.isfinite(parameter.grad).all(), f"the gradient of {name} is not finite {where}")


def _changes_only_the_state(subject: CheckedMemory, name: str) -> bool:
    """Return whether another value of a parameter gives another state, and the same losses of that segment."""
    outputs = []
    for change in (0.0, 1.0):
        model = subject.model()
        with torch.no_grad():
            parameter = model.get_parameter(name)
            parameter.data += change * torch.linspace(0.5, 1.0, parameter.numel()).view(parameter.shape)
            outputs.append(model(*subject.segments(1)[0], subject.full_lengths(), state=subject.empty_state(model)))
    one, other = outputs
    states = zip(named_tensors(one.state).values(), named_tensors(other.state).values(), strict=True)
    return torch.equal(one.nll, other.nll) and not all(torch.equal(*pair) for pair in states)
