"""The Recurrent Memory Transformer against the authors' code (tests/golden/rmt; README.md there), in float64.

Arrays are time-first there and lanes first here.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_mem.config import Config, ModelConfig, TrainConfig
from dist_mem.memory.base import detached
from dist_mem.memory.rmt import TokensState
from dist_mem.model import LMState, MemoryLM
from tests.memory.test_txl_parity import our_parameters, run_segment
from tests.support import paths
from tests.support.parity import assert_close

GOLDEN = paths.GOLDEN / "rmt"
NAMES = sorted(path.stem for path in GOLDEN.glob("m*.npz"))
TRAJECTORIES = sorted(path.stem for path in GOLDEN.glob("traj_*.npz"))


class Golden:
    """One file of reference vectors."""

    def __init__(self, name: str) -> None:
        self.arrays = dict(np.load(GOLDEN / f"{name}.npz"))
        self.settings: dict[str, Any] = json.loads(str(self.arrays["config_json"]))

    def tensor(self, key: str) -> Tensor:
        """Lanes first where the array has a time axis."""
        value = torch.from_numpy(self.arrays[key])
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

    def model(self) -> MemoryLM:
        given = self.settings
        model = ModelConfig(
            num_layers=given["n_layer"],
            d_model=given["d_model"],
            num_heads=given["n_head"],
            d_head=given["d_head"],
            d_inner=given["d_inner"],
            dropout=0.0,
            norm="pre" if given["pre_lnorm"] else "post",
            final_norm=False,
        )
        memory: dict[str, Any] = {
            "kind": "rmt",
            "num_tokens": given["num_mem_tokens"],
            "mem_len": given["mem_len"],
            "read_cache": given["read_mem_from_cache"],
            "at_end": given["mem_at_end"],
        }
        if not given["num_mem_tokens"]:
            memory = {"kind": "transformer_xl", "mem_len": given["mem_len"]} if given["mem_len"] else {"kind": "none"}
        ours = MemoryLM(Config(model=model, memory=memory, train=TrainConfig(seg_len=given["tgt_len"])), given["V"])
        missing, unexpected = ours.double().load_state_dict(self.parameters("param/"), strict=False)
        names = {name for name, _ in ours.named_parameters()}
        assert not unexpected and not names & set(missing)
        return ours


def empty(model: MemoryLM) -> LMState:
    return model.init_state(torch.arange(2), "cpu", torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_segments_equal_the_published_code(name: str) -> None:
    """Losses, outputs of every block for all rows, memory tokens and caches."""
    golden = Golden(name)
    model = golden.model()
    state = empty(model)
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
    state, found = empty(model), []
    for number in range(until + 1):
        if number == since:
            state = detached(state)
        output, _ = run_segment(model, golden.tensor(f"seg{number}/input"), golden.tensor(f"seg{number}/target"), state)
        state = output.state
        found.append(output.nll)
    return found


def assert_gradients(model: MemoryLM, loss: Tensor, golden: Golden, prefix: str) -> None:
    expected, parameters = golden.parameters(f"{prefix}/"), dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        assert_close(gradient, expected.pop(name, torch.zeros_like(parameter)), f"{prefix}/{name}")
    assert not expected, f"published gradients of unknown parameters: {sorted(expected)}"


@pytest.mark.parametrize("name", NAMES)
def test_gradients_through_segments_equal_the_published_code(name: str) -> None:
    """Of each segment's loss through K earlier segments, and of the loss of all segments."""
    golden = Golden(name)
    model = golden.model()
    prefixes = sorted({"/".join(key.split("/")[:2]) for key in golden.arrays if "/gradK" in key})
    assert prefixes
    for prefix in prefixes:
        number, depth = int(prefix.split("/")[0].removeprefix("seg")), int(prefix.partition("gradK")[2])
        loss = losses(model, golden, since=number - depth, until=number)[-1].mean()
        assert_gradients(model, loss, golden, prefix)
    if any(key.startswith("unroll/grad/") for key in golden.arrays):
        last = len(golden.settings["segments"]) - 1
        whole = torch.cat(losses(model, golden, since=0, until=last), dim=1).mean()
        assert_gradients(model, whole, golden, "unroll/grad")


def windows(golden: Golden) -> list[tuple[Tensor, Tensor]]:
    stream, seg_len = golden.tensor("stream"), golden.settings["tgt_len"]
    inputs, targets = (stream[:, shift : shift + 5 * seg_len].split(seg_len, dim=1) for shift in (0, 1))
    return list(zip(inputs, targets, strict=True))


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
    model = golden.model()
    start = model.get_parameter("stem.first.start")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    entered = [empty(model)]  # the state before each segment
    first = TokensState(start.detach().clone().expand(2, -1, -1), torch.zeros(2, dtype=torch.bool))
    for step in range(5):
        if step == 1:  # from the second update on, the first rows are a constant
            entered[0] = entered[0]._replace(stem=first)
        began = max(0, step - depth)
        state, found = entered[began], []
        for number in range(began, step + 1):
            state = LMState(entered[number].blocks if number < step else state.blocks, state.stem)
            output, _ = run_segment(model, *windows(golden)[number], state)
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
        entered.append(detached(state))
    expected = golden.parameters(f"{mode}/param_after/")
    for parameter_name, parameter in model.named_parameters():
        assert_close(parameter.detach(), expected[parameter_name], parameter_name, kind="states")
