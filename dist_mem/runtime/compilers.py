"""Compilers, the folders of their caches, and the home of libraries, as environment variables name them. No torch."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path

from dist_mem.errors import UnusableError, run_error
from dist_mem.runtime.environment import (
    extension_cache,
    home_dir,
    home_of_libraries,
    node_name,
    set_default,
    temporary_dir,
    user_cache_dir,
    variable,
)
from dist_mem.runtime.files import NotOwnError, make_own
from dist_mem.runtime.ranks import is_first_on_node


def compiler_caches() -> dict[str, tuple[Path, str]]:
    """Return the cache of each compiler: name -> its directory, and the variable that moves it."""
    temporary = Path(tempfile.gettempdir())
    triton_home = Path(variable("TRITON_HOME") or home_of_libraries()).expanduser()
    usual = {
        "TORCH_EXTENSIONS_DIR": ("DeepSpeed's ops", extension_cache()),
        "TRITON_CACHE_DIR": ("Triton", triton_home / ".triton" / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": ("torch.compile", _own_inductor_cache()),
        "TMPDIR": ("temporary files", temporary),
    }
    return {name: (Path(variable(key) or path), key) for key, (name, path) in usual.items()}


_NODE_CACHES = {
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "MPLCONFIGDIR": "matplotlib",
}


def use_some_home() -> None:
    """Set HOME to a folder in TMPDIR if this user has no home, as in a container that does not know the user.

    torch, Triton, MLflow, matplotlib and huggingface_hub keep files there. Without one, some raise, and others make a
    folder named `~`.

    Raises:
        UnusableError, UnfitError: that folder cannot be used.
    """
    if home_dir() is not None:
        return
    folder, fix = temporary_dir() / f"dist_mem-{os.getuid()}" / "home", "set HOME to a folder of yours"
    try:
        make_own(folder.parent)
        folder.mkdir(exist_ok=True)
    except NotOwnError as error:
        raise UnusableError(f"user {os.getuid()} has no home directory, and {error}; {fix}") from error
    except OSError as error:
        raise run_error(error, f"user {os.getuid()} has no home directory, and {error}; {fix}") from error
    os.environ["HOME"] = str(folder)
    if is_first_on_node():
        print(f"warning: user {os.getuid()} has no home directory; HOME is {folder} here", file=sys.stderr)


def use_node_caches() -> None:
    """Move the compilers' caches to DIST_MEM_CACHES, a disk of this node; do nothing if it is not set.

    Compiled code is loaded from there, and everybody may write to such a disk, so only this user may be able to write
    to the folder in it. Otherwise the caches go to a folder for this node in the user's cache directory.
    """
    place = variable("DIST_MEM_CACHES")
    if place is None:
        return
    folder = Path(place) / f"dist_mem-{os.getuid()}"
    try:
        make_own(folder)
    except (NotOwnError, OSError) as error:
        folder = user_cache_dir() / "dist_mem" / node_name()
        if is_first_on_node():
            print(f"warning: {error}; compiled code is kept in {folder}", file=sys.stderr)
    for moved, name in _NODE_CACHES.items():
        set_default(moved, str(folder / name))


def _own_inductor_cache() -> Path:
    return Path(tempfile.gettempdir()) / f"dist_mem_inductor-{os.getuid()}"


def use_own_inductor_cache() -> None:
    """Keep the code that torch.compile makes where only this user can write; everybody can write beside it, in /tmp.

    Raises:
        ValueError: others could have put code into that folder.
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    given = variable(name)
    if given and not Path(given).name.startswith("torchinductor_"):  # torch's own default, which imports may have set
        return
    folder = _own_inductor_cache()
    try:
        make_own(folder)
    except NotOwnError as error:
        raise ValueError(f"{error}: code is loaded from it; set {name} to a folder of yours") from error
    os.environ[name] = str(folder)


def find_own_tools() -> None:
    """Put this environment's programs first on PATH: DeepSpeed needs `ninja` even if no environment is activated."""
    own = sysconfig.get_path("scripts")
    found = (variable("PATH") or "").split(os.pathsep)
    if found[0] != own:
        os.environ["PATH"] = os.pathsep.join([own, *found])


def cpp_compiler() -> str | None:
    """Return the C++ compiler that torch's extension builder uses: CXX, else c++ or g++; None if there is none.

    Of several words in CXX, as in `ccache g++` and `g++ -pipe`, it is the first.
    """
    requested = variable("CXX")
    if requested is None:
        return shutil.which("c++") or shutil.which("g++")
    with suppress(ValueError):  # a quote is not closed
        return shutil.which(next(iter(shlex.split(requested)), ""))
    return None
