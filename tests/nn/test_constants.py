"""Small tensors of known values are made once for each device."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dist_mem.nn.constants import constant

CPU = torch.device("cpu")


def test_the_same_tensor_comes_back_for_the_same_device_and_dtype() -> None:
    values = (0.25, 0.5, 7.0)
    made = constant(values, device=CPU, dtype=torch.float32)
    assert torch.equal(made, torch.tensor(values))
    assert constant(values, device=CPU, dtype=torch.float32) is made
    assert constant(values, device=CPU, dtype=torch.float64).dtype == torch.float64
    assert constant((*values, 1.0), device=CPU, dtype=torch.float32).shape == (4,)


def test_a_fake_tensor_is_not_kept() -> None:
    with FakeTensorMode():
        fake = constant((0.125, 3.0), device=torch.device("cuda"), dtype=torch.float32)
    assert fake.device.type == "cuda"
    with FakeTensorMode():
        constant((0.125, 3.0), device=CPU, dtype=torch.float32)
    assert type(constant((0.125, 3.0), device=CPU, dtype=torch.float32)) is torch.Tensor


def test_a_tensor_made_in_inference_mode_can_be_trained_with() -> None:
    with torch.inference_mode():
        made = constant((0.75, 5.0), device=CPU, dtype=torch.float32)
    weight = torch.ones(2, requires_grad=True)
    (weight * made).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, made)
