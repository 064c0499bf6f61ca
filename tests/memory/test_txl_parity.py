"""Transformer-XL against the authors' code (tests/golden/txl), and cut into segments of any length.

The published code ran in float32, ours runs in float64. Arrays are time-first there and lanes first here.
"""

import pytest
import torch

from dist_mem.block import model_spec
from dist_mem.config import change_config
from dist_mem.model import LMState, MemoryLM
from tests.support.published import names_in
from tests.support.published_txl import GOLDEN, Golden, assert_close, assert_gradients, empty_state, run_segment

NAMES = names_in(GOLDEN)


def assert_memories(state: LMState, golden: Golden, prefix: str) -> None:
    """Ours hold M right-aligned rows and a count, theirs only the valid rows; their topmost level is never read."""
    for index, memory in enumerate(state.blocks):
        expected = golden.tensor(f"{prefix}/mem{index}")
        num_rows = expected.shape[1]
        assert memory.length.tolist() == [num_rows] * expected.shape[0]
        assert_close(memory.hidden[:, -num_rows:], expected, kind="states")


@pytest.mark.parametrize("name", NAMES)
def test_segments_equal_the_published_code(name: str) -> None:
    """Losses, block outputs, memories and gradients of every segment."""
    golden = Golden(name)
    model = golden.model()
    state = empty_state(model)
    for segment in range(len(golden.settings["seg_lens"])):
        prefix = f"seg{segment}"
        model.zero_grad()
        output, hiddens = run_segment(model, golden.tensor(f"{prefix}/input"), golden.tensor(f"{prefix}/target"), state)
        state = output.state
        output.nll.mean().backward()
        assert_close(output.nll, golden.tensor(f"{prefix}/loss"))
        for index, hidden in enumerate(hiddens):
            assert_close(hidden, golden.tensor(f"{prefix}/layer{index}_out"))
        if golden.settings["mem_len"]:
            assert_memories(state, golden, prefix)
        assert_gradients(model, golden, f"{prefix}/grad/")


def test_evaluation_lengths_equal_the_published_code() -> None:
    """Trained at T = 6, M = 8; evaluated at T = 4, M = 11, clamp 5, same_length: memories longer, weights the same."""
    golden = Golden("base")
    seg_len, _, mem_len, clamp_len, same_length = golden.settings["eval_lens"]
    config = change_config(golden.config(clamp_len=clamp_len, same_length=same_length), {"memory.mem_len": mem_len})
    model = golden.model(config).eval()
    stream, expected = golden.tensor("stream"), golden.tensor("eval/loss")
    state, losses = empty_state(model), []
    windows = (stream[:, shift : expected.shape[1] + shift].split(seg_len, dim=1) for shift in (0, 1))
    for tokens, targets in zip(*windows, strict=True):
        output, _ = run_segment(model, tokens, targets, state)
        state = output.state
        losses.append(output.nll)
    assert_close(torch.cat(losses, 1), expected)
    assert_memories(state, golden, "eval")


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("splits", [[12, 12], [5, 1, 1, 7, 10], [1] * 24])
@pytest.mark.parametrize(
    ("same_length", "memory"),
    [(False, {"mem_len": 24}), (False, {"mem_len": 24, "kernel": 4}), (True, {"mem_len": 5, "kernel": 4})],
)
def test_where_every_query_sees_as_many_rows_segmentation_changes_nothing(
    norm: str, splits: list[int], same_length: bool, memory: dict[str, int]
) -> None:
    """With a memory longer than the history, or with `same_length`; the convolution sees rows before the memory."""
    golden = Golden("base")
    config = golden.config(norm=norm, same_length=same_length)
    config = change_config(config, {"memory": {**config.memory, **memory}})
    torch.manual_seed(0)
    model = MemoryLM(model_spec(config, 37)).double().eval()
    torch.nn.init.normal_(model.blocks[0].memory.attention.query.weight)
    stream = torch.randint(0, 37, (2, 25), generator=torch.Generator().manual_seed(1))
    whole, _ = run_segment(model, stream[:, :-1], stream[:, 1:], empty_state(model))
    state, losses = empty_state(model), []
    for tokens, targets in zip(stream[:, :-1].split(splits, 1), stream[:, 1:].split(splits, 1), strict=True):
        output, _ = run_segment(model, tokens, targets, state)
        state = output.state
        losses.append(output.nll)
    torch.testing.assert_close(torch.cat(losses, 1), whole.nll, rtol=0, atol=1e-10)
