"""The rule of linear memories: the published recurrences, our chunks and our recurrence are equal in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.memory.linear import LinearMemory
from dist_mem.memory.parts.linear_rule import RuleTokens, chunked_rule, recurrent_rule
from tests.support import parity, paths
from tests.support.messages import refused
from tests.support.published import Vectors, layer_spec, names_in

GATED, FAMILY = paths.GOLDEN / "gated_deltanet", paths.GOLDEN / "linear_family"
FAMILY_RULES = [name for name in names_in(FAMILY) if not name.startswith("layer")]


def in_chunks(*lengths: int | None) -> pytest.MarkDecorator:
    """None: the recurrence, a token at a time."""
    return pytest.mark.parametrize(
        "chunk_len", lengths, ids=lambda length: f"chunks of {length or 'one token, written out'}"
    )


def apply(tokens: RuleTokens, matrix: Tensor, *, delta: bool, chunk_len: int | None) -> tuple[Tensor, Tensor]:
    if chunk_len is None:
        return recurrent_rule(tokens, matrix, delta=delta)
    return chunked_rule(tokens, matrix, delta=delta, chunk_len=chunk_len)


def read(tokens: RuleTokens, matrix: Tensor, lengths: int | list[int], **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Return what is read of a text in segments, (B, T, H, V), and the matrix after each."""
    rows, matrices = [], []
    for part in zip(*(each.split(lengths, dim=2) for each in tokens), strict=True):
        found, matrix = apply(RuleTokens(*part), matrix, **options)
        rows.append(found)
        matrices.append(matrix)
    return torch.cat(rows, dim=2).transpose(1, 2), matrices


def of_heads(rows: Tensor, num_heads: int) -> Tensor:
    """Rows (B, T, G, ...) for the heads that share them, (B, H, T, ...)."""
    return rows.transpose(1, 2).repeat_interleave(num_heads // rows.shape[2], dim=1)


@in_chunks(1, 3, 64, None)
@pytest.mark.parametrize("name", names_in(GATED, "rule*"))
def test_the_gated_delta_rule_equals_the_published_code(name: str, chunk_len: int | None) -> None:
    """Values and gradients of a stream that is cut into segments, and into chunks of any length."""
    golden = Vectors(GATED / f"{name}.npz")
    given = {key: golden.tensor(key).requires_grad_() for key in ("q", "k", "v", "g", "beta", "S0")}
    num_heads = given["v"].shape[2]
    query, keys = (
        of_heads(rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6), num_heads)
        for rows in (given["q"], given["k"])
    )
    value, decay, beta = (given[key].transpose(1, 2) for key in ("v", "g", "beta"))
    tokens = RuleTokens(query / math.sqrt(query.shape[-1]), keys, value, decay[..., None], beta)
    lengths = golden.settings["segments"]
    rows, matrices = read(tokens, given["S0"], lengths, delta=True, chunk_len=chunk_len)
    golden.assert_equal(rows, "o")
    for number, matrix in enumerate(matrices):
        golden.assert_equal(matrix, f"S_after_seg{number}")
    loss = (rows * golden.tensor("w_o")).sum() + (matrices[-1] * golden.tensor("w_S")).sum()
    for key, gradient in golden.gradients(loss, given).items():
        golden.assert_equal(gradient, f"grad/{key}")


def published_tokens(given: dict[str, Tensor], layer: LinearMemory) -> RuleTokens:
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
    return RuleTokens(query / query.shape[-1] ** 0.5, keys, value, decay, beta)


def layer(**options: Any) -> LinearMemory:
    spec = layer_spec(d_model=8, num_heads=2, d_head=4, seg_len=8, norm="pre")
    return LinearMemory(spec, LinearMemory.Options(**options))


@in_chunks(3, 64, None)
@pytest.mark.parametrize("name", FAMILY_RULES)
def test_the_rule_equals_the_published_recurrences(name: str, chunk_len: int | None) -> None:
    """Values and gradients, of a text in two segments."""
    golden = Vectors(FAMILY / f"{name}.npz")
    arrays = golden.arrays
    given = {key: golden.tensor(key).requires_grad_() for key in arrays if f"grad_{key}" in arrays}
    ours = layer(decay="fixed" if name == "retention" else "none", write="one", delta=False)
    matrix = given.get("S0", torch.zeros_like(golden.tensor("u")))
    rows, matrices = read(published_tokens(given, ours), matrix, 13, delta="beta" in arrays, chunk_len=chunk_len)
    golden.assert_equal(rows, "o")
    loss = (rows * golden.tensor("w")).sum()
    if "S" in arrays:
        parity.assert_close(matrices[-1], golden.tensor("S"), "matrix")
        loss = loss + (matrices[-1] * golden.tensor("u")).sum()
    for key, gradient in golden.gradients(loss, given).items():
        parity.assert_close(gradient, golden.tensor(f"grad_{key}"), f"grad_{key}", tolerance=1e-9)


def random_tokens(seg_len: int, *, decay: str, strongest: float) -> tuple[RuleTokens, Tensor]:
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
    tokens = RuleTokens(draw(seg_len, d_key), keys, draw(seg_len, d_value), logs * is_real[..., None], beta)
    return tokens, draw(d_key, d_value)


@pytest.mark.parametrize("strongest", [1.0, 1e4])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("decay", ["none", "fixed", "scalar", "vector"])
def test_chunks_equal_the_recurrence(decay: str, delta: bool, strongest: float) -> None:
    """Outputs, state and gradients for chunks of any length, of which the last may be filled up."""
    tokens, matrix = random_tokens(39, decay=decay, strongest=strongest)
    leaves = [part.clone().requires_grad_() for part in (*tokens, matrix)]

    def results(chunk_len: int | None) -> list[Tensor]:
        found = apply(RuleTokens(*leaves[:5]), leaves[5], delta=delta, chunk_len=chunk_len)
        rows, new = ((part * torch.cos(torch.arange(part.numel()).view_as(part))).sum() for part in found)
        return [*found, *torch.autograd.grad(rows + new, leaves)]

    expected = results(None)
    for chunk_len in (7, 35, 64):
        for place, (ours, reference) in enumerate(zip(results(chunk_len), expected, strict=True)):
            assert torch.isfinite(ours).all()
            parity.assert_close(
                ours, reference, f"{place}, chunks of {chunk_len}", tolerance=1e-10 if place < 2 else 1e-9
            )


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
