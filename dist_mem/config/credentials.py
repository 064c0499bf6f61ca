"""No user and no password in the text of a configuration: it stands in files, in MLflow and on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dist_mem.config.check import Problem, flatten

_FIXES = {
    "data.path": "write ${oc.env:NAME} in their place, which no file resolves",
    "tracking.uri": (
        "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment; for a database write "
        "${oc.env:NAME} in their place, or set MLFLOW_TRACKING_URI"
    ),
}


def check_credentials(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """The addresses with a user or password in them; what is taken from the environment is fine.

    Args:
        tree: a file, or the overrides of a command line, its interpolations unresolved.
    """
    leaves = flatten(tree)
    for key, fix in _FIXES.items():
        if isinstance(address := leaves.get(key), str) and _names_somebody(address):
            yield Problem(key, f"has a user or password in it, which files and lists of processes would show; {fix}")


def _names_somebody(address: str) -> bool:
    """Whether a URL has a password, or, over HTTP, a user: tokens stand there. A database may be told its user."""
    previous = ""
    while previous != address:  # innermost first
        previous, address = address, re.sub(r"\$\{[^{}]*\}", "", address)
    for scheme, userinfo in re.findall(r"([a-z][a-z0-9+.-]*)://([^/?#\s]*)@", address, re.IGNORECASE):
        user, _, password = userinfo.partition(":")
        if password or (user and scheme.lower() in ("http", "https")):
            return True
    return False
