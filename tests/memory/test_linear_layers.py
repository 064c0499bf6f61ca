"""The presets of linear memories: two equal published layers, and all their recurrence."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor

from dist_mem.memory import convert_options, linear
from dist_mem.memory.base import detach_state, named_tensors
from dist_mem.memory.linear import LinearMemory
from dist_mem.memory.parts.linear_rule import recurrent_rule
from dist_mem.nn.layers import initialize
from tests.support import parity, paths
from tests.support.published import Vectors, layer_spec, names_in

MEMORY = paths.ROOT / "configs" / "memory"
D_MODEL, HEADS, D_HEAD, SEG_LEN = 12, 2, 6, 10
PRESETS = {  # numbers of the state of a lane, and of the weights, at these sizes: H K V + 3 (2 G K + H V); by hand
    "retnet": (144, 12 * (24 + 24 + 24) + 12 + 24 * 12),
    "mamba2": (144 + 3 * 36, 12 * (36 + 24 + 2) + 4 * 36 + 3 * 2 + 24 + 24 * 12),
    "gla": (144, 12 * (24 + 24 + 24) + 16 * (12 + 12) + 12 + 12 + 24 * 12),
    "deltanet": (72 + 3 * 36, 12 * (36 + 2) + 4 * 36 + 6 + 12 * 12),
    "gated_deltanet": (144 + 3 * 48, 12 * (48 + 24 + 4) + 4 * 48 + 2 * 2 + 12 + 24 * 12),
    "kda": (72 + 3 * 36, 12 * (36 + 2) + 2 * 6 * (12 + 12) + 4 * 36 + 2 + 12 + 6 + 12 * 12),
}


def preset(name: str, *, norm: str = "post", d_model: int = D_MODEL, d_head: int = D_HEAD, **more: Any) -> LinearMemory:
    """Return the layer of a preset in float64, with larger weights than initial ones."""
    block: Any = OmegaConf.to_container(OmegaConf.load(MEMORY / f"{name}.yaml").memory)
    spec = layer_spec(d_model=d_model, num_heads=HEADS, d_head=d_head, seg_len=SEG_LEN, norm=norm)
    layer = LinearMemory(spec, convert_options({**block, **more})[1])
    torch.manual_seed(0)
    initialize(layer, std=0.5)
    layer.reset_parameters()
    return layer.double()


def read(layer: LinearMemory, weights: dict[str, Tensor], x: Tensor, *, lengths: list[int]) -> list[Tensor]:
    """Return the outputs of a text in segments, and the last state."""
    state, outputs = layer.init_state(torch.arange(len(x)), "cpu", x.dtype), []
    for segment in x.split(lengths, dim=1):
        valid_len = torch.full((len(x),), segment.shape[1])
        found = torch.func.functional_call(layer, weights, (segment, state, valid_len))
        outputs.append(found.y)
        state = found.state
    return [torch.cat(outputs, dim=1), state.matrix, state.tail]


class GatedDeltaNet(Vectors):
    """Our layer, and the published weights."""

    def __init__(self, name: str) -> None:
        super().__init__(paths.GOLDEN / "gated_deltanet" / f"{name}.npz")
        given = self.settings
        spec = layer_spec(
            d_model=given["d_model"], num_heads=given["v_heads"], d_head=given["d_k"], seg_len=max(given["segments"])
        )
        options = LinearMemory.Options(
            num_key_heads=given["k_heads"],
            d_key=given["d_k"],
            d_value=given["d_v"],
            kernel=given["kernel"],
            chunk_len=3,
        )
        self.layer = LinearMemory(spec, options).double()

    def named(self) -> dict[str, Tensor]:
        """The published weights by our names: theirs are grouped by the head of keys."""
        weights, given = self.weights, self.settings
        of_values = given["v_heads"] // given["k_heads"] * given["d_v"]
        grouped = weights["in_proj_qkvz.weight"].unflatten(0, (given["k_heads"], -1))
        parts = grouped.split([given["d_k"], given["d_k"], of_values, of_values], dim=1)
        q, k, v, z = (part.flatten(0, 1) for part in parts)
        b, a = weights["in_proj_ba.weight"].unflatten(0, (given["k_heads"], -1)).chunk(2, 1)
        return {
            "rows.weight": torch.cat([q, k, v]),
            "gate.weight": z,
            "rates.weight": torch.cat([b.flatten(0, 1), a.flatten(0, 1)]),
            "taps": weights["conv1d.weight"].squeeze(1),
            "log_decay": weights["A_log"],
            "decay_bias": weights["dt_bias"],
            "value_norm.weight": weights["norm.weight"],
            "output.weight": weights["out_proj.weight"],
        }


@pytest.mark.parametrize("name", names_in(paths.GOLDEN / "gated_deltanet", "layer*"))
def test_gated_deltanet_equals_the_published_code(name: str) -> None:
    """Outputs, states and gradients, with the state constant before any number of segments."""
    golden = GatedDeltaNet(name)
    lengths = golden.settings["segments"]
    segments, weight = (golden.tensor(key).split(lengths, dim=1) for key in ("x", "loss_weight"))

    def losses(*, since: int, until: int) -> list[Tensor]:
        state, found = golden.layer.init_state(torch.arange(len(segments[0])), "cpu", torch.float64), []
        for number, x in enumerate(segments[: until + 1]):
            given = x, detach_state(state) if number == since else state, torch.full((len(x),), x.shape[1])
            output = torch.func.functional_call(golden.layer, golden.named(), given)
            state = output.state
            golden.assert_equal(output.y, f"seg{number}/y")
            golden.assert_equal(state.matrix, f"seg{number}/S")
            kept = golden.tensor(f"seg{number}/conv_state").mT[:, 1:]
            parity.assert_close(state.tail, kept, f"seg{number}/conv_state")
            found.append((output.y * weight[number]).sum())
        return found

    assert golden.depths()
    for prefix, number, depth in golden.depths():
        golden.assert_gradients(losses(since=number - depth, until=number)[-1], prefix)
    golden.assert_gradients(torch.stack(losses(since=0, until=len(lengths) - 1)).sum(), "unroll/grad")


def test_the_norm_of_what_is_read_adds_the_epsilon_of_the_options() -> None:
    """Also that of flash-linear-attention; the default is that of the published vectors."""
    norm = preset("gated_deltanet", norm_eps=1e-5).value_norm
    rows = torch.full(norm.weight.shape, 1e-3, dtype=torch.float64)
    torch.testing.assert_close(norm(rows), norm.weight * rows * (1e-6 + 1e-5) ** -0.5, rtol=1e-12, atol=0)


def test_initial_decays_are_those_of_the_published_code() -> None:
    """A in U(0, 16), and softplus of the bias between 0.001 and 0.1."""
    torch.manual_seed(0)
    layer = LinearMemory(layer_spec(d_model=8, num_heads=64, d_head=4, seg_len=8), LinearMemory.Options())
    layer.reset_parameters()
    assert (layer.log_decay.exp() <= 16).all() and (layer.log_decay.exp() >= 0.0099).all()
    steps = F.softplus(layer.decay_bias)
    assert (steps >= 0.00099).all() and (steps <= 0.101).all()


def test_mamba_2_equals_the_layer_of_transformers() -> None:
    golden = Vectors(paths.GOLDEN / "linear_family" / "layer_mamba2.npz")
    given = {**golden.weights, "x": golden.tensor("x").requires_grad_()}
    d_key, d_value = 3, 8
    z, value, keys, query, dt = given["in_proj.weight"].split([16, 16, d_key, d_key, 2])
    value_taps, key_taps, query_taps = given["conv1d.weight"].squeeze(1).split([16, d_key, d_key])
    weights = {
        "rows.weight": torch.cat([query, keys, value]),
        "taps": torch.cat([query_taps, key_taps, value_taps]),
        "gate.weight": z,
        "rates.weight": dt,
        "log_decay": given["A_log"],
        "decay_bias": given["dt_bias"],
        "skip": given["D"],
        "value_norm.weight": given["norm.weight"],
        "output.weight": given["out_proj.weight"],
    }
    layer = preset("mamba2", d_model=8, d_head=d_key, d_value=d_value, chunk_len=4)
    assert set(weights) == {name for name, _ in layer.named_parameters()}
    outputs, *_ = read(layer, weights, given["x"], lengths=[10, 10, 5])
    golden.assert_equal(outputs, "o")
    for key, gradient in golden.gradients((outputs * golden.tensor("w")).sum(), given).items():
        parity.assert_close(gradient, golden.tensor(f"grad/{key}"), f"grad/{key}", tolerance=1e-9)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_in_segments_equals_its_recurrence_over_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, states and gradients of every weight, none of which is 0."""
    layer = preset(name, norm="pre", chunk_len=4)
    weights = {key: part.requires_grad_() for key, part in layer.named_parameters()}
    x = torch.randn(2, 3 * SEG_LEN, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def results(lengths: list[int]) -> list[Tensor]:
        found = read(layer, weights, x, lengths=lengths)
        loss = torch.stack([part.square().sum() for part in found]).sum()
        return [*found, *torch.autograd.grad(loss, list(weights.values()))]

    cut = results([SEG_LEN, 2, 2 * SEG_LEN - 2])
    monkeypatch.setattr(linear, "chunked_rule", lambda *given, chunk_len, **rest: recurrent_rule(*given, **rest))
    names = ["y", "matrix", "tail", *(f"grad of {key}" for key in weights)]
    for key, ours, reference in zip(names, cut, results([3 * SEG_LEN]), strict=True):
        if reference.numel():  # without convolution the state has no rows before it
            parity.assert_close(ours, reference, key, tolerance=1e-9 if key.startswith("grad") else 1e-10)
            assert reference.abs().max() > 0, key


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_weights_and_the_state_of_its_paper(name: str) -> None:
    layer = preset(name)
    state = named_tensors(layer.init_state(torch.arange(1), "cpu", torch.float32))
    found = sum(part.numel() for part in state.values()), sum(part.numel() for part in layer.parameters())
    assert found == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_the_log_is_the_share_of_the_matrix_that_a_real_token_leaves(name: str) -> None:
    layer, lengths = preset(name), torch.tensor([SEG_LEN, 3])
    x = torch.randn(2, SEG_LEN, D_MODEL, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = layer(x, layer.init_state(torch.arange(2), "cpu", x.dtype), lengths).logs["kept"]
    shares = layer.beta_and_decay(layer.norm(x), x.dtype)[1].exp()  # (B, H, T, 1 or K)
    assert found.tolist() == pytest.approx(
        [shares[lane, :, :length].mean().item() for lane, length in enumerate(lengths)]
    )
