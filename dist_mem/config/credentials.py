"""Reject users and passwords in the text of a configuration, which is visible in files, MLflow and process lists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dist_mem.config.check import Problem, flatten

_FIXES = {
    "data.path": "write ${oc.env:NAME} in their place, which files contain unresolved",
    "tracking.uri": (
        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment; for a database write "
        "${oc.env:NAME} in their place, or set MLFLOW_TRACKING_URI"
    ),
}


def check_credentials(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the addresses that contain a user or password; values read from the environment are accepted.

    Args:
        tree: a file, or the overrides of a command line, with unresolved interpolations.
    """
    leaves = flatten(tree)
    for key, fix in _FIXES.items():
        if isinstance(address := leaves.get(key), str) and _has_credentials(address):
            yield Problem(key, f"contains a user or password, which files and lists of processes would show; {fix}")


def _has_credentials(address: str) -> bool:
    """Return whether a URL has a password, or, over HTTP, a user, which may be a token. Databases may have a user."""
    previous = ""
    while previous != address:  # removes interpolations, innermost first
        previous, address = address, re.sub(r"\$\{[^{}]*\}", "", address)
    for scheme, userinfo in re.findall(r"([a-z][a-z0-9+.-]*)://([^/?#\s]*)@", address, re.IGNORECASE):
        user, _, password = userinfo.partition(":")
        if password or (user and scheme.lower() in ("http", "https")):
            return True
    return False
