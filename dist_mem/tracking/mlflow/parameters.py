"""The parameters of an MLflow run: those keys of the configuration whose values differ from the defaults.

The file config.yaml is the whole configuration. The journal keeps it too: the next start compares its own
configuration with it, and logs what changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dist_mem.config import Config
from dist_mem.config.check import flatten
from dist_mem.tracking.mlflow.journal import find_entries


def as_texts(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the leaves of a tree as texts; names of nested blocks are joined by dots."""
    return {name.replace("[", ".").replace("]", ""): str(value) for name, value in flatten(tree).items()}


def parameters_entry(config: Config, journal: Path, *, step: int) -> dict[str, Any]:
    """Return the body of the journal's entry for a start from `step`.

    It has under `params` what the run gets at its first start, under `changes` what another start changes, and under
    `config` the whole configuration, unresolved: a value from the environment may be a secret.
    """
    now, defaults = (
        as_texts(OmegaConf.to_container(source, resolve=False))  # type: ignore[arg-type]
        for source in (config, OmegaConf.structured(Config))
    )
    entries = [entry.body for entry in find_entries(journal, "params") if entry.body.get("is_config", True)]
    if not entries:
        params = {name: value for name, value in now.items() if defaults.get(name) != value}
        return {"params": params, "changes": "", "config": now, "step": step}
    before = entries[-1]["config"]
    changes = [f"{name}: {before[name]} -> {value}" for name, value in now.items() if before.get(name, value) != value]
    return {"params": {}, "changes": "; ".join(changes), "config": now, "step": step}
