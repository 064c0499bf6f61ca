"""Paths of a configuration inside and outside of the container of its ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dist_mem.config import Config, LaunchConfig, as_tree
from dist_mem.config.check import flatten
from dist_mem.config.keys import is_path
from dist_mem.launch.directives import option
from dist_mem.runtime.environment import expand_variables, home_dir


def find_outside(launch: LaunchConfig, leaves: Mapping[str, Any]) -> dict[str, str]:
    """Return the folders of data, key -> path, where this machine has them, outside of the container.

    Relative ones are left out: they are in the folder of the job, which the container has as it is.

    Args:
        leaves: of the configuration, by their full keys.
    """
    if launch.container == "none":
        return {}
    mounts = [mount.split(":") for mount in map(expand_variables, launch.mounts)]
    places = {Path(mount[1 if len(mount) > 1 else 0]): Path(mount[0]) for mount in mounts}
    found = {}
    for key, folder in leaves.items():
        if re.fullmatch(r"data\.(.*\.)?path", key) and Path(folder).is_absolute():
            path = Path(folder)
            within = max(filter(path.is_relative_to, places), key=lambda place: len(place.parts), default=path)
            found[key] = str(places.get(within, within) / path.relative_to(within))
    return found


def warnings(config: Config) -> Iterator[str]:
    """Yield a warning for each path outside of all folders that the container has; a site may mount more of them."""
    launch = config.launch
    if launch.container == "none":
        return
    folder = option(launch.directives, "chdir") or str(Path.cwd())
    always = [folder, *(_always_in_apptainer() if launch.container == "apptainer" else [])]
    mounts = [mount.split(":")[1 if ":" in mount else 0] for mount in launch.mounts]
    seen = [*always, *map(expand_variables, mounts)]
    if any("$" in place for place in seen):
        return  # known on the nodes only
    written = flatten(config.document)
    for key, value in flatten(as_tree(config)).items():
        if key.startswith("launch.") or not is_path(Config, key) or not isinstance(value, str):
            continue
        path = Path(folder) / re.sub(r"^(sqlite[^:/]*:///|file://)", "", value)  # an address is not absolute
        if not any(_is_in(path, Path(place)) for place in seen):
            yield (
                f"warning: {key} = {written.get(key, '...')} is in no folder that the container sees "
                f"({', '.join([*always, *mounts])}): add it to launch.mounts, unless the site mounts it anyway"
            )


def _always_in_apptainer() -> list[str]:
    return [*map(str, filter(None, [home_dir()])), "/tmp", "/var/tmp"]


def _is_in(path: Path, folder: Path) -> bool:
    texts = {os.path.normpath(path), os.path.realpath(path)}
    return any(Path(text).is_relative_to(each) for text in texts for each in (folder, folder.resolve()))
