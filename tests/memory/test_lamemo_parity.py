"""LaMemo against the authors' code (tests/golden/lamemo).

The published code ran in float32, ours runs in float64. Arrays are time-first there and lanes first here. The tolerance
is below what its epsilon in alpha amounts to.
"""

import math
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from dist_mem.config import Config, change_config
from dist_mem.memory.parts import look_ahead
from dist_mem.model import LMState
from tests.support import parity, paths
from tests.support.published import names_in
from tests.support.published_txl import Golden, assert_gradients, empty_state, our_parameters, run_segment

GOLDEN = paths.GOLDEN / "lamemo"
NAMES = names_in(GOLDEN)
TOLERANCE = 4e-6  # on losses, hiddens and memories; without epsilon the errors are 4.7e-6 to 1.4e-5
ATTENTION_NAMES = {"q_net": "query", "kv_net": "key_value"}


class LaMemoGolden(Golden):
    folder = GOLDEN

    def parameters(self, prefix: str) -> dict[str, Tensor]:
        """Arrays under `prefix`, by our names."""
        found = {}
        for key in self.arrays:
            if not key.startswith(prefix) or key.endswith(("_logits_constant", "inv_freq")):  # buffers
                continue
            name, value = key.removeprefix(prefix), self.tensor(key)
            parts = name.split(".")
            if name == "r_r_bias_future":
                found["blocks.0.memory.attention.ahead_bias"] = value
            elif len(parts) > 3 and parts[3] in ATTENTION_NAMES:
                found[f"blocks.{parts[1]}.memory.attention.{ATTENTION_NAMES[parts[3]]}.weight"] = value
            else:
                found.update(our_parameters(name, value, pre_norm=False))
        return self.cut_into_bins(found)

    def cut_into_bins(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """With div_val 1 the published code has one table for all bins of the vocabulary, ours has one for each."""
        edges = [0, *self.settings["cutoffs"], self.settings["V"]]
        cut = {}
        for name, value in found.items():
            if ".bins.0." not in name or "cluster" in name:
                cut[name] = value
                continue
            for index, (first, last) in enumerate(pairwise(edges)):
                cut[name.replace(".bins.0.", f".bins.{index}.")] = value[first:last]
        return cut

    def config(self, **model_changes: Any) -> Config:
        config = super().config(**model_changes)
        return change_config(config, {"memory": {**config.memory, "kind": "lamemo", "epsilon": self.settings["eps"]}})


def assert_close(ours: Tensor, golden: Tensor, tolerance: float = TOLERANCE, kind: str = "outputs") -> None:
    parity.assert_close(ours, golden, kind, tolerance=tolerance, floor=math.inf)


def assert_state(state: LMState, golden: LaMemoGolden, prefix: str) -> None:
    """Ours hold M right-aligned rows and a count, theirs only the valid rows; our last block keeps none."""
    embeddings = golden.tensor(f"{prefix}/mem_emb")
    num_rows = embeddings.shape[1]
    assert_close(state.stem.hidden[:, -num_rows:], embeddings, kind="states")
    assert all(part.length.tolist() == [num_rows] * len(part.length) for part in (state.stem, *state.blocks))
    for index, memory in enumerate(state.blocks[:-1]):
        assert_close(memory.past.context[:, -num_rows:], golden.tensor(f"{prefix}/mem_ctx{index}"), kind="states")
        assert_close(memory.past.log_sum[:, -num_rows:], golden.tensor(f"{prefix}/mem_logs{index}"), kind="states")
    assert state.blocks[-1].past == ()


def assert_hiddens(hiddens: list[Tensor], golden: LaMemoGolden, prefix: str) -> None:
    """Block outputs of the segment and, but for the last block, of the refreshed memory."""
    seg_len = golden.settings["tgt_len"]
    for index, hidden in enumerate(hiddens):
        assert_close(hidden[:, -seg_len:], golden.tensor(f"{prefix}/layer{index}_out"))
        if index < len(hiddens) - 1 and prefix != "seg0":
            refreshed = golden.tensor(f"{prefix}/layer{index}_memout")
            assert_close(hidden[:, :-seg_len][:, -refreshed.shape[1] :], refreshed)
    assert hiddens[-1].shape[1] == seg_len


def assert_look_ahead(weights: list[Tensor], golden: LaMemoGolden, prefix: str) -> None:
    """alpha and look-ahead probabilities; ours are (H, B, M, 1 + W), theirs (m, B, H) and (m, w, B, H)."""
    for index, joint in enumerate(weights):
        alpha = golden.tensor(f"{prefix}/alpha{index}").permute(2, 0, 1)
        looking = golden.tensor(f"{prefix}/attn_mem{index}").permute(3, 2, 1, 0)
        num_rows, window = looking.shape[-2:]
        assert_close(joint[:, :, -num_rows:, 0], alpha)
        assert_close(joint[:, :, -num_rows:, -window:], (1 - alpha[..., None]) * looking)
        assert (joint[:, :, :-num_rows, 0] == 1).all(), "a row that is not filled keeps its context"


@pytest.fixture
def joint_weights(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the results of `refresh_weights`, block after block."""
    seen: list[Tensor] = []
    refresh_weights = look_ahead.refresh_weights

    def recording(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
        weights, log_sum = refresh_weights(*given, **options)
        seen.append(weights)
        return weights, log_sum

    monkeypatch.setattr(look_ahead, "refresh_weights", recording)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_segments_equal_the_published_code(name: str, joint_weights: list[Tensor]) -> None:
    """Losses, block outputs, refreshed memories, alpha, look-ahead, state and gradients of every segment."""
    golden = LaMemoGolden(name)
    model = golden.model()
    state = empty_state(model)
    for segment in range(len(golden.settings["seg_lens"])):
        prefix = f"seg{segment}"
        model.zero_grad()
        joint_weights.clear()
        output, hiddens = run_segment(model, golden.tensor(f"{prefix}/input"), golden.tensor(f"{prefix}/target"), state)
        state = output.state
        output.nll.mean().backward()
        assert_close(output.nll, golden.tensor(f"{prefix}/loss"))
        assert_hiddens(hiddens, golden, prefix)
        assert_state(state, golden, prefix)
        assert len(joint_weights) == len(hiddens) - 1
        if f"{prefix}/alpha0" in golden.arrays:
            assert_look_ahead(joint_weights, golden, prefix)
        if any(key.startswith(f"{prefix}/grad/") for key in golden.arrays):
            assert_gradients(model, golden, f"{prefix}/grad/")
