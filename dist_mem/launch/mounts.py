"""Paths of a configuration that the ranks of a container do not see."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from dist_mem.config import Config
from dist_mem.config.check import flatten
from dist_mem.config.keys import is_path
from dist_mem.launch.directives import option
from dist_mem.runtime.environment import expanded, home_dir


def warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each path outside of all folders that the container has; a site may mount more of them."""
    launch = config.launch
    if launch.container == "none":
        return
    folder = Path(option(launch.directives, "chdir") or Path.cwd())
    mounts = [expanded(mount.split(":")[1 if ":" in mount else 0]) for mount in launch.mounts]
    if any("$" in mount for mount in mounts):
        return  # known on the nodes only
    seen = [str(folder), *mounts, *(_always_in_apptainer() if launch.container == "apptainer" else [])]
    for key, value in flatten(OmegaConf.to_container(config, resolve=True)).items():
        if key.startswith("launch.") or not is_path(Config, key) or not isinstance(value, str):
            continue
        path = folder / re.sub(r"^(sqlite[^:/]*:///|file://)", "", value)
        if "://" not in str(path) and not any(_is_in(path, Path(each)) for each in seen):
            yield (
                f"warning: {key} = {value} is in no folder that the container sees ({', '.join(seen)}): add it to "
                "launch.mounts, unless the site mounts it anyway"
            )


def _always_in_apptainer() -> list[str]:
    return [*map(str, filter(None, [home_dir()])), "/tmp", "/var/tmp"]


def _is_in(path: Path, folder: Path) -> bool:
    texts = {os.path.normpath(path), os.path.realpath(path)}
    return any(Path(text).is_relative_to(each) for text in texts for each in (folder, folder.resolve()))
