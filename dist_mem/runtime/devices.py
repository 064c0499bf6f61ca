"""What a device can do at most: memory, bandwidth and operations a second, by name; imports no torch.

GPUs are those of NVIDIA's data sheets, without structured sparsity, which doubles the printed figures. Rates of links
are those of one GPU in one direction, of which data sheets print the sum of both.

The environment variables of torch and NCCL on GPUs are set before their first use, and read by the doctor. A variable
that the user has set stays. Run on one H100; tests use stand-ins for torch.cuda.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from dist_mem.errors import UnusableError
from dist_mem.runtime.environment import set_default, variable
from dist_mem.runtime.terminal import list_names

_TERA, _GIGA = 1e12, 1e9


class Device(NamedTuple):
    """The limits of one GPU, or of this machine's processor."""

    name: str  # as on our command lines
    pattern: str  # regular expression, searched in torch.cuda.get_device_name()
    memory: int  # bytes that a process can allocate
    bandwidth: float  # bytes/s of its memory
    flops: dict[str, float]  # train.precision, and tf32 -> dense operations/s; a precision without hardware is absent
    link: float  # bytes/s to the other GPUs of its node: NVLink, else PCIe
    network: float  # bytes/s to other nodes: the adapter that NVIDIA's reference systems give each GPU

    def peak_flops(self, precision: str, *, tf32: bool) -> float | None:
        """Return its dense operations/s in `train.precision`; None if it has no hardware for it.

        Args:
            tf32: whether products of float32 may use TF32, where the device has it.
        """
        return self.flops.get("tf32" if tf32 and precision == "fp32" and "tf32" in self.flops else precision)


def _gpu(
    name: str,
    pattern: str,
    gibibytes: float,
    terabytes: float,
    *,
    half: float,
    tf32: float | None,
    fp32: float,
    links: tuple[float, float],
    has_bf16: bool = True,
) -> Device:
    """Build an entry from GiB, TB/s, TFLOP/s, and GB/s of (link, network)."""
    flops = {"fp16": half, **({"bf16": half} if has_bf16 else {}), "fp32": fp32, **({"tf32": tf32} if tf32 else {})}
    rates = {precision: _TERA * value for precision, value in flops.items()}
    link, network = (_GIGA * value for value in links)
    return Device(name, pattern, int(gibibytes * 2**30), _TERA * terabytes, rates, link, network)


# The first pattern that matches counts; a GH200 (Grace Hopper) has other memory and no entry. Memory is what torch
# reports as total: 1 to 2 % less than what is sold. Links: NVLink 4, 3 and 2 have 450, 300 and 150 GB/s; PCIe 5 and 4
# have 64 and 32. Networks: DGX H100 and H200 have 400 Gb/s a GPU, DGX A100 200 Gb/s, DGX-1 four times 100 Gb/s for
# eight GPUs; 100 Gb/s is assumed for L40S, 25 for desktops. Sources: NVIDIA's data sheets of each product; RTX 4090:
# white paper "NVIDIA Ada GPU architecture", appendix A, with fp32 accumulation. V100 has no tensor cores for bf16 and
# TF32.
GPUS = (
    _gpu("h200-nvl-141gb", r"H200 NVL", 139.8, 4.8, half=835.5, tf32=417.5, fp32=60.0, links=(450, 50)),
    _gpu("h200-141gb", r"\bH200", 139.8, 4.8, half=989.4, tf32=494.7, fp32=66.9, links=(450, 50)),
    _gpu("h100-nvl-94gb", r"H100 NVL", 93.1, 3.9, half=835.5, tf32=417.5, fp32=60.0, links=(300, 50)),
    _gpu("h100-pcie-80gb", r"H100 PCIe", 79.2, 2.0, half=756, tf32=378, fp32=51.2, links=(64, 50)),
    _gpu("h100-80gb", r"H100", 79.2, 3.35, half=989.4, tf32=494.7, fp32=66.9, links=(450, 50)),
    _gpu("a100-40gb", r"A100.*40GB", 39.4, 1.555, half=312, tf32=156, fp32=19.5, links=(300, 25)),
    _gpu("a100-pcie-80gb", r"A100 80GB PCIe", 79.2, 1.935, half=312, tf32=156, fp32=19.5, links=(32, 25)),
    _gpu("a100-80gb", r"A100", 79.2, 2.039, half=312, tf32=156, fp32=19.5, links=(300, 25)),
    _gpu("v100-32gb", r"V100.*32GB", 31.7, 0.9, half=125, tf32=None, fp32=15.7, links=(150, 6.25), has_bf16=False),
    _gpu("v100-16gb", r"V100", 15.8, 0.9, half=125, tf32=None, fp32=15.7, links=(150, 6.25), has_bf16=False),
    _gpu("l40s", r"L40S", 44.4, 0.864, half=362, tf32=183, fp32=91.6, links=(32, 12.5)),
    _gpu("rtx-4090", r"RTX 4090", 23.5, 1.008, half=165.2, tf32=82.6, fp32=82.6, links=(32, 3.125)),
)
# A name without a form means what most clusters have: the SXM module.
FORMS = {"h100": "h100-80gb", "h200": "h200-141gb"}
# Orders of magnitude for processors: one core of a loaded Xeon with AMX multiplied 1,024 x 1,024 matrices at 0.10
# (fp32), 1.5 (bf16) and 0.14 TFLOP/s (fp16), and copied at 11 GB/s.
_CORE_FLOPS = {"fp32": 0.1 * _TERA, "bf16": 1.0 * _TERA, "fp16": 0.1 * _TERA}
_CPU_BANDWIDTH, _CPU_NETWORK = 10 * _GIGA, 3 * _GIGA


def gpu_of(device_name: str) -> Device | None:
    """Return the entry of torch.cuda.get_device_name(); None if the table has none."""
    return next((device for device in GPUS if re.search(device.pattern, device_name)), None)


def device_named(name: str) -> Device:
    """Return the entry of this name, or of the usual form of `h100` and `h200`; `cpu` is this machine.

    Raises:
        UnusableError: there is none.
    """
    known = {device.name: device for device in GPUS}
    if name.lower() == "cpu":
        return _this_machine()
    full = FORMS.get(name.lower(), name.lower())
    if full not in known:
        raise UnusableError(f"no device is named {name!r}; known are{list_names([*known, *FORMS, 'cpu'])}")
    return known[full]


def _this_machine() -> Device:
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    flops = {precision: cores * rate for precision, rate in _CORE_FLOPS.items()}
    return Device("cpu", "", memory, _CPU_BANDWIDTH, flops, _CPU_BANDWIDTH, _CPU_NETWORK)


_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # in the order in which torch 2.13 reads them
# Segments that grow: lengths of documents vary, and fixed segments of many sizes would fragment the GPU's memory.
_ALLOCATOR = "expandable_segments:True"


def set_gpu_variables() -> None:
    """Set the variables that torch reads at its first allocation on a GPU, and NCCL when it starts."""
    if not any(variable(name) for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = _ALLOCATOR
    # Without it, a device that hangs before a collective looks like those that wait in it (flight_recorder.py).
    set_default("TORCH_NCCL_ENABLE_TIMING", "1")


def socket_interfaces() -> list[str]:
    """Return the network interfaces that NCCL and gloo are bound to by name; none if they choose."""
    texts = [variable(name) or "" for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")]
    names = [name.strip() for text in texts if not text.startswith(("^", "=")) for name in text.split(",")]
    return [name for name in dict.fromkeys(names) if name]


def tf32_is_forced() -> bool:
    """Return whether NVIDIA_TF32_OVERRIDE makes the libraries use TF32, whatever torch asks for."""
    return variable("NVIDIA_TF32_OVERRIDE") == "1"
