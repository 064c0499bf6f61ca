"""Half-precision products on a processor without instructions for them: float32's, rounded once."""

import io
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dist_mem.evaluation.trained_model import load_model
from dist_mem.nn import half_products
from dist_mem.nn.half_products import HALF, widen_half_products
from dist_mem.runtime.distributed import World
from tests.support.jobs import train_here, write_config
from tests.support.ranks import Pools

CPU = torch.device("cpu")
# What ends in each of `PRODUCTS`, and the shapes of its operands.
CASES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (F.linear, ((2, 5, 7), (3, 7))),
    "addmm": (lambda x, weight, bias: F.linear(x, weight, bias), ((2, 5, 7), (3, 7), (3,))),
    "bmm": (torch.matmul, ((2, 3, 5, 7), (2, 3, 7, 4))),
    "baddbmm": (lambda x, y, added: torch.baddbmm(added, x, y, alpha=2.0), ((3, 5, 7), (3, 7, 4), (3, 5, 4))),
}


def restore_products() -> None:
    """Let torch compute them again."""
    while half_products._library:
        half_products._library.pop()._destroy()


@pytest.fixture(params=HALF.values(), ids=str)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.dtype]:
    """Whose products are computed in float32, also by processors that have instructions for it."""
    monkeypatch.setattr(half_products, "_find_lacking", lambda: set(HALF.values()))
    restore_products()
    assert widen_half_products(CPU, request.param)
    yield request.param
    restore_products()


def operands_of(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def results(product: Callable[..., Tensor], operands: list[Tensor], gradient: Tensor) -> list[Tensor]:
    """Return the product and the gradients of its operands."""
    made = product(*operands)
    return [made.detach(), *torch.autograd.grad(made, operands, gradient)]


@pytest.mark.parametrize("name", CASES)
def test_a_product_and_its_gradients_are_those_of_float32_rounded_once(name: str, dtype: torch.dtype) -> None:
    product, shapes = CASES[name]
    operands = operands_of(shapes, dtype)
    gradient = torch.randn_like(product(*operands))
    wide = results(product, [operand.detach().float().requires_grad_() for operand in operands], gradient.float())
    for found, right in zip(results(product, operands, gradient), wide, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, right.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("name", CASES)
def test_float32_and_float64_keep_every_bit(name: str, dtype: torch.dtype) -> None:
    product, shapes = CASES[name]
    for other in (torch.float32, torch.float64):
        operands = operands_of(shapes, other)
        gradient = torch.randn_like(product(*operands))
        replaced = results(product, operands, gradient)
        restore_products()
        own = results(product, operands, gradient)
        assert widen_half_products(CPU, dtype)
        assert all(map(torch.equal, replaced, own))


def test_operands_of_two_dtypes_are_refused_as_ever(dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2, dtype=dtype))


def test_only_products_that_the_device_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_products, "_find_lacking", lambda: {torch.bfloat16})
    assert not widen_half_products(CPU, torch.float32)
    assert not widen_half_products(CPU, torch.float16)
    assert not widen_half_products(torch.device("cuda"), torch.bfloat16)


def train_without_instructions(world: World, config: Path) -> tuple[int, bool, str]:
    """Train as on such a processor: the exit code, whether products were replaced, and what was printed."""
    restore_products()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(half_products, "_find_lacking", lambda: {torch.bfloat16})
        printed = io.StringIO()
        with redirect_stderr(printed):
            code = train_here(world, config)
        replaced = bool(half_products._library)
    restore_products()
    return code, replaced, printed.getvalue()


def test_a_training_and_a_loaded_model_in_bf16_replace_them_and_the_start_says_so(
    tmp_path: Path, books: Path, rank_pool: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"train": {"steps": 2, "precision": "bf16"}, "checkpoint": {"every": 2}}
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", changes)
    ended = rank_pool(2).run(train_without_instructions, config)
    assert [(code, replaced) for code, replaced, _ in ended] == [(0, True)] * 2
    assert "products in bf16 are computed in fp32" in ended[0][2]
    monkeypatch.setattr(half_products, "_find_lacking", lambda: {torch.bfloat16})
    restore_products()
    load_model(tmp_path / "run", "eval.precision=bf16")
    assert half_products._library
    restore_products()
