"""The Recurrent Memory Transformer against the authors' code (tests/golden/rmt; README.md there), in float64.

Arrays are time-first there and lanes first here.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.config import Config, change_config
from dist_mem.memory.base import detach_state
from dist_mem.memory.rmt import TokensState
from dist_mem.model import LMState, MemoryLM
from tests.support import paths, published_txl
from tests.support.parity import assert_close
from tests.support.published import Vectors, names_in
from tests.support.published_txl import empty_state, our_parameters, run_segment

GOLDEN = paths.GOLDEN / "rmt"
NAMES = names_in(GOLDEN, "m*")
TRAJECTORIES = names_in(GOLDEN, "traj_*")


class Golden(published_txl.Golden):
    folder = GOLDEN

    def tensor(self, key: str) -> Tensor:
        """Lanes first where the array has a time axis."""
        value = Vectors.tensor(self, key)
        is_sequence = key.startswith(("seg", "stream")) or "/loss/" in key or "/mem_tokens/" in key
        return value.transpose(0, 1) if is_sequence and "/grad" not in key else value

    def parameters(self, prefix: str) -> dict[str, Tensor]:
        """Arrays under `prefix`, by our names."""
        found = {}
        for key in self.arrays:
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name == "mem_tokens":
                found["stem.first.start"] = self.tensor(key).squeeze(1)
            elif key.startswith(prefix):
                found.update(our_parameters(name, self.tensor(key), pre_norm=self.settings["pre_lnorm"]))
        return found

    def config(self, **model_changes: Any) -> Config:
        config, given = super().config(**model_changes), self.settings
        if given["num_mem_tokens"]:
            config = change_config(
                config,
                {
                    "memory": {
                        "kind": "rmt",
                        "num_tokens": given["num_mem_tokens"],
                        "mem_len": given["mem_len"],
                        "read_cache": given["read_mem_from_cache"],
                        "at_end": given["mem_at_end"],
                    }
                },
            )
        return config


@pytest.mark.parametrize("name", NAMES)
def test_segments_equal_the_published_code(name: str) -> None:
    """Losses, outputs of every block for all rows, memory tokens and caches."""
    golden = Golden(name)
    model = golden.model()
    state = empty_state(model)
    for number in range(len(golden.settings["segments"])):
        seg = f"seg{number}"
        output, hiddens = run_segment(model, golden.tensor(f"{seg}/input"), golden.tensor(f"{seg}/target"), state)
        state = output.state
        assert_close(output.nll, golden.tensor(f"{seg}/loss"), f"{seg}, losses")
        for index, hidden in enumerate(hiddens):
            assert_close(hidden, golden.tensor(f"{seg}/layer{index}_out"), f"{seg}, block {index}")
        if golden.settings["num_mem_tokens"]:
            assert_close(state.stem.rows, golden.tensor(f"{seg}/mem_tokens_out"), f"{seg}, memory tokens")
        for index, block in enumerate(state.blocks if golden.settings["mem_len"] else ()):
            expected, cache = golden.tensor(f"{seg}/mem{index}"), getattr(block, "cache", block)
            assert cache.length.tolist() == [expected.shape[1]] * 2
            assert_close(cache.hidden[:, -expected.shape[1] :], expected, f"{seg}, cache {index}")


def losses(model: MemoryLM, golden: Golden, *, since: int, until: int) -> list[Tensor]:
    """Return the losses of segments up to `until`; the memory that enters segment `since` is a constant."""
    state, found = empty_state(model), []
    for number in range(until + 1):
        if number == since:
            state = detach_state(state)
        output, _ = run_segment(model, golden.tensor(f"seg{number}/input"), golden.tensor(f"seg{number}/target"), state)
        state = output.state
        found.append(output.nll)
    return found


def assert_gradients(model: MemoryLM, loss: Tensor, golden: Golden, prefix: str) -> None:
    expected = golden.parameters(f"{prefix}/")
    for name, gradient in golden.gradients(loss, dict(model.named_parameters())).items():
        assert_close(gradient, expected.pop(name, torch.zeros_like(gradient)), f"{prefix}/{name}")
    assert not expected, f"published gradients of unknown parameters: {sorted(expected)}"


@pytest.mark.parametrize("name", NAMES)
def test_gradients_through_segments_equal_the_published_code(name: str) -> None:
    """Of each segment's loss through K earlier segments, and of the loss of all segments."""
    golden = Golden(name)
    model = golden.model()
    assert golden.depths()
    for prefix, number, depth in golden.depths():
        loss = losses(model, golden, since=number - depth, until=number)[-1].mean()
        assert_gradients(model, loss, golden, prefix)
    if any(key.startswith("unroll/grad/") for key in golden.arrays):
        last = len(golden.settings["segments"]) - 1
        whole = torch.cat(losses(model, golden, since=0, until=last), dim=1).mean()
        assert_gradients(model, whole, golden, "unroll/grad")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name in TRAJECTORIES
        for mode in Golden(name).settings["modes"]
        if not mode.endswith("released")  # its replay begins with rows that have seen their own future
    ],
)
def test_adam_trajectory_equals_the_published_code(name: str, mode: str) -> None:
    """Five updates that go K segments back, with the memory that entered the first of these as a constant."""
    golden = Golden(name)
    depth, _, learns_all = golden.settings["modes"][mode]
    stream, seg_len = golden.tensor("stream"), golden.settings["tgt_len"]
    inputs, targets = (stream[:, shift : shift + 5 * seg_len].split(seg_len, dim=1) for shift in (0, 1))
    model = golden.model()
    start = model.get_parameter("stem.first.start")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    entered = [empty_state(model)]  # the state before each segment
    first = TokensState(start.detach().clone().expand(2, -1, -1), torch.zeros(2, dtype=torch.bool))
    for step in range(5):
        if step == 1:  # from the second update on, the first rows are a constant
            entered[0] = entered[0]._replace(stem=first)
        began = max(0, step - depth)
        state, found = entered[began], []
        for number in range(began, step + 1):
            state = LMState(entered[number].blocks if number < step else state.blocks, state.stem)
            output, _ = run_segment(model, inputs[number], targets[number], state)
            state = output.state
            found.append(output.nll)
        optimizer.zero_grad()
        torch.stack([loss.mean() for loss in (found if learns_all else found[-1:])]).sum().backward()
        if step > 0:
            start.grad = None
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        assert_close(norm, golden.tensor(f"{mode}/gradnorm/{step}"), f"gradient norm {step}")
        assert_close(state.stem.rows, golden.tensor(f"{mode}/mem_tokens/{step}"), f"memory tokens {step}")
        optimizer.step()
        entered.append(detach_state(state))
    expected = golden.parameters(f"{mode}/param_after/")
    for parameter_name, parameter in model.named_parameters():
        assert_close(parameter.detach(), expected[parameter_name], parameter_name)
