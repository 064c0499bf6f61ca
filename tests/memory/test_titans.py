"""Titans against vectors of the paper's equations (tests/golden/titans), in float64, and against its recurrence."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.memory.base import detach_state, named_tensors
from dist_mem.memory.parts import neural_backward
from dist_mem.memory.parts.kernel_choice import describe_kernels
from dist_mem.memory.parts.neural_memory import NeuralTokens, Weights, learn, recall
from dist_mem.memory.titans import GRADIENTS, Titans, TitansState
from dist_mem.nn import compilation as compiling
from dist_mem.nn.layer_spec import LayerSpec, LlamaSpec
from tests.support.compiled_blocks import num_graphs, without_inductor
from tests.support.contract_cases import small_model
from tests.support.messages import refused
from tests.support.parity import assert_close
from tests.support.paths import GOLDEN
from tests.support.published import Vectors, layer_spec, names_in

NAMES = names_in(GOLDEN / "titans")
VARIANTS = {"lmm": "alone", "mac": "context", "mag": "gate", "mal": "layer"}


def spec(given: dict[str, Any], *, norm: str = "post") -> LayerSpec:
    sizes = {"d_model": given["dim"], "num_heads": given["heads"], "d_head": given["dim"] // given["heads"]}
    return layer_spec(norm=norm, seg_len=given["segment"], **sizes)


class Layer(Vectors):
    """Our layer with the reference's weights."""

    def __init__(self, name: str, gradients: str) -> None:
        super().__init__(GOLDEN / "titans" / f"{name}.npz")
        given = self.given = self.settings
        options = Titans.Options(
            variant=VARIANTS[given["kind"]], depth=given["depth"], d_hidden=given["hidden"],
            chunk_len=given["chunk"], step_max=given["theta_max"], kernel=max(1, given["conv"]),
            num_persistent=given["persistent"], window=given["window"], max_gradient=None, gradients=gradients,
        )  # fmt: skip
        self.layer = Titans(spec(given), options).double()

    def named(self) -> dict[str, Tensor]:
        """The reference's weights by our names."""
        theirs = self.weights
        rates = ("theta", "eta", "alpha")
        named = {
            "memory.query.map.weight": theirs["W_q"].T,
            "memory.key_value.map.weight": torch.cat([theirs["W_k"], theirs["W_v"]], dim=1).T,
            "memory.rates.weight": torch.stack([theirs[f"w_{rate}"] for rate in rates]),
            "memory.rates.bias": torch.cat([theirs[f"b_{rate}"] for rate in rates]),
            **{f"memory.starts.{index}.start": theirs[f"M0_{index}"] for index in range(self.given["depth"])},
        }
        if self.given["conv"]:
            named["memory.query.taps"] = theirs["conv_q"].T
            named["memory.key_value.taps"] = torch.cat([theirs["conv_k"], theirs["conv_v"]], dim=1).T
        if "norm_m" in theirs:
            named["combine.attention_norm.weight"] = theirs["norm_y"]
            named["combine.memory_norm.weight"] = theirs["norm_m"]
        else:
            named["combine.norm.weight"] = theirs["norm_y"]
            named["combine.gate.weight"], named["combine.output.weight"] = theirs["W_g"].T, theirs["W_o"].T
        if "persistent" in theirs:
            named["attention.learned"] = theirs["persistent"]
            named["attention.query.weight"], named["attention.output.weight"] = theirs["A_q"].T, theirs["A_o"].T
            named["attention.key_value.weight"] = torch.cat([theirs["A_k"], theirs["A_v"]], dim=1).T
        assert named.keys() == dict(self.layer.named_parameters()).keys()
        return named

    def run(self, x: Tensor, state: TitansState) -> tuple[Tensor, TitansState]:
        valid_len = torch.full((len(x),), x.shape[1])
        output = torch.func.functional_call(self.layer, self.named(), (x, state, valid_len))
        return output.y, output.state

    def states(self, state: TitansState) -> dict[str, Tensor]:
        """Our state by the reference's names."""
        d_model = self.given["dim"]
        found = {f"M_{index}": part for index, part in enumerate(state.weights)}
        found.update({f"S_{index}": part for index, part in enumerate(state.momentum)})
        found.update(zip(("tail_q", "tail_k", "tail_v"), state.tail.split(d_model, dim=-1), strict=True))
        return {**found, "rows": state.rows}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gradients", GRADIENTS[1:])
def test_the_layer_equals_the_equations_of_the_paper(gradients: str, name: str) -> None:
    """Outputs, states and gradients; of one file gradients through all segments, too."""
    ours = Layer(name, gradients)
    state = ours.layer.init_state(torch.arange(ours.given["lanes"]), "cpu", torch.float64)
    through, losses = state, []
    for number in range(ours.given["segments"]):
        x, weight = ours.tensor(f"seg{number}/x").requires_grad_(), ours.tensor(f"seg{number}/w")
        y, new = ours.run(x, state)
        ours.assert_equal(y, f"seg{number}/y")
        states = ours.states(new)
        held = [key for key in ours.arrays if key.startswith(f"seg{number}/state/")]
        assert held
        for key in held:
            ours.assert_equal(states[key.rpartition("/")[2]], key)
        loss = (y * weight).sum()
        ours.assert_gradients(loss, f"seg{number}/grad")
        ours.assert_equal(ours.gradients(loss, {"x": x})["x"], f"seg{number}/grad_x")
        state = detach_state(new)
        y, through = ours.run(x, through)
        losses.append((y * weight).sum())
    if ours.given.get("through_time"):
        ours.assert_gradients(torch.stack(losses).sum(), "through_time/grad")


def random_tokens(*, seg_len: int, d_model: int, lanes: int = 2) -> NeuralTokens:
    """Return tokens of which the last lane's newest two are padding."""
    generator = torch.Generator().manual_seed(seg_len)

    def draw(*shape: int) -> Tensor:
        return torch.randn(lanes, seg_len, *shape, generator=generator, dtype=torch.float64)

    query, key, value = (F.normalize(draw(d_model), dim=-1) for _ in range(3))
    is_real = torch.ones(lanes, seg_len, dtype=torch.float64)
    is_real[-1, -2:] = 0.0
    step, momentum, kept = 0.2 * draw().sigmoid() * is_real, F.logsigmoid(draw()), F.logsigmoid(draw() + 2)
    return NeuralTokens(query, key, 3 * value, step, momentum * is_real, kept * is_real, is_real)


def drawn(depth: int, *, seg_len: int) -> tuple[NeuralTokens, Weights, Weights]:
    """Return tokens, weights and momentum of a network of this depth, all with gradients."""
    generator, shapes = torch.Generator().manual_seed(depth), list(pairwise([3, *[5] * (depth - 1), 3]))
    weights, momentum = (
        tuple(
            (0.5 * torch.randn(2, *shape, generator=generator, dtype=torch.float64)).requires_grad_()
            for shape in shapes
        )
        for _ in range(2)
    )
    tokens = random_tokens(seg_len=seg_len, d_model=3)
    return NeuralTokens(*(part.requires_grad_() for part in tokens[:-1]), tokens[-1]), weights, momentum


def recurrence(
    tokens: NeuralTokens, weights: Weights, momentum: Weights, *, chunk_len: int, max_gradient: float | None
) -> tuple[Tensor, Weights, Weights]:
    """Eqs. 12 to 14, a token at a time, with gradients by autograd."""
    read, anchor = [], weights
    for place in range(tokens.step.shape[1]):
        anchor = weights if place % chunk_len == 0 else anchor
        query, key, value, step, eta, kept, real = (part[:, place] for part in tokens)
        loss = (recall(key[:, None], anchor)[:, 0] - value).square().sum()
        gradients = torch.autograd.grad(loss, anchor, create_graph=True)
        if max_gradient is not None:
            norm = torch.stack([gradient.square().sum((1, 2)) for gradient in gradients]).sum(0).sqrt()
            step = step * (max_gradient / norm).clamp(max=1.0)
        step, eta, kept, real = (part[:, None, None] for part in (step, eta, kept, real))
        momentum = tuple(
            eta.exp() * speed - step * gradient for speed, gradient in zip(momentum, gradients, strict=True)
        )
        weights = tuple(kept.exp() * layer + real * speed for layer, speed in zip(weights, momentum, strict=True))
        read.append(recall(query[:, None], weights))
    return torch.cat(read, dim=1), weights, momentum


@pytest.mark.parametrize(
    ("chunk_len", "depth", "limit"),
    [(1, 1, None), (1, 2, None), (3, 1, None), (3, 2, None), (3, 2, 1.5), (3, 4, None), (16, 1, 1.5), (16, 2, None)],
)
def test_chunks_equal_the_recurrence(chunk_len: int, depth: int, limit: float | None) -> None:
    """Values, and gradients of gradients by autograd, with a part of a chunk and padding at the end."""
    tokens, weights, momentum = drawn(depth, seg_len=11)
    results = []
    for function in (learn, recurrence):
        read, new, speed, *_ = function(tokens, weights, momentum, chunk_len=chunk_len, max_gradient=limit)
        loss = torch.stack([read.square().sum(), *(part.pow(3).sum() for part in (*new, *speed))]).sum()
        asked = [*tokens[:-1], *weights, *momentum]
        first = torch.autograd.grad(loss, asked, create_graph=True)
        second = torch.autograd.grad(torch.stack([part.square().sum() for part in first]).sum(), asked)
        results.append([read, *new, *speed, *first, *second])
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, "the recurrence")


@pytest.mark.parametrize(
    ("seg_len", "chunk_len", "depth", "limit"),
    [(11, 1, 2, None), (11, 3, 1, None), (11, 16, 2, 1.5), (26, 1, 3, 0.5), (29, 2, 2, 0.5), (24, 2, 4, None)],
)
def test_the_backward_of_its_own_is_that_of_autograd(
    seg_len: int, chunk_len: int, depth: int, limit: float | None
) -> None:
    """Of values, states and all gradients through both, for one group of chunks and several, the last incomplete."""
    tokens, weights, momentum = drawn(depth, seg_len=seg_len)
    results = []
    for function in (neural_backward.learn, learn):
        learned = function(tokens, weights, momentum, chunk_len=chunk_len, max_gradient=limit)
        states = (*learned.weights, *learned.momentum)
        loss = torch.stack([learned.read.square().sum(), *(part.pow(3).sum() for part in states)]).sum()
        found = torch.autograd.grad(loss, [*tokens[:-1], *weights, *momentum])
        results.append([learned.read, learned.error, *states, *found])
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, "autograd")


def test_functions_of_chunks_are_whole_graphs_that_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled on GPUs only, each once for chunks of one size."""
    tokens, *_ = drawn(1, seg_len=24)
    weights = tuple(torch.full((2, *shape), 0.5, dtype=torch.float64).requires_grad_() for shape in ((3, 5), (5, 3)))
    results = []
    with without_inductor():
        for calls in (neural_backward.choose_call, lambda function, like: compiling.compile_once(function)):
            monkeypatch.setattr(neural_backward, "choose_call", calls)
            learned = neural_backward.learn(tokens, weights, weights, chunk_len=2, max_gradient=0.5)
            found = torch.autograd.grad(
                learned.read.square().sum() + learned.weights[0].sum(), [*tokens[:-1], *weights]
            )
            results.append([learned.read, *learned.weights, *learned.momentum, *found])
        assert num_graphs() == 4
    assert all(map(torch.equal, *results))


def test_a_compiler_that_fails_for_chunks_ends_no_forward_of_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """At ZeRO stage 3 the other ranks would wait in it."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("no compiler")

    def double(part: Tensor) -> Tensor:
        return 2 * part

    monkeypatch.setattr(compiling, "_inductor", refuse)
    monkeypatch.setattr(neural_backward, "why_not", lambda: "")
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    results = list[Tensor]()
    with pytest.raises(RuntimeError, match="no compiler"), compiling.note_errors():
        results.append(neural_backward.choose_call(double, on_gpu)(torch.ones(2)))
    assert [result.tolist() for result in results] == [[2.0, 2.0]]


def test_the_backward_of_its_own_keeps_little() -> None:
    """Of 64 chunks, where autograd keeps the weights after each."""
    tokens = NeuralTokens(*(torch.zeros(2, 256, *[64] * (place < 3)).requires_grad_() for place in range(7)))
    weights = tuple(torch.zeros(2, 64, 64).requires_grad_() for _ in range(2))
    kept = []
    for function in (neural_backward.learn, learn):
        sizes: dict[int, int] = {}

        def keep(part: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
            return part

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda part: part):
            function(tokens, weights, weights, chunk_len=4)
        kept.append(sum(sizes.values()))
    assert 5 * kept[0] < kept[1]


def test_a_limit_of_the_gradient_keeps_weights_finite_under_any_step() -> None:
    """Repeated keys in one chunk overshoot; the weights stay below step * limit / ((1 - eta) alpha)."""
    ones = torch.ones(1, 64)
    rows = F.normalize(torch.ones(1, 64, 3), dim=-1)
    tokens = NeuralTokens(rows, rows, 5 * rows, ones, ones * math.log(0.5), ones * math.log(0.9), ones)
    weights: Weights
    momentum: Weights
    weights = momentum = (torch.zeros(1, 3, 4) + 0.1, torch.zeros(1, 4, 3) + 0.1)
    for _ in range(20):
        learned = learn(tokens, weights, momentum, chunk_len=32, max_gradient=1.0)
        weights, momentum = learned.weights, learned.momentum
    assert all(part.norm() <= 1.0 / (0.5 * 0.1) for part in weights)


@pytest.mark.parametrize("variant", ["gate", "layer", "alone"])
def test_any_cut_at_chunks_gives_the_same_outputs(variant: str) -> None:
    """The convolution, the window and the network go on over the cut."""
    given = {"dim": 6, "heads": 2, "segment": 12}
    torch.manual_seed(0)
    layer = Titans(spec(given, norm="pre"), Titans.Options(variant=variant, chunk_len=2, window=5)).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 12, 6, dtype=torch.float64)
    outputs = []
    for size in (12, 6, 2):
        state, rows = layer.init_state(torch.arange(2), "cpu", torch.float64), []
        for part in x.split(size, dim=1):
            output = layer(part, state, torch.full((2,), size))
            state = output.state
            rows.append(output.y)
        outputs.append(torch.cat(rows, dim=1))
    for other in outputs[1:]:
        assert_close(other, outputs[0], "another cut")


def test_variants_keep_only_what_they_need() -> None:
    """Parts of the state that a variant does not use have no entries."""
    sizes = {}
    for variant in VARIANTS.values():
        layer = Titans(spec({"dim": 6, "heads": 2, "segment": 4}), Titans.Options(variant=variant))
        state = layer.init_state(torch.arange(2), "cpu", torch.float32)
        sizes[variant] = {name for name, part in named_tensors(state).items() if not part.numel()}
    assert sizes == {"alone": {"asked", "rows"}, "context": {"rows"}, "gate": {"asked"}, "layer": {"asked"}}


@pytest.mark.parametrize("variant", ["gate", "context", "layer"])
def test_attention_is_refused_where_it_cannot_be_computed(variant: str) -> None:
    given, options = spec({"dim": 6, "heads": 2, "segment": 4}), Titans.Options(variant=variant)
    with refused(ValueError, "model.attention", "memory.kind"):
        Titans(replace(given, back_end="triton"), options)
    llama = LlamaSpec(num_kv_heads=1, rope_theta=1e4, norm_eps=1e-5, qkv_bias=False)
    with refused(ValueError, "memory.kind", variant):
        Titans(replace(given, llama=llama), options)
    alone = Titans(replace(given, back_end="triton", llama=llama, norm="pre"), Titans.Options(variant="alone"))
    with refused(ValueError, "memory.variant"):
        _ = alone.evicted_len


def test_a_start_on_a_gpu_says_how_learning_is_differentiated() -> None:
    model = small_model("titans")
    (message,) = describe_kernels(model, "cuda", 512)
    number = len(model.memories())
    assert message == (
        f"learning of {number} layers: recomputed (few weights are kept; memory.products: tf32 with half precision)"
    )
    assert describe_kernels(model, "cpu", 512) == []


def test_products_of_a_backward_that_is_not_used_are_refused() -> None:
    given = spec({"dim": 6, "heads": 2, "segment": 4})
    with refused(ValueError, "memory.products", "memory.gradients"):
        Titans(given, Titans.Options(gradients="kept", products="tf32"))
