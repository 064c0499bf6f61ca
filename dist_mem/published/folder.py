"""Folders in Hugging Face's layout: config.json and model.safetensors, as `save_pretrained` writes them.

A run with `model.pretrained` begins with the weights of such a folder; `dist-mem export --format transformers` writes
one. The configuration holds the sizes, so that a run is resumed and evaluated without the folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dist_mem.config import Config, ModelConfig
from dist_mem.errors import UnusableError
from dist_mem.model import MemoryLM
from dist_mem.published.family import Family
from dist_mem.published.names import FAMILIES, take_published

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # of weights in several files


def read_published_config(folder: Path, family: Family) -> dict[str, Any]:
    """Read config.json of a model of this family.

    Raises:
        UnusableError: there is none, or its model is not supported here.
    """
    path = folder / CONFIG
    try:
        published = json.loads(path.read_text(encoding="utf-8"))
        found = list(family.unsupported(published))
        if not found:
            family.sizes(published)
            int(published["vocab_size"])
    except OSError as error:
        raise UnusableError(f"model.pretrained: {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnusableError(f"model.pretrained: {path} is no configuration of {family.name}: {error!r}") from error
    for key, value, allowed in found:
        raise UnusableError(
            f"model.pretrained: {path} has {key} {value!r}, which is not computed here; it must be {allowed}"
        )
    return dict(published)


def check_sizes(model: ModelConfig, vocab_size: int | None) -> None:
    """Compare a configuration with its `model.pretrained`; `vocab_size` is None if the data are not built yet.

    Raises:
        UnusableError: names every key that differs, and its right value.
    """
    assert model.pretrained is not None
    family = FAMILIES[model.kind]
    path = Path(model.pretrained) / CONFIG
    published = read_published_config(Path(model.pretrained), family)
    effective = {"d_head": model.d_head or model.d_model // model.num_heads}
    effective["num_kv_heads"] = model.num_kv_heads or model.num_heads
    configured = {key: effective.get(key, getattr(model, key)) for key in family.sizes(published)}
    wrong = {key: value for key, value in family.sizes(published).items() if configured[key] != value}
    if wrong:
        given = ", ".join(f"model.{key} is {_shown(configured[key])}" for key in wrong)
        fix = " ".join(f"model.{key}={_shown(value)}" for key, value in wrong.items())
        raise UnusableError(f"{given}, but not in {path}: set {fix}")
    if vocab_size not in (None, published["vocab_size"]):
        raise UnusableError(
            f"data.path has a tokenizer of {vocab_size} tokens, {path} has vocab_size {published['vocab_size']}: build "
            f"the data with the model's tokenizer ({family.tokenizer})"
        )


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a folder, from one file or, if there is an index, from several.

    Raises:
        UnusableError: a file cannot be read.
    """
    path = folder / INDEX
    weights: dict[str, Tensor] = {}
    try:
        names = [WEIGHTS]
        if path.exists():
            index: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(index.values()))
        for name in names:
            path = folder / name
            weights |= load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        fix = "write the model again with transformers' save_pretrained"
        raise UnusableError(f"model.pretrained: {path} cannot be read ({error}): {fix}") from error
    return weights


def load_pretrained(model: MemoryLM, config: Config, vocab_size: int) -> list[str]:
    """Load the weights of `model.pretrained` into a model that is not yet under DeepSpeed.

    Returns:
        Names of the parameters that keep their initial values, because the folder does not have them.

    Raises:
        UnusableError: the folder cannot be read, or is of another size; names file, key and right value.
    """
    check_sizes(config.model, vocab_size)
    folder = Path(config.model.pretrained or "")
    weights = read_weights(folder)
    try:
        return take_published(model, weights, str(folder / WEIGHTS))
    except ValueError as error:
        raise UnusableError(f"model.pretrained: {error}") from error
