"""The check of fused attention at the start of a training finds what is wrong, and passes what is right."""

from collections.abc import Callable

import pytest
import torch

from dist_mem.memory import memory_kinds
from dist_mem.nn import attention_check
from dist_mem.nn.attention import attend
from dist_mem.nn.attention_check import CONTEXT, LayerAttention, check_attention, difference, kernels_of
from dist_mem.nn.attention_inputs import AttentionRead, Inputs
from tests.support.contract_cases import subject

CPU = torch.device("cpu")
KERNELS = [LayerAttention("triton", 16, 16), LayerAttention("triton", 16, 1), LayerAttention("sdpa", 16, 0)]
WRONG: dict[str, Callable[[Inputs], Inputs]] = {
    "a key too many": lambda given: given._replace(visible=given.visible._replace(upto=CONTEXT + 1)),
    "a context row too many": lambda given: given._replace(
        visible=given.visible._replace(valid=given.visible.valid.roll(-1, 1))
    ),
    "scores of another scale": lambda given: given._replace(query=given.query * 1.1),
    "a gradient that is lost": lambda given: given._replace(value=given.value.detach() + 0 * given.value),
}


def by_simple_means(inputs: Inputs, back_end: str) -> AttentionRead:
    """Compute in the activations' dtype on the CPU, as a kernel does on a GPU."""
    return attend(inputs, "chunked")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_right_kernel_passes_and_a_wrong_one_is_named_with_both_numbers(
    kernel: LayerAttention, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    inputs = attention_check._case(kernel, CPU, dtype)
    assert difference(lambda given: by_simple_means(given, ""), inputs) is None
    for name, changed in WRONG.items():
        found = difference(lambda given: by_simple_means(changed(given), ""), inputs)  # noqa: B023
        assert found is not None and " where simple's is " in found, name
    assert (
        difference(lambda given: AttentionRead(by_simple_means(given, "").rows * torch.nan, None), inputs) is not None
    )


@pytest.mark.parametrize("kind", memory_kinds())
def test_the_fused_kernels_of_every_memory_are_checked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU; a wrong one ends the start."""
    model = subject(kind).model()
    kernels = kernels_of(model, "cuda", 1024)
    assert not kernels_of(model, "cpu", 64)
    monkeypatch.setattr(attention_check, "kernels_of", lambda *_: kernels)
    monkeypatch.setattr(attention_check, "attend", by_simple_means)
    check_attention(model, CPU, torch.bfloat16, 1024)
    monkeypatch.setattr(
        attention_check, "attend", lambda *given, **_: AttentionRead(2 * by_simple_means(given[0], "").rows, None)
    )
    if kernels:
        with pytest.raises(ValueError, match=r"model\.attention: a row is .* set model\.attention=simple"):
            check_attention(model, CPU, torch.bfloat16, 1024)
