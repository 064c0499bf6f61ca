"""A small study, as a file and as results that no training made."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from dist_mem.studies.study import Study, load_study

NAME = "one.yaml"
STUDY: dict[str, Any] = {
    "title": "t",
    "source": "s",
    "rows": {
        "xl": {"name": "XL"},
        "best": {"name": "Best", "best_of": ["small", "large", "elsewhere"], "paper": {"500": 0.5}},
        "small": {"name": "Small"},
        "large": {"name": "Large"},
        "elsewhere": {"name": "Elsewhere"},
    },
    "scales": {
        "tiny": {
            "about": "a",
            "rows": {"xl": [], "small": [], "large": []},
            "seeds": [0, 1],
            "points": {"a": {"data": "d"}, "b": {"data": "e"}},
            "columns": {
                "500": {"metric": "accuracy", "point": "a"},
                "1000": {"metric": "word_perplexity", "point": "b"},
            },
        }
    },
}
GRID = {"memory": ["none.yaml", "memory/long.yaml"], "optimizer.lr": [0.001, 0.002], "model.dropout": [0.0]}
SWEEP: dict[str, Any] = {"train": ["job.yaml"], "grid": GRID, "data": "books"}
ROWS = {"none": ["memory.kind=none"], "transformer_xl": ["memory.kind=transformer_xl"]}
ARENA: dict[str, Any] = {"train": ["job.yaml"], "rows": ROWS, "budget": {"tokens": 5000}, "data": "books"}


def write(folder: Path, content: dict[str, Any], **changes: Any) -> str:
    """Write the file of a study with changed keys, and return its path."""
    path = folder / NAME
    path.write_text(yaml.safe_dump({**content, **changes}, sort_keys=False), encoding="utf-8")
    return str(path)


def load(folder: Path, content: dict[str, Any] = STUDY, **changes: Any) -> Study:
    return load_study(write(folder, content, **changes))


def at_tiny(**changes: Any) -> dict[str, Any]:
    """Return `scales` of `STUDY` with changed keys of its only scale."""
    return {"tiny": {**STUDY["scales"]["tiny"], **changes}}


def two_memories(data: str, *scales: str, **settings: Any) -> dict[str, Any]:
    """Return a table of two rows with the paper's figures, at scales with these settings."""
    scale = {"about": "Seconds.", "rows": {"none": ["memory.kind=none"], "xl": []}, "points": {"": {"data": data}}}
    return {
        "title": "Two memories",
        "source": "nobody",
        "rows": {"none": {"name": "None", "paper": {"test": 1.5}}, "xl": {"name": "XL", "paper": {"test": 1.25}}},
        "columns": {"test": {"metric": "token_perplexity"}},
        "scales": {name: deepcopy({**scale, **settings}) for name in scales},
    }
