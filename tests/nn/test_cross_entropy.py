"""The fused cross-entropy and the adaptive losses equal plain operations, kept whole or computed in chunks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.data.batch import IGNORE
from dist_mem.nn import cross_entropy
from dist_mem.nn.cross_entropy import Weights, compute_logits, full_precision, linear_cross_entropy
from dist_mem.nn.kernel_shapes import plan_for, planned_card
from dist_mem.nn.vocabulary import BinLogits, Softmax, adaptive_bins, plain_bin

ROWS, WIDTH, COLUMNS = 13, 8, 21
every_dtype = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
CASES = {"plain": (True, 0), "without biases": (False, 0), "with clusters": (True, 3)}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def weights_of(case: tuple[bool, int], dtype: torch.dtype) -> Weights:
    biased, num_clusters = case
    sizes = [COLUMNS, num_clusters] if num_clusters else [COLUMNS]
    return tuple(
        (draw(size, WIDTH, seed=size, dtype=dtype), draw(size, seed=size + 1, dtype=dtype) if biased else None)
        for size in sizes
    )


def some_targets() -> Tensor:
    targets = torch.randint(COLUMNS, (ROWS,), generator=torch.Generator().manual_seed(2))
    return targets.masked_fill(torch.arange(ROWS) % 4 == 1, IGNORE)


def values_and_gradients(losses: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    upstream = torch.linspace(-0.5, 2.0, losses.numel(), dtype=losses.dtype).view_as(losses)
    return [losses.detach(), *torch.autograd.grad(losses, inputs, upstream)]


def both_ways(case: tuple[bool, int], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    weights, rows, targets = weights_of(case, dtype), draw(ROWS, WIDTH, seed=0, dtype=dtype), some_targets()
    inputs = [rows, *(parameter for pair in weights for parameter in pair if parameter is not None)]
    logits = full_precision(compute_logits(rows, weights))
    plain = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")
    fused = linear_cross_entropy(rows, targets, weights)
    return values_and_gradients(fused, inputs), values_and_gradients(plain, inputs)


def assert_close(case: tuple[bool, int], dtype: torch.dtype) -> None:
    epsilon = torch.finfo(dtype).eps
    for one, other in zip(*both_ways(case, dtype), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=4 * epsilon, atol=16 * epsilon)


def allow_logits(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Keep no probabilities, and compute at most this many logits at a time."""
    monkeypatch.setattr(cross_entropy, "KEPT", 0)
    monkeypatch.setattr(cross_entropy, "CHUNK", number)


@every_case
@every_dtype
def test_kept_whole_it_has_the_bits_of_plain_operations(case: tuple[bool, int], dtype: torch.dtype) -> None:
    assert all(torch.equal(one, other) for one, other in zip(*both_ways(case, dtype), strict=True))


@every_case
@every_dtype
@pytest.mark.parametrize("rows_at_a_time", [0, 1, 5, ROWS])
def test_in_chunks_it_equals_plain_operations(
    case: tuple[bool, int], dtype: torch.dtype, rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_logits(monkeypatch, rows_at_a_time * (COLUMNS + case[1]))
    assert_close(case, dtype)


@every_case
@pytest.mark.parametrize("rows_at_a_time", [1, 5, ROWS])
def test_kernels_of_gpus_equal_plain_operations(
    case: tuple[bool, int], rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With padded columns; uncompiled, as there is no GPU."""
    monkeypatch.setattr(cross_entropy, "_has_kernels", lambda rows: True)
    monkeypatch.setattr(cross_entropy, "_compile_for_any_rows", lambda function: function)
    allow_logits(monkeypatch, rows_at_a_time * (COLUMNS + case[1] + 7))
    assert_close(case, torch.bfloat16)


def test_chunks_bound_the_logits_that_stand_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    whole = cross_entropy.compute_logits

    def recorded(rows: Tensor, weights: Weights) -> Tensor:
        logits = whole(rows, weights)
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(cross_entropy, "compute_logits", recorded)
    allow_logits(monkeypatch, 4 * COLUMNS)
    loss = linear_cross_entropy(draw(ROWS, WIDTH, seed=0), some_targets(), weights_of((True, 0), torch.float32)).sum()
    assert len(sizes) == 4
    loss.backward()
    assert len(sizes) == 8 and max(sizes) == 4 * COLUMNS


@pytest.mark.parametrize("num_rows", [1, 1_000, 16_384])
@pytest.mark.parametrize("gibibytes", [1, 8, 24, 80, 141])
def test_chunks_on_a_gpu_take_their_share_of_its_memory(num_rows: int, gibibytes: int) -> None:
    columns = 50_264
    with plan_for("cuda"), planned_card(gibibytes * 2**30):
        chunks = cross_entropy.row_chunks(torch.empty(num_rows, WIDTH, device="meta"), columns)
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    most = gibibytes * 2**30 // 32 // 2 // columns  # in half precision
    assert sum(sizes) == num_rows and max(sizes) <= most
    assert len(chunks) == -(-num_rows // most)


def adaptive_softmax(dtype: torch.dtype) -> Softmax:
    bins = adaptive_bins(COLUMNS, d_model=WIDTH, d_embed=WIDTH, cutoffs=[6, 11, 17], div_val=2, tie_projections=None)
    return with_weights(Softmax(bins, d_model=WIDTH).to(dtype))


def with_weights(head: Softmax) -> Softmax:
    dtype = next(head.parameters()).dtype
    for index, parameter in enumerate(head.parameters()):
        parameter.data = draw(*parameter.shape, seed=index, dtype=dtype).detach()
    return head


@every_dtype
@pytest.mark.parametrize("fill", [None, 0, 12, COLUMNS - 1, IGNORE])
def test_adaptive_losses_have_the_bits_of_whole_logits(dtype: torch.dtype, fill: int | None) -> None:
    """Targets in several bins, all in one bin, none at all."""
    head, rows = adaptive_softmax(dtype), draw(ROWS, WIDTH, seed=99, dtype=dtype)
    targets = some_targets() if fill is None else torch.full((ROWS,), fill)
    inputs = [rows, *head.parameters()]
    found = values_and_gradients(head.losses(rows, targets), inputs)
    expected = values_and_gradients(head.simple_scores(rows, targets).nll, inputs)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_evaluation_in_chunks_equals_evaluation_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    head, rows = adaptive_softmax(torch.float64).eval(), draw(1, ROWS, WIDTH, seed=99, dtype=torch.float64)
    whole = head(rows, some_targets()[None])
    allow_logits(monkeypatch, 3 * COLUMNS)
    chunked = head(rows, some_targets()[None])
    torch.testing.assert_close(chunked.nll, whole.nll, rtol=0, atol=1e-12)
    assert torch.equal(chunked.hits, whole.hits)


def test_training_computes_every_bin_on_the_rows_that_need_it() -> None:
    head, sizes = adaptive_softmax(torch.float32), []

    def record(_: BinLogits, inputs: tuple[Tensor, ...]) -> None:
        sizes.append(len(inputs[0]))

    for logits in head.bins:
        logits.register_forward_pre_hook(record)
    head.losses(draw(4, WIDTH, seed=0), torch.tensor([20, 0, 7, 18]))
    assert sizes == [4, 1 + 1, 0 + 1, 2 + 1]


@pytest.mark.parametrize("is_adaptive", [False, True], ids=["softmax", "adaptive"])
def test_training_computes_no_logits_of_rows_without_a_target_where_most_have_none(is_adaptive: bool) -> None:
    plain = Softmax(plain_bin(COLUMNS, d_model=WIDTH, d_embed=WIDTH), d_model=WIDTH)
    head = adaptive_softmax(torch.float64) if is_adaptive else with_weights(plain.double())
    rows, all_targets = draw(1, ROWS, WIDTH, seed=99, dtype=torch.float64), some_targets().clamp(min=0)
    inputs, sizes = [rows, *head.parameters()], []
    head.bins[0].register_forward_pre_hook(lambda _, given: sizes.append(len(given[0])))
    for scored in ([], [3], [0, 5, 12], range(6), range(7), range(ROWS)):
        targets = torch.full_like(all_targets, IGNORE)
        targets[[*scored]] = all_targets[[*scored]]
        expected = head.simple_scores(rows[0], targets)
        sizes.clear()
        found = head(rows, targets[None])
        assert sizes[0] == (max(1, len(scored)) if 2 * len(scored) < ROWS else ROWS)
        pairs = zip(values_and_gradients(found.nll[0], inputs), values_and_gradients(expected.nll, inputs), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
