"""The Recurrent Memory Transformer: what its rows see, how its memory begins, and what it refuses.

Parity with the published code: test_rmt_parity.py.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.block import model_spec
from dist_mem.config import Config, ModelConfig, TrainConfig, change_config
from dist_mem.memory.parts.memory_tokens import MemoryTokenAttention
from dist_mem.model import MemoryLM
from dist_mem.nn.layers import merge_heads, relative_queries, split_heads
from tests.support.contract_cases import fresh_state, full_lanes, random_segments, read, small_block, small_model
from tests.support.messages import refused


def test_the_memory_is_what_the_last_block_makes_of_the_written_rows_after_the_final_norm() -> None:
    model, tops = small_model("rmt", norm="pre"), []
    model.final_norm.register_forward_hook(lambda _, __, output: tops.append(output))
    output = next(read(model, random_segments(), fresh_state(model)))
    assert torch.equal(output.state.stem.rows, tops[0][:, -3:]) and not output.state.stem.is_fresh.any()


def test_a_document_begins_with_the_rows_as_they_are_learned_by_then() -> None:
    """An empty memory that was made before an update has the rows after it, so it does not hold them."""
    model, tokens = small_model("rmt"), random_segments()[0]
    state, start = fresh_state(model), model.get_parameter("stem.first.start")
    before = model(*tokens, full_lanes(), state=state)
    before.nll.sum().backward()
    assert start.grad is not None and start.grad.abs().sum() > 0
    with torch.no_grad():
        start.sub_(start.grad)
    after, again = (model(*tokens, full_lanes(), state=empty).nll for empty in (state, fresh_state(model)))
    assert torch.equal(after, again) and not torch.equal(after, before.nll)


def test_the_first_rows_are_one_row_repeated_and_as_large_as_published() -> None:
    start = MemoryLM(model_spec(config(num_tokens=4), 11)).get_parameter("stem.first.start")
    assert torch.equal(start, start[:1].expand_as(start)) and 0.8 < start.std() < 1.2


def config(model: dict[str, Any] | None = None, **options: Any) -> Config:
    sizes: dict[str, Any] = {"num_layers": 2, "d_model": 256, "num_heads": 2, "d_inner": 16, **(model or {})}
    return Config(model=ModelConfig(**sizes), memory={"kind": "rmt", **options}, train=TrainConfig(seg_len=4))


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        (config(read_cache=True), "memory.read_cache"),
        (config(at_end=False), "memory.at_end"),
        (config({"same_length": True}), "model.same_length"),
        (config({"kind": "llama", "norm": "pre"}), "memory.kind"),
    ],
)
def test_what_has_no_meaning_is_refused(asked: Config, key: str) -> None:
    with refused(ValueError, key):
        MemoryLM(model_spec(asked, 11))


def test_a_memory_over_it_gets_the_segment_and_not_the_memory_tokens() -> None:
    model = small_model("infinite over rmt")
    output = next(read(model, random_segments(), fresh_state(model)))
    assert [state.pending.shape[1] for state in output.state.blocks] == [4] * 3
    wrong = change_config(config(), {"memory": small_block("infinite", over=small_block("rmt", mem_len=4))})
    with refused(ValueError, "memory.over.mem_len"):
        MemoryLM(model_spec(wrong, 11))


def as_published(layer: MemoryTokenAttention, x: Tensor, cache: Tensor) -> Tensor:
    """The authors' attention of all rows, with one mask and one shift of the scores by distance, as they write it.

    The shift pads the scores with a column, and reads the result with rows one shorter: what lies to the right of the
    diagonal is then of the next row.
    """
    keys, values = layer.pairs(cache, x)
    num_rows, num_keys, num_tokens = x.shape[1], keys.shape[2], layer.num_tokens
    table = layer.position_keys(x, num_keys=num_keys)
    biases = {"content_bias": layer.content_bias, "position_bias": layer.position_bias}
    content, relative = relative_queries(split_heads(layer.query(x), layer.num_heads), table, **biases)
    by_distance = relative.query @ table[:, None, :, :-1]
    padded = torch.cat([torch.zeros_like(by_distance[..., :1]), by_distance], dim=-1)
    shifted = padded.reshape(*padded.shape[:2], num_keys + 1, num_rows)[:, :, 1:].reshape(by_distance.shape)
    row, column = torch.arange(num_rows)[:, None], torch.arange(num_keys) - cache.shape[1]
    visible = column <= row
    for begin, end in ((0, num_tokens), (num_rows - layer.num_after, num_rows)):
        in_block = (begin <= row) & (row < end)
        visible |= in_block & (begin <= column) & (column < end)
        visible &= ~in_block | (column >= 0) | torch.tensor(layer.read_cache)
    shares = (content @ keys.mT + shifted).masked_fill(~visible, -torch.inf).softmax(-1)
    return layer.output(merge_heads(shares @ values))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("read_cache", [False, True])
@pytest.mark.parametrize("at_end", [False, True])
def test_segments_of_any_length_have_the_scores_of_the_published_code(
    num_tokens: int, read_cache: bool, at_end: bool
) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_heads": 2, "d_head": 3, "dropout": 0.0, "attention_dropout": 0.0, "clamp_len": None}
    layer = MemoryTokenAttention(num_tokens=num_tokens, at_end=at_end, read_cache=read_cache, d_model=8, **sizes)
    for parameter in layer.double().parameters():
        torch.nn.init.normal_(parameter)
    cache = torch.randn(2, 7 if read_cache else 0, 8, dtype=torch.float64)
    for seg_len in range(1, 7):
        x = torch.randn(2, num_tokens + seg_len + layer.num_after, 8, dtype=torch.float64)
        valid = torch.ones(2, cache.shape[1], dtype=torch.bool)
        y = layer(x, cache, valid, torch.full((2,), seg_len)).y
        torch.testing.assert_close(y, as_published(layer, x, cache), rtol=1e-10, atol=1e-10)
