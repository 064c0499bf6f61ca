"""A machine with GPUs that is not there: torch.cuda answers, /sys is a folder. For code that only asks and sets."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dist_mem.runtime import gpu


def pretend_gpus(patch: pytest.MonkeyPatch, folder: Path, *, nodes: int = 2, cores_per_node: int = 8) -> None:
    """Pretend that GPU i hangs on NUMA node i of a machine with `nodes` of them, and that all cores are allowed.

    Args:
        folder: becomes /sys; cards of InfiniBand may be added there with `add_card`.
    """
    for node in range(nodes):
        device = folder / "bus/pci/devices" / f"0000:{16 + node:02x}:00.0"
        device.mkdir(parents=True)
        first = node * cores_per_node
        (device / "local_cpulist").write_text(f"{first}-{first + cores_per_node - 1}\n")
        (device / "numa_node").write_text(f"{node}\n")
    places = [SimpleNamespace(pci_domain_id=0, pci_bus_id=16 + node, pci_device_id=0) for node in range(nodes)]
    patch.setattr(gpu, "SYS", folder)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: nodes)
    patch.setattr(torch.cuda, "get_device_properties", lambda index: places[index])
    patch.setattr(torch.cuda, "set_device", lambda device: None)
    allow_cores(patch, set(range(nodes * cores_per_node)))


def allow_cores(patch: pytest.MonkeyPatch, cores: set[int]) -> None:
    """Pretend that the launcher lets this process run on these cores; binding changes them."""
    allowed = [cores]
    patch.setattr(os, "sched_getaffinity", lambda process: allowed[-1])
    patch.setattr(os, "sched_setaffinity", lambda process, chosen: allowed.append(set(chosen)))


def add_card(folder: Path, name: str, *, node: int, state: str = "4: ACTIVE") -> None:
    """Add a card of InfiniBand to the pretended /sys."""
    card = folder / "class/infiniband" / name
    (card / "ports/1").mkdir(parents=True)
    (card / "ports/1/state").write_text(f"{state}\n")
    (card / "device").mkdir()
    (card / "device/numa_node").write_text(f"{node}\n")
