"""Checks of a `launch:` block when a script is made of it; all problems are reported at once, each with its key."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_mem.config import Config
from dist_mem.config.check import Problem, flatten, format_value, stop_on
from dist_mem.config.launch_schema import LaunchConfig
from dist_mem.errors import UnusableError
from dist_mem.launch import directives, setup_lines

_MOST_NODES = 200_000  # more than any cluster has
_MOST_GPUS = 1_024  # per node
_WORDS = ("cpu_bind", "memory", "partition", "account", "qos", "interface")
# A condition is like afterok:12:13_4, after:12+30 (minutes) or singleton; `,`: all must hold, `?`: any of them.
_JOB = r"\d+(?:_\d+)?"
_CONDITION = rf"(?:after(?:any|ok|notok|corr|burstbuffer)(?::{_JOB})+|after(?::{_JOB}(?:\+\d+)?)+|singleton)"
_DEPENDENCY = re.compile(rf"{_CONDITION}(?:(?:,{_CONDITION})*|(?:\?{_CONDITION})*)", re.ASCII)


def check(config: Config) -> None:
    """Raise ConfigError if no script can be made from `config.launch`."""
    stop_on(_from_environment(config.document))  # first: the other messages show values
    launch = config.launch
    stop_on([*_sizes(launch), *_texts(launch), *_restart(launch)])


def check_folder(launch: LaunchConfig, leaves: Mapping[str, Any], arguments: Sequence[str]) -> None:
    """Raise UnusableError if paths mean other files in the folder of the job than here.

    Args:
        leaves: of the configuration, by their full keys.
        arguments: from which it was read.
    """
    folder = directives.other_folder(launch.directives)
    if folder is None:
        return
    keys = [key for key in leaves if key == "run_dir" or re.fullmatch(r"data\.(.*\.)?path", key)]
    relative = [key for key in keys if leaves[key] and not re.match(r"/|[\w+.-]+://", leaves[key])]
    relative += [name for name in arguments if not name.startswith("/") and Path(name).is_file()]
    if relative:
        raise UnusableError(  # without values, which may be of the environment
            f"launch.directives has --chdir={folder}, and from there these are other files: {', '.join(relative)}; "
            f"give absolute paths, or submit from there: cd {shlex.quote(folder)} && dist-mem launch ..."
        )


def check_gpus(launch: LaunchConfig) -> None:
    """Raise ConfigError if the GPUs of a node cannot be known."""
    stop_on([*_gpus(launch), *_directives(launch)])


def _from_environment(document: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse values from the environment: everybody can read the script, in the run directory and in Slurm."""
    leaves = flatten(document)
    fix = (
        "write $NAME in its place in env, setup, image and mounts: the shell of the job expands it, with the "
        "environment that sbatch hands on; elsewhere write the value"
    )
    for key, value in leaves.items():
        if key.startswith("launch.") and _reads_environment(value, leaves):
            yield Problem(key, f"reads an environment variable, whose value would be in the script; {fix}")


def _reads_environment(value: Any, leaves: Mapping[str, Any]) -> bool:
    """Return whether a text reads the environment, or refers to a text that does."""
    names = re.findall(r"\$\{([\w.\[\]]+)\}", str(value))
    return "oc.env" in str(value) or any(_reads_environment(leaves.get(name.lstrip(".")), leaves) for name in names)


def _sizes(launch: LaunchConfig) -> Iterator[Problem]:
    nodes = re.fullmatch(r"([1-9]\d{0,99})(?:-([1-9]\d{0,99}))?", launch.nodes)
    if not nodes or int(nodes[1]) > int(nodes[2] or nodes[1]):
        yield Problem(
            "launch.nodes", f"is {format_value(launch.nodes)}, but must be a number as 4, or a range as 60-64"
        )
    elif int(nodes[2] or nodes[1]) > _MOST_NODES:
        yield Problem("launch.nodes", f"is {launch.nodes!r}, but must be at most {_MOST_NODES:,}")
    yield from _gpus(launch)
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){1,2}|\d+-\d+", launch.time):
        yield Problem("launch.time", f"is {launch.time}, but must be as '12:00:00' or '2-00:00:00'")
    elif launch.signal_seconds >= (seconds := _seconds(launch.time)):
        given = f"is {launch.signal_seconds}, but launch.time = {launch.time} is {seconds:,} s"
        yield Problem("launch.signal_seconds", f"{given}: nothing would be trained before the stop; ask for more time")


def _gpus(launch: LaunchConfig) -> Iterator[Problem]:
    gpus = re.fullmatch(r"(?:[\w.-]*[^\W\d][\w.-]*:)?(\d{1,99})", launch.gpus_per_node)
    if not gpus:
        form = "a number as 8, or a type and a number as a100:4, as `sinfo --Format=nodehost,gres` lists them"
        yield Problem("launch.gpus_per_node", f"is {format_value(launch.gpus_per_node)}, but must be {form}")
    elif int(gpus[1]) > _MOST_GPUS:
        yield Problem("launch.gpus_per_node", f"is {launch.gpus_per_node!r}, but must be at most {_MOST_GPUS:,}")


def _seconds(time: str) -> int:
    """Return a Slurm time in seconds: MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS[:MINUTES[:SECONDS]]."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    parts = [*parts, *[0] * (3 - len(parts))] if dash else [*[0] * (3 - len(parts)), *parts]
    hours, minutes, seconds = parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _texts(launch: LaunchConfig) -> Iterator[Problem]:
    for name in _WORDS:
        if re.search(r"\s", getattr(launch, name) or ""):
            yield Problem(f"launch.{name}", f"is {getattr(launch, name)!r}, but must be one word")
    if launch.dependency is not None and not _DEPENDENCY.fullmatch(launch.dependency):
        form = "as sbatch --dependency takes it: afterok:1234, afterany:1234:1240, after:1234+30, singleton"
        yield Problem("launch.dependency", f"is {format_value(launch.dependency)}, but must be {form}")
    if (launch.image is None) != (launch.container == "none"):
        given = f"is {launch.container}, but launch.image is {launch.image!r}"
        yield Problem("launch.container", f"{given}; give both, or container none and no image")
    for index, line in enumerate(launch.env):
        if not re.fullmatch(r"[A-Za-z_]\w*=.*", line):
            yield Problem(f"launch.env[{index}]", f"is {line!r}, but must be of the form NAME=VALUE")
    yield from _directives(launch)
    try:
        setup_lines.commands(launch.setup)
    except (ValueError, OSError) as error:
        yield Problem("launch.setup", str(error))


def _directives(launch: LaunchConfig) -> Iterator[Problem]:
    for index, text in directives.problems(launch.directives):
        yield Problem(f"launch.directives[{index}]", text)


def _restart(launch: LaunchConfig) -> Iterator[Problem]:
    if launch.exclude_failed and launch.restart in ("chain", "none"):
        way = f"is true, but with launch.restart = {launch.restart} no start can leave out a node"
        yield Problem("launch.exclude_failed", f"{way}; use requeue or resubmit")
