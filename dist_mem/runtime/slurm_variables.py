"""Environments for Slurm's commands. Most options of these commands are also variables, which precede a script's lines.

So a variable of the user's profile, or of the job that this process runs in, would silently change a job. The commands
get the variables that lead to Slurm, and a submission also those that say who pays and where, if the configuration
leaves that open.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NamedTuple

from dist_mem.runtime.environment import variable

_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SCANCEL_", "SCONTROL_", "SACCT_", "SINFO_")
_LEAD_TO_SLURM = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_KEY", "SLURM_SACK_JWKS")
# sbatch's option -> the variable that sets it. Users set these once, in their profile.
_WHO_AND_WHERE = {
    "account": "SBATCH_ACCOUNT",
    "partition": "SBATCH_PARTITION",
    "qos": "SBATCH_QOS",
    "reservation": "SBATCH_RESERVATION",
    "wckey": "SBATCH_WCKEY",
    "clusters": "SBATCH_CLUSTERS",
}


class Submission(NamedTuple):
    """The environment of sbatch, and what to say about it."""

    environment: dict[str, str]
    passed_on: dict[str, str]  # option -> the variable that sets it
    left_out: list[str]  # variables that would have set an option


def environment_of_slurm() -> dict[str, str]:
    """Return the environment for Slurm's other commands, which answer in UTC: hosts may differ in their time zone."""
    return {**_without_options(), "SLURM_TIME_FORMAT": "standard", "TZ": "UTC"}


def environment_of_sbatch(given: Collection[str]) -> Submission:
    """Return the environment in which only the script, and what it leaves open, determines the job.

    Args:
        given: sbatch's options that the script contains.
    """
    passed_on = {option: name for option, name in _WHO_AND_WHERE.items() if variable(name) and option not in given}
    values = {name: variable(name) or "" for name in passed_on.values()}
    left_out = sorted(name for name in os.environ if name.startswith("SBATCH_") and name not in values)
    return Submission({**_without_options(), **values}, passed_on, left_out)


def _without_options() -> dict[str, str]:
    """Return the environment without the variables that Slurm's commands read as options, or that describe a job."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_PREFIXES) or (name in _LEAD_TO_SLURM and value)
    }
