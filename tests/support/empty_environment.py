"""An environment in which only a wheel and what it requires can be imported, made without a download.

Its packages are links to those of the environment that runs the tests, found by what the wheel and they declare.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, PathDistribution, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement


def without_pip(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables that name packages to pip or modules to Python."""
    kept = {name: value for name, value in environment.items() if not name.startswith(("PIP_", "PYTHON"))}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def make_environment(folder: Path, wheel: Path, *extras: str) -> Path:
    """Make a virtual environment with a wheel of dist_mem, and return its site-packages.

    Raises:
        PackageNotFoundError: the wheel requires what the environment that runs the tests does not have.
    """
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    for command in ([sys.executable, "-m", "venv", "--without-pip", str(folder)], [*install, str(wheel)]):
        subprocess.run(command, check=True, env=without_pip(os.environ))
    (site,) = folder.glob("lib/python*/site-packages")
    (metadata,) = site.glob("dist_mem-*.dist-info")
    owners = packages_distributions()
    for found in _closure(PathDistribution(metadata), extras):
        _link(found, site, owners)
    return site


def _closure(first: Distribution, extras: Iterable[str]) -> list[Distribution]:
    """Return all that a distribution with these extras requires, directly or through others, here."""
    found: dict[tuple[str, str], Distribution] = {}  # by name and extra
    left = [(first, extra) for extra in ("", *extras)]
    while left:
        one, extra = left.pop()
        for requirement in map(Requirement, one.requires or ()):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            for its_extra in ("", *requirement.extras):
                key = (requirement.name, its_extra)
                if key not in found:
                    found[key] = distribution(requirement.name)
                    left.append((found[key], its_extra))
    return list({each.metadata["Name"]: each for each in found.values()}.values())


def _link(found: Distribution, site: Path, owners: Mapping[str, list[str]]) -> None:
    """Link a distribution into site-packages: whole folders, or single files of those that it shares with others."""
    for file in found.files or ():
        top = file.parts[0]
        if top in ("..", "__pycache__") or top.endswith(".pth"):
            continue
        name = file if len(set(owners.get(top, ()))) > 1 else top
        if not (link := site / name).exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(str(found.locate_file(name)))
