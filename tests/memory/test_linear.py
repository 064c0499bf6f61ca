"""The rule of linear memories: the published recurrences, our chunks and our recurrence are equal in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_mem.memory.linear import LinearMemory
from dist_mem.memory.parts.linear_rule import Tokens, chunked_rule, recurrent_rule
from dist_mem.nn.layer_spec import LayerSpec
from tests.support import parity, paths
from tests.support.messages import refused

GOLDEN = paths.GOLDEN / "linear_family"
RULES = sorted(path.stem for path in GOLDEN.glob("*.npz") if not path.stem.startswith("layer"))


def of_heads(rows: Tensor, num_heads: int) -> Tensor:
    """Rows (B, T, G, ...) for the heads that share them, (B, H, T, ...)."""
    return rows.transpose(1, 2).repeat_interleave(num_heads // rows.shape[2], dim=1)


def published_tokens(given: dict[str, Tensor], layer: LinearMemory) -> Tokens:
    """What the rule reads of a file of reference vectors; the constant decays are those of our layer."""
    num_heads, beta = given["v"].shape[2], torch.ones(given["v"].shape[:3], dtype=torch.float64)
    query, keys, value, beta = (
        of_heads(rows, num_heads) for rows in (given["q"], given["k"], given["v"], given.get("beta", beta))
    )
    if "g_channel" in given:
        decay = of_heads(given["g_channel"], num_heads)
    elif "g_head" in given:
        decay = of_heads(given["g_head"][..., None], num_heads)
    else:
        _, decay = layer.beta_and_decay(torch.zeros(*beta.shape[::2], layer.spec.d_model), torch.float64)
    return Tokens(query / query.shape[-1] ** 0.5, keys, value, decay, beta)


def layer(seg_len: int = 8, **options: Any) -> LinearMemory:
    spec = LayerSpec(
        layer_index=0, num_layers=1, d_model=8, num_heads=2, d_head=4, seg_len=seg_len, dropout=0.0,
        attention_dropout=0.0, norm="pre", clamp_len=None, same_length=False, seed=0,
    )  # fmt: skip
    return LinearMemory(spec, LinearMemory.Options(**options))


@pytest.mark.parametrize(
    "chunk_len", [3, 64, None], ids=lambda length: f"chunks of {length or 'one token, written out'}"
)
@pytest.mark.parametrize("name", RULES)
def test_the_rule_equals_the_published_recurrences(name: str, chunk_len: int | None) -> None:
    """Values and gradients, of a text in two segments."""
    arrays = {key: torch.from_numpy(array) for key, array in np.load(GOLDEN / f"{name}.npz").items()}
    inputs = [key for key in arrays if f"grad_{key}" in arrays]
    given = {key: arrays[key].requires_grad_() for key in inputs}
    ours = layer(decay="fixed" if name == "retention" else "none", write="one", delta=False)
    tokens = published_tokens(given, ours)
    matrix = given.get("S0", torch.zeros_like(arrays["u"]))
    delta, read = "beta" in arrays, []
    for part in zip(*(part.split(13, dim=2) for part in tokens), strict=True):
        segment = Tokens(*part)
        if chunk_len is None:
            found, matrix = recurrent_rule(segment, matrix, delta=delta)
        else:
            found, matrix = chunked_rule(segment, matrix, delta=delta, chunk_len=chunk_len)
        read.append(found)
    rows = torch.cat(read, dim=2).transpose(1, 2)
    parity.assert_close(rows, arrays["o"], "o")
    loss = (rows * arrays["w"]).sum()
    if "S" in arrays:
        parity.assert_close(matrix, arrays["S"], "matrix")
        loss = loss + (matrix * arrays["u"]).sum()
    for key, gradient in zip(inputs, torch.autograd.grad(loss, list(given.values())), strict=True):
        parity.assert_close(gradient, arrays[f"grad_{key}"], f"grad_{key}", tolerance=1e-9)


def random_tokens(seg_len: int, *, decay: str, strongest: float) -> tuple[Tokens, Tensor]:
    """Seeded tokens of two lanes and two heads, the last three of lane 0 padding; and a matrix that holds something."""
    drawn = torch.Generator().manual_seed(seg_len)
    lanes, heads, d_key, d_value = 2, 2, 6, 5

    def draw(*shape: int) -> Tensor:
        return torch.randn(lanes, heads, *shape, generator=drawn, dtype=torch.float64)

    width = d_key if decay == "vector" else 1
    is_real = torch.ones(lanes, 1, seg_len, dtype=torch.float64)
    is_real[0, :, -3:] = 0
    # Most decays are mild, some as strong as is asked, beside rows of the matrix that hardly decay at all.
    logs = -strongest * torch.rand(lanes, heads, seg_len, width, generator=drawn, dtype=torch.float64) ** 8
    logs = torch.zeros_like(logs) if decay == "none" else logs[:, :, :1].expand_as(logs) if decay == "fixed" else logs
    keys = draw(seg_len, d_key)
    keys = keys / keys.norm(dim=-1, keepdim=True)
    beta = draw(seg_len).sigmoid() * 2 * is_real
    tokens = Tokens(draw(seg_len, d_key), keys, draw(seg_len, d_value), logs * is_real[..., None], beta)
    return tokens, draw(d_key, d_value)


@pytest.mark.parametrize("strongest", [1.0, 1e4])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("decay", ["none", "fixed", "scalar", "vector"])
def test_chunks_equal_the_recurrence(decay: str, delta: bool, strongest: float) -> None:
    """Outputs, state and gradients for chunks of any length, of which the last may be filled up."""
    tokens, matrix = random_tokens(39, decay=decay, strongest=strongest)
    leaves = [part.clone().requires_grad_() for part in (*tokens, matrix)]

    def results(chunk_len: int | None) -> list[Tensor]:
        given = Tokens(*leaves[:5])
        if chunk_len is None:
            found = recurrent_rule(given, leaves[5], delta=delta)
        else:
            found = chunked_rule(given, leaves[5], delta=delta, chunk_len=chunk_len)
        loss = sum([(part * torch.cos(torch.arange(part.numel()).view_as(part))).sum() for part in found])
        assert isinstance(loss, Tensor)
        return [*found, *torch.autograd.grad(loss, leaves)]

    expected = results(None)
    for chunk_len in (7, 35, 64):
        found = results(chunk_len)
        for place, (ours, reference) in enumerate(zip(found, expected, strict=True)):
            assert torch.isfinite(ours).all()
            parity.assert_close(
                ours, reference, f"{place}, chunks of {chunk_len}", tolerance=1e-10 if place < 2 else 1e-9
            )


@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_padding_leaves_the_matrix_as_it_was(decay: str) -> None:
    tokens, matrix = random_tokens(20, decay=decay, strongest=10.0)
    shorter = Tokens(*(part[:1, :, :-3] for part in tokens))
    (_, found), (_, expected) = (
        chunked_rule(given, matrix[:1], delta=True, chunk_len=8)
        for given in (Tokens(*(part[:1] for part in tokens)), shorter)
    )
    parity.assert_close(found, expected, "matrix", tolerance=1e-13)


@pytest.mark.parametrize(
    "options",
    [
        {"write": "step"},
        {"write": "step", "delta": False, "decay": "vector"},
        {"negative_eigenvalues": True, "delta": False},
        {"num_key_heads": 3},
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any]) -> None:
    with refused(ValueError, f"memory.{next(iter(options))}"):
        layer(**options)
