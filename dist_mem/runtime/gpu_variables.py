"""Environment variables of torch and NCCL on GPUs: set before their first use, and read by the doctor. No torch here.

A variable that the user has set stays. Not yet run on a GPU: tests use stand-ins for torch.cuda.
"""

from __future__ import annotations

import os

from dist_mem.runtime.environment import whole_number

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # in the order in which torch 2.13 reads them
# Segments that grow: lengths of documents vary, and fixed segments of many sizes would fragment the GPU's memory.
_ALLOCATOR = "expandable_segments:True"


def set_gpu_variables() -> None:
    """Set the variables that torch reads at its first allocation on a GPU, and NCCL when it starts."""
    if not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = _ALLOCATOR
    # Without it, a device that hangs before a collective looks like those that wait in it (flight_recorder.py).
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")


def num_recorded() -> int:
    """Return how many collectives torch keeps for a hang report; 0: none."""
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    given = [name for name in names if os.environ.get(name)]
    return whole_number(os.environ, given[0], 0, "unset it for 2000") if given else 2000  # of torch


def records_starts() -> bool:
    """Return whether NCCL records when the device starts a collective."""
    return os.environ.get("TORCH_NCCL_ENABLE_TIMING", "0").lower() in ("1", "true", "t", "yes", "y")


def allocator_settings() -> str:
    """Return the settings of torch's allocator in the environment; empty: torch's defaults."""
    return next((text for name in ALLOCATOR_VARIABLES if (text := os.environ.get(name))), "")


def socket_interfaces() -> list[str]:
    """Return the network interfaces that NCCL and gloo are bound to by name; none if they choose."""
    texts = [os.environ.get(name, "") for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")]
    names = [name.strip() for text in texts if not text.startswith(("^", "=")) for name in text.split(",")]
    return [name for name in dict.fromkeys(names) if name]


def tf32_is_forced() -> bool:
    """Return whether NVIDIA_TF32_OVERRIDE makes the libraries use TF32, whatever torch asks for."""
    return os.environ.get("NVIDIA_TF32_OVERRIDE") == "1"
