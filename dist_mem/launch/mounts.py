"""Paths of a configuration inside and outside of the container of its ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from dist_mem.config import Config, as_tree, change_config
from dist_mem.config.check import flatten
from dist_mem.config.keys import is_path
from dist_mem.launch.directives import option
from dist_mem.runtime.environment import expand_variables, home_dir


def see_from_here(config: Config) -> Config:
    """Return a configuration with the folders of its data where this machine has them, outside of the container."""
    mounts = [mount.split(":") for mount in map(expand_variables, config.launch.mounts)]
    places = {Path(mount[1 if len(mount) > 1 else 0]): Path(mount[0]) for mount in mounts}
    found = {}
    for key, path in _folders_of_data(config).items():
        within = [place for place in places if path.is_relative_to(place)]
        if within:
            deepest = max(within, key=lambda place: len(place.parts))
            found[key] = str(places[deepest] / path.relative_to(deepest))
    return change_config(config, found)


def missing_data(config: Config) -> list[str]:
    """Return the folders of data, each with its key, that only the container may have."""
    if config.launch.container == "none":
        return []
    return [f"{key} = {path}" for key, path in _folders_of_data(config).items() if not path.exists()]


def _folders_of_data(config: Config) -> dict[str, Path]:
    """Return the absolute folders of data; others are in the folder of the job, which the container has as it is."""
    leaves = flatten(as_tree(config))
    found = {key: Path(path) for key, path in leaves.items() if re.fullmatch(r"data\.(.*\.)?path", key)}
    return {key: path for key, path in found.items() if path.is_absolute()}


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
