"""The table of devices: every name of torch finds its own entry, and the figures are of one kind."""

from __future__ import annotations

from dist_mem.errors import UnusableError
from dist_mem.runtime.devices import GPUS, device_named, gpu_of
from tests.support.messages import refused

# As torch.cuda.get_device_name() prints them.
NAMES = {
    "NVIDIA H200": "h200-141gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H100 PCIe": "h100-pcie-80gb",
    "NVIDIA H100 NVL": "h100-nvl-94gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "Tesla V100-SXM2-32GB": "v100-32gb",
    "Tesla V100-SXM2-16GB": "v100-16gb",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
}


def test_every_entry_is_found_by_the_names_of_torch_and_no_other_device_has_one() -> None:
    for device_name, name in NAMES.items():
        found = gpu_of(device_name)
        assert found is not None and found.name == name and device_named(name) is found
    assert set(NAMES.values()) == {device.name for device in GPUS}
    assert gpu_of("AMD Instinct MI300X") is None
    with refused(UnusableError):
        device_named("mi300x")


def test_links_are_slower_than_memory_and_networks_than_links() -> None:
    """Units: bytes a second, of one direction."""
    for device in [*GPUS, device_named("cpu")]:
        assert device.network < device.link <= device.bandwidth
        assert 1e9 < device.memory < 2e12 and device.flops["fp16"] >= device.flops["fp32"] >= 1e10
