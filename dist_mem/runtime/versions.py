"""What runs: the versions of dist_mem, Python, torch and DeepSpeed, and the processor."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dist_mem.version import __version__

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
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
    found = {name.strip(): text.strip() for name, _, text in lines}
    parts = [found.get("model name"), *(f"{name} {found[name]}" for name in ("cpu family", "model") if name in found)]
    return ", ".join(part for part in parts if part) or platform.machine()


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        text = getattr(sys.modules.get(library), "__version__", None)
        return None if text is None else str(text)
