"""The Memorizing Transformer against published code (tests/golden/memorizing; README.md there), in float64; its rows.

The published backbone is not ours (RMS norms, ReLU without biases, a tied embedding), so it is written out here around
our layer. Its first layer has no stored rows: ours has, behind a gate that is closed.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.memory import build_memory
from dist_mem.memory.base import select_lanes
from dist_mem.memory.memorizing import GatedAttention, Memorizing, MemorizingState
from dist_mem.memory.parts.stored_rows import Store, largest, nearest, pick, spans_of, write
from dist_mem.nn import layers
from dist_mem.nn.attention import AttentionRead, attend
from dist_mem.nn.attention_inputs import Inputs
from dist_mem.nn.layer_spec import LayerSpec
from dist_mem.nn.unit_attention import buckets
from tests.support.messages import refused, said
from tests.support.parity import assert_close
from tests.support.paths import GOLDEN
from tests.support.published import Vectors, layer_spec, names_in, rms

NAMES = names_in(GOLDEN / "memorizing")
DATABASE = "state/database/transformer1/mem_layer_test/wrapped"
CLOSED = -1e4  # a gate whose share is 0 in float64


def spec(index: int = 0, **changes: Any) -> LayerSpec:
    sizes = {"num_layers": 2, "d_model": 12, "num_heads": 3, "d_head": 5, "seg_len": 6, "same_length": True}
    return layer_spec(layer_index=index, **sizes | changes)


class Backbone(Vectors):
    """The published model: y = x + attention(rms(x)), y + relu(rms(y) W_1) W_2, for both layers."""

    def __init__(self, name: str) -> None:
        super().__init__(GOLDEN / "memorizing" / f"{name}.npz")
        config = self.settings
        self.num_segments, self.seg_len = config["segments"], config["segment"]
        released = {
            "sees_itself": False,
            "empty_rows": not config.get("mask_empty", False),
            "neighbors": config["neighbors"],
            "search": "exact" if config["retrieval"] == "exact" else "buckets",
        }
        memory_layer = "none" if config["no_positions_in_memory_layer"] else "t5"
        self.layers = [
            Memorizing(spec(index), Memorizing.Options(mem_len=config["database"], positions=positions, **released))
            for index, positions in enumerate(("t5", memory_layer))
        ]

    def attention(self, index: int, rows: Tensor, state: MemorizingState) -> tuple[Tensor, MemorizingState]:
        """Run our layer with the published weights, so that gradients reach these."""
        layer, base = f"transformer{index}", f"transformer{index}/tbase"
        kernels = [self.weights[f"{base}/_kvq/{name}_layer/kernel"].T for name in ("queries", "keys", "values")]
        closed = torch.full((3,), CLOSED, dtype=torch.float64)
        named = {
            "attention.query.weight": kernels[0],
            "attention.key_value.weight": torch.cat(kernels[1:]),
            "attention.output.weight": self.weights[f"{base}/post_attn_mlp/output_layer/kernel"].T,
            "attention.scale": self.weights[f"{base}/_kvq/attention_scale"],
            "attention.gate": self.weights.get(f"{layer}/external_memory_bias", closed),
        }
        if (position := self.weights.get(f"{layer}/relative_positions/rel_embedding")) is not None:
            named["attention.position"] = position
        output = torch.func.functional_call(
            self.layers[index], named, (rows, state, torch.full((len(rows),), self.seg_len)), strict=True
        )
        return output.y, output.state

    def segment(self, number: int, states: list[MemorizingState]) -> tuple[Tensor, list[Tensor], list[MemorizingState]]:
        """Return losses (B, N), the rows after attention and after block of every layer, and the new states."""
        weights, found, new = self.weights, [], []
        columns = self.tensor("stream").long()[:, number * self.seg_len : (number + 1) * self.seg_len + 1]
        x = weights["embed/embedding"][columns[:, :-1]]
        for index, state in enumerate(states):
            base = f"transformer{index}/tbase"
            attended, state = self.attention(index, rms(x, weights[f"{base}/_kvq/pre_attn_layernorm/scale"]), state)
            middle = x + attended
            inner = rms(middle, weights[f"{base}/pre_ffn_layernorm/scale"]) @ weights[f"{base}/ffn/hidden0/kernel"]
            x = middle + inner.relu() @ weights[f"{base}/ffn/output_layer/kernel"]
            found += [middle, x]
            new.append(state)
        logits = rms(x, weights["final_layernorm/scale"]) @ weights["embed/embedding"].T / x.shape[-1] ** 0.5
        return F.cross_entropy(logits.mT, columns[:, 1:], reduction="none"), found, new

    def fresh(self) -> list[MemorizingState]:
        return [layer.init_state(torch.arange(2), "cpu", torch.float64) for layer in self.layers]

    def entering(self, number: int, states: list[MemorizingState]) -> list[MemorizingState]:
        """Return states in which lanes that start a document before this segment are empty."""
        starts = self.tensor(f"seg{number}/start")
        return [select_lanes(starts, fresh, state) for fresh, state in zip(self.fresh(), states, strict=True)]

    def assert_state(self, number: int, states: list[MemorizingState]) -> None:
        for index, state in enumerate(states):
            for ours, name in ((state.cached_keys, "keys"), (state.cached_values, "values")):
                self.assert_equal(ours.transpose(1, 2), f"seg{number}/state/transformer{index}/previous_{name}_test")
        store = states[1].store
        for ours, name in ((store.keys, "key_db"), (store.values, "value_db")):
            self.assert_equal(ours.flatten(0, 1), f"seg{number}/{DATABASE}/{name}")
        counts = self.tensor(f"seg{number}/{DATABASE}/database_index").view(2, 3)
        assert torch.equal(store.num_written[:, None].expand(2, 3), counts.long())


@pytest.mark.parametrize("name", NAMES)
def test_segments_equal_the_published_code(name: str) -> None:
    """Losses, rows after every sub-layer, caches and stored rows, and the gradients of every segment's loss."""
    golden = Backbone(name)
    states = golden.fresh()
    for number in range(golden.num_segments):
        loss, found, states = golden.segment(number, golden.entering(number, states))
        assert_close(loss, golden.tensor(f"seg{number}/loss"), "loss")
        for index in range(2):
            for rows, place in zip(found[2 * index : 2 * index + 2], ("mid", "out"), strict=True):
                assert_close(rows, golden.tensor(f"seg{number}/layer{index}_{place}"), f"layer {index}, {place}")
        golden.assert_state(number, states)
        golden.assert_gradients(loss.mean(), f"seg{number}/grad")


def store_after(num_tokens: list[int], *, mem_len: int) -> tuple[Store, Tensor]:
    """Return a store of 2 lanes and 3 heads after segments of these lengths, and all their keys (B, H, N, K)."""
    torch.manual_seed(0)
    keys = torch.randn(2, 3, sum(num_tokens), 4, dtype=torch.float64)
    rows = torch.zeros(2, 3, mem_len, 4, dtype=torch.float64)
    store = Store(rows, rows, torch.zeros(2, dtype=torch.int64))
    for part in keys.split(num_tokens, dim=2):
        store = write(store, part, 2 * part)
    return store, keys


@pytest.mark.parametrize("lengths", [[3], [3, 3, 3], [5, 5], [12], [1, 12, 2]])
def test_every_stored_row_is_that_of_the_token_it_is_said_to_be_of(lengths: list[int]) -> None:
    store, keys = store_after(lengths, mem_len=5)
    spans = spans_of(store)
    held = min(5, sum(lengths))
    for lane in range(2):
        is_written = spans.begin[lane] < spans.end[lane]
        assert sorted(spans.begin[lane][is_written].tolist()) == list(range(-held, 0))
        for row in is_written.nonzero().flatten().tolist():
            token = sum(lengths) + int(spans.begin[lane, row])
            assert torch.equal(store.keys[lane, :, row], keys[lane, :, token])
            assert torch.equal(store.values[lane, :, row], 2 * keys[lane, :, token])


@pytest.mark.parametrize(("mem_len", "number"), [(64, 8), (256, 31), (62, 3), (60, 60)])
def test_the_fast_search_and_the_fast_reading_equal_the_plain_ones(mem_len: int, number: int) -> None:
    """A search by groups, one of all scores where groups do not help, and a length that no group divides."""
    scores, rows = torch.randn(2, 3, 5, mem_len), torch.randn(2, 3, mem_len, 4)
    scores[:, :, 0, 10:] -= 1e6  # rows not written yet
    plain = scores.topk(number, dim=-1).indices
    index = largest(scores, number)
    assert torch.equal(scores.gather(-1, index), scores.gather(-1, plain))
    assert torch.equal(index[:, :, 1:], plain[:, :, 1:])  # without equal scores
    gathered = rows.gather(2, plain.flatten(2)[..., None].expand(-1, -1, -1, 4)).unflatten(2, plain.shape[2:])
    assert torch.equal(pick(rows, plain), gathered)


@pytest.mark.parametrize("chunk_len", [1, 2, 6, 100])
def test_a_query_reads_the_rows_that_are_nearest(chunk_len: int) -> None:
    store, _ = store_after([3, 4, 3], mem_len=8)
    query = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    index = nearest(query, store, number=3, search="exact", chunk_len=chunk_len, empty=False)
    for place in np.ndindex(2, 3, 6):
        products = (store.keys[place[:2]] @ query[place]).tolist()
        assert set(index[place].tolist()) == set(sorted(range(8), key=lambda row: -products[row])[:3])


@pytest.mark.parametrize(("name", "number"), [("fp32", 4), ("fp16", 2), ("bf16", 2)])
def test_rows_are_stored_in_the_dtype_that_is_asked_for(name: str, number: int) -> None:
    memory = Memorizing(spec(), Memorizing.Options(mem_len=12, neighbors=4, rows_dtype=name))
    state = memory.init_state(torch.arange(2), "cpu", torch.float32)
    state = memory(torch.randn(2, 6, 12), state, torch.full((2,), 6)).state
    assert {state.store.keys.element_size(), state.store.values.element_size()} == {number}
    assert state.cached_keys.dtype == torch.float32
    exact = Memorizing(spec(), Memorizing.Options(mem_len=12, neighbors=4))
    exact.load_state_dict(memory.state_dict())
    x = torch.randn(2, 6, 12)
    state32 = state._replace(
        store=state.store._replace(keys=state.store.keys.float(), values=state.store.values.float())
    )
    found, expected = memory(x, state, torch.full((2,), 6)).y, exact(x, state32, torch.full((2,), 6)).y
    assert torch.equal(found, expected), "maths in float32"


def test_positions_have_the_buckets_of_t5() -> None:
    """Computed apart: the first distance of every bucket."""
    distances = torch.arange(300)
    first = [int((buckets(distances) == number).nonzero()[0]) for number in range(32)]
    assert first == [*range(17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def test_outputs_depend_on_the_stored_rows_that_inspection_shows_and_on_no_other() -> None:
    """Without it outputs differ, and without another they are the same bits."""
    options = Memorizing.Options(mem_len=60, neighbors=1, cache_len=0)
    memory = Memorizing(spec(same_length=False), options).double()
    assert isinstance(memory.attention, GatedAttention)
    torch.nn.init.normal_(memory.attention.query.weight)
    state = memory.init_state(torch.arange(1), "cpu", torch.float64)
    valid_len, segments = torch.full((1,), 6), torch.randn(9, 1, 6, 12, dtype=torch.float64)
    for x in segments[:8]:
        state = memory(x, state, valid_len).state
    weights = memory.inspect(segments[8], state, valid_len).rows["memory"]
    read = (weights.weights > 0).any(dim=0).any(dim=1)[0]  # by any head and query
    assert 0 < read.sum() <= 18
    for row in range(48):
        token = int(weights.spans.begin[0, row])
        without = memory.forget(state, torch.tensor([token]), torch.tensor([token + 1]))
        is_same = torch.equal(memory(segments[8], without, valid_len).y, memory(segments[8], state, valid_len).y)
        assert is_same != bool(read[row])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"search": "buckets", "mem_len": 10, "neighbors": 4}, ["memory.mem_len", "memory.neighbors"]),
        ({"cache_len": 0}, ["model.same_length", "memory.cache_len"]),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], named: list[str]) -> None:
    with refused(ValueError, *named):
        build_memory({"kind": "memorizing", **options}, spec())


@pytest.mark.parametrize(
    ("name", "value"), [("cache_len", 4), ("positions", "none"), ("sees_itself", False), ("kernel", 2)]
)
def test_what_only_an_own_attention_has_is_refused_over_another_one(name: str, value: Any) -> None:
    block = {"kind": "memorizing", "over": {"kind": "causal"}}
    build_memory(block, spec(same_length=False))
    with refused(ValueError, f"memory.{name}", value, "memory.over"):
        build_memory({**block, name: value}, spec(same_length=False))


@pytest.mark.parametrize("sees_itself", [True, False])
@pytest.mark.parametrize("back_end", ["auto", "simple", "chunked", "sdpa", "triton"])
def test_the_back_end_that_is_named_is_the_one_that_attends(
    back_end: str, sees_itself: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Memorizing.Options(sees_itself=sees_itself, positions="none", mem_len=64)
    long = spec(seg_len=512, back_end=back_end)
    if not sees_itself and back_end not in ("auto", "simple"):
        with refused(ValueError, "model.attention", back_end, "memory.sees_itself"):
            Memorizing(long, options)
        return
    used = ["simple"]

    def record(inputs: Inputs, back_end: str) -> AttentionRead:
        used.append(back_end)
        return attend(inputs, back_end)

    monkeypatch.setattr(layers, "attend", record)
    memory = Memorizing(long, options)
    x = torch.zeros(1, 512, 12)
    memory(x, memory.init_state(torch.zeros(1, dtype=torch.int64), x.device, x.dtype), torch.tensor([512]))
    (line,) = layers.describe_attention(memory, "cpu", 512)
    said(line, f": {used[-1]} (")
