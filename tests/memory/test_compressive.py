"""Compressive Transformer: Algorithm 1 and 2 of Rae et al. 2020, written out, and who learns from which loss."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.memory.base import LayerSpec
from dist_mem.memory.compressive import Compressive
from dist_mem.memory.parts.compression import COMPRESSIONS
from dist_mem.memory.parts.inspector import Inspector
from dist_mem.model import MemoryLM
from dist_mem.nn.layers import visible_keys
from tests.support.contract_cases import (
    CASES,
    LANES,
    SEG_LEN,
    fresh_state,
    full_lanes,
    random_segments,
    read,
    small_block,
    small_model,
)
from tests.support.messages import refused

LEARNED = ("conv", "dilated")
every_norm = pytest.mark.parametrize("norm", ["pre", "post"])


def model_of(monkeypatch: pytest.MonkeyPatch, norm: str = "pre", **options: Any) -> MemoryLM:
    monkeypatch.setitem(CASES, "here", small_block("compressive", **options))
    return small_model("here", norm=norm).double()


def outputs(model: MemoryLM, seed: int = 0) -> list[Any]:
    return list(read(model, random_segments(seed) + random_segments(seed + 1), fresh_state(model, torch.float64)))


def compressor_names(model: MemoryLM) -> set[str]:
    return {name for name, _ in model.named_parameters() if ".compression." in name or ".decoder." in name}


def one_lane(layer: Compressive, segments: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs (T, D) and losses of one layer for the segments (T, D) of one lane, as the paper's algorithms say it."""
    options, attention = layer.options, layer.attention
    num_heads, d_head = layer.spec.num_heads, layer.spec.d_head
    memory, compressed = torch.empty(2, 0, layer.spec.d_model, dtype=torch.float64)
    ys, losses = [], []

    def heads(rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (num_heads, d_head)).transpose(0, 1)

    def plain_attention(query: Tensor, rows: Tensor) -> Tensor:
        weight_key, weight_value = attention.key_value.weight.detach().chunk(2)
        key, value = heads(rows @ weight_key.T), heads(rows @ weight_value.T)
        return (query @ key.mT / d_head**0.5).softmax(-1) @ value

    for x in segments:
        context = torch.cat([compressed, memory])
        visible = visible_keys(torch.ones(1, len(context), dtype=torch.bool), len(x), same_length=False)
        ys.append(attention(layer.norm(x)[None], layer.norm(context)[None], visible).y[0])
        loss = torch.zeros((), dtype=torch.float64)
        if len(memory) == options.mem_len:
            old = memory[: len(x)]
            new = layer.compression(old[None], torch.zeros(1, len(old)))[0]
            query = heads(layer.norm(x) @ attention.query.weight.T).detach()
            norm = layer.norm
            loss = torch.linalg.vector_norm(plain_attention(query, norm(new)) - plain_attention(query, norm(old)))
            compressed = torch.cat([compressed, new])[-options.cmem_len :].detach()
        memory = torch.cat([memory, x])[-options.mem_len :].detach()
        losses.append(loss)
    return ys, losses


@every_norm
@pytest.mark.parametrize("compression", [name for name in COMPRESSIONS if name != "most_used"])
def test_a_layer_equals_the_algorithms_of_the_paper(
    monkeypatch: pytest.MonkeyPatch, norm: str, compression: str
) -> None:
    model = model_of(monkeypatch, norm, compression=compression, mem_len=2 * SEG_LEN, cmem_len=5)
    layer = model.blocks[0].memory
    segments = torch.randn(8, LANES, SEG_LEN, layer.spec.d_model, dtype=torch.float64)
    ys, losses = one_lane(layer, [segment[0] for segment in segments])
    state = layer.init_state(torch.arange(LANES), "cpu", torch.float64)
    for x, y, loss in zip(segments, ys, losses, strict=True):
        output = layer(x, state, full_lanes())
        state = output.state
        torch.testing.assert_close(output.y[0], y, rtol=0, atol=1e-12)
        if compression in LEARNED:
            torch.testing.assert_close(output.aux["compression"][0], loss, rtol=0, atol=1e-9)


@every_norm
def test_rate_1_and_the_identity_equal_transformer_xl_with_the_longer_memory(
    monkeypatch: pytest.MonkeyPatch, norm: str
) -> None:
    compressive = model_of(monkeypatch, norm, compression="mean", compression_rate=1, cmem_len=2 * SEG_LEN)
    monkeypatch.setitem(CASES, "long", {"kind": "transformer_xl", "mem_len": 3 * SEG_LEN})
    longer = small_model("long", norm=norm).double()
    longer.load_state_dict(compressive.state_dict())
    for one, other in zip(outputs(compressive), outputs(longer), strict=True):
        torch.testing.assert_close(one.nll, other.nll, rtol=0, atol=1e-12)


@every_norm
@pytest.mark.parametrize("loss", ["attention", "autoencoder"])
@pytest.mark.parametrize("compression", LEARNED)
@pytest.mark.parametrize("kernel", [None, 3])
def test_model_and_compression_learn_from_their_own_loss_only(
    monkeypatch: pytest.MonkeyPatch, norm: str, compression: str, loss: str, kernel: int | None
) -> None:
    model = model_of(monkeypatch, norm, compression=compression, compression_loss=loss, kernel=kernel)
    *_, output = outputs(model)
    parameters = dict(model.named_parameters())
    of_task = dict(zip(parameters, grads(output.nll.sum(), parameters), strict=True))
    of_loss = dict(zip(parameters, grads(output.aux["compression"].sum(), parameters), strict=True))
    own = compressor_names(model)
    assert {name for name, gradient in of_task.items() if gradient is None} == own
    assert {name for name, gradient in of_loss.items() if gradient is not None} == own
    assert all(gradient.abs().sum() > 0 for gradient in of_loss.values() if gradient is not None)


def grads(loss: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)


def test_another_compression_changes_the_next_segments_loss_and_not_this_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(monkeypatch)
    with torch.no_grad():
        before = outputs(model)
        for name, parameter in model.named_parameters():
            parameter.mul_(2.0 if name in compressor_names(model) else 1.0)
        after = outputs(model)
    same = [torch.equal(one.nll, other.nll) for one, other in zip(before, after, strict=True)]
    assert same == [True, True, *[False] * (len(same) - 2)], "the second segment compresses, the third reads it"


def test_nothing_is_learned_and_no_loss_computed_where_there_is_nothing_to_learn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for compression in set(COMPRESSIONS) - set(LEARNED):
        model = model_of(monkeypatch, compression=compression)
        assert not compressor_names(model)
        assert outputs(model)[-1].aux == {}


def test_most_used_keeps_the_rows_that_get_most_attention_in_their_order() -> None:
    rows = torch.arange(6.0).view(1, 6, 1)
    usage = torch.tensor([[0.1, 0.9, 0.2, 0.3, 0.8, 0.0]])
    kept = COMPRESSIONS["most_used"](1, rate=2)(rows, usage)
    assert kept.flatten().tolist() == [1.0, 3.0, 4.0]


@torch.no_grad()
def most_used(**sizes: int) -> Compressive:
    """A layer for segments of 5 tokens, with large weights: what it attends to most is clear."""
    spec = LayerSpec(0, 1, 12, 2, 6, 5, 0.0, 0.0, "pre", None, same_length=False, seed=0)
    torch.manual_seed(0)
    layer = Compressive(spec, Compressive.Options(compression="most_used", **sizes)).eval()
    for parameter in layer.parameters():
        parameter.normal_()
    return layer


@torch.no_grad()
@pytest.mark.parametrize(
    "sizes",
    [
        {"mem_len": 5, "cmem_len": 4, "compression_rate": 2},
        {"mem_len": 10, "cmem_len": 3, "compression_rate": 2},
        {"mem_len": 5, "cmem_len": 1, "compression_rate": 2},  # fewer rows than leave at once
    ],
)
def test_most_used_says_which_tokens_its_rows_are_and_forgets_those(sizes: dict[str, int]) -> None:
    """Rows are kept as they are, so that each is found among the inputs; lanes keep rows of other places."""
    layer = most_used(**sizes)
    segments, full, cmem_len = torch.randn(6, 3, 5, 12), torch.full((3,), 5), sizes["cmem_len"]
    state, trace = layer.init_state(torch.arange(3), "cpu", torch.float32), None
    for number, x in enumerate(segments):
        found = layer.inspect(x, state, full, trace)
        spans = found.rows["compressed"].spans
        before = torch.cat(list(segments[:number]), dim=1) if number else x[:, :0]
        for lane in range(3):
            for row in range(cmem_len):
                begin, end = int(spans.begin[lane, row]), int(spans.end[lane, row])
                is_held = row >= cmem_len - int(state.compressed.length[lane])
                assert end - begin == is_held
                if not is_held:
                    continue
                assert torch.equal(state.compressed.hidden[lane, row], before[lane, begin])
                taken = layer.forget(state, spans.begin[:, row], spans.end[:, row], trace)
                assert (~taken.compressed.shown[lane]).nonzero().flatten().tolist() == [row]
                assert taken.memory.shown[lane].all()
        state, trace = layer(x, state, full).state, found.trace
    assert (state.compressed.length == cmem_len).all()


@torch.no_grad()
def test_a_token_that_was_forgotten_stays_so_when_most_used_keeps_it() -> None:
    """All tokens that leave are forgotten but one: whichever rows are kept, only that one is shown."""
    layer = most_used(mem_len=5, cmem_len=4, compression_rate=2)
    first, second = torch.randn(2, 1, 5, 12)
    full = torch.tensor([5])
    for place in range(5):
        state = layer(first, layer.init_state(torch.zeros(1, dtype=torch.int64), "cpu", torch.float32), full).state
        for begin, end in ((-5, place - 5), (place - 4, 0)):
            state = layer.forget(state, torch.tensor([begin]), torch.tensor([end]))
        compressed = layer(second, state, full).state.compressed
        shown = compressed.hidden[compressed.shown & (torch.arange(4) >= 2)]
        assert torch.equal(shown, first[0, place : place + 1])


@torch.no_grad()
@pytest.mark.parametrize("over_linear", [False, True])
def test_tokens_that_fill_no_row_are_in_none_of_a_signal_either(
    over_linear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4 tokens the first 3 become a row, so the last may be forgotten without a change, and no other."""
    below = small_block("compressive", mem_len=SEG_LEN, cmem_len=1, compression_rate=3)
    over = small_block("linear", over=below) if over_linear else below
    monkeypatch.setitem(CASES, "here", small_block("infinite", over=over))
    model = small_model("here")
    state = fresh_state(model)
    with Inspector(model.memories()) as inspector:
        for number in range(5):
            ((tokens, targets),) = random_segments(number)[:1]
            state = model(tokens, targets, full_lanes(), state=state).state
            inspector.commit()
        held = inspector.layers[0].rows["signal"].spans
        assert (held.end % SEG_LEN == 3).all()
        assert (held.begin % SEG_LEN == 0).all()
        newest = int(held.end.max()) - SEG_LEN  # the segment that has been read is now in the past too
        for token, is_held in () if over_linear else ((newest - 1, True), (newest, False)):  # linear forgets nothing
            begin = torch.full((LANES,), token)
            without = inspector.forget(state.blocks, begin, begin + 1)[0].coefficients
            assert torch.equal(without, state.blocks[0].coefficients) != is_held


@torch.no_grad()
def test_a_signal_over_most_used_knows_the_segments_of_its_rows_and_forgets_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any tokens of a segment may be those that enter the signal."""
    over = small_block("compressive", compression="most_used")
    monkeypatch.setitem(CASES, "here", small_block("infinite", over=over))
    model = small_model("here")
    state = fresh_state(model)
    with Inspector(model.memories()) as inspector:
        for tokens, targets in random_segments() + random_segments(1):
            state = model(tokens, targets, full_lanes(), state=state).state
            inspector.commit()
    begin, end = inspector.layers[0].rows["signal"].spans
    assert (begin < end).all()
    assert not (begin % SEG_LEN).any()
    assert not (end % SEG_LEN).any()
    with pytest.raises(NotImplementedError, match="most_used"):
        inspector.forget(state.blocks, torch.full((LANES,), -SEG_LEN), torch.zeros(LANES, dtype=torch.int64))


@pytest.mark.parametrize(
    ("key", "value"), [("mem_len", SEG_LEN + 1), ("mem_len", 2), ("compression_rate", SEG_LEN + 1), ("cmem_len", 0)]
)
def test_options_that_do_not_fit_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, key: str, value: Any) -> None:
    with refused(ValueError, f"memory.{key}"):
        model_of(monkeypatch, **{key: value})
