"""What runs: the versions of dist_mem, Python, torch and DeepSpeed, and the machine that computes."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from dist_mem.version import __version__

if TYPE_CHECKING:
    import torch

_LIBRARIES = ("torch", "deepspeed")


def code_versions() -> dict[str, str]:
    """Return name -> version, without importing a library.

    A library on the path without metadata, such as a source tree, has its version from the imported module. It is left
    out if it is not imported or states no version.
    """
    found = {"dist-mem": __version__, "python": platform.python_version()}
    return found | {name: text for name in _LIBRARIES if (text := _version(name))}


def processor_name() -> str:
    """Return the name, family and model of the processor: the last bits of results on CPUs depend on them."""
    listed = Path("/proc/cpuinfo")  # of Linux
    text = listed.read_text(encoding="utf-8") if listed.exists() else ""
    lines = (line.partition(":") for line in text.splitlines())
    found = {name.strip(): text.strip() for name, _, text in lines}
    parts = [found.get("model name"), *(f"{name} {found[name]}" for name in ("cpu family", "model") if name in found)]
    return ", ".join(part for part in parts if part) or platform.machine()


def machine_of(device: torch.device) -> dict[str, str]:
    """Return what, besides code and data, decides the last bits of a result: the GPU, or the processor and its threads.

    Sums of other processors, and of other numbers of threads, are added in another order.
    """
    import torch  # takes a second

    if device.type == "cuda":
        return {"GPU": torch.cuda.get_device_name(device)}
    return {"processor": processor_name(), "threads": str(torch.get_num_threads())}


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        text = getattr(sys.modules.get(library), "__version__", None)
        return None if text is None else str(text)
