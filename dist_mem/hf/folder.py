"""Folders in Hugging Face's layout: config.json and model.safetensors, as `save_pretrained` writes them.

A run with `model.pretrained` begins with the weights of such a folder; `dist-mem export --format transformers` writes
one. The configuration holds the sizes, so that a run is resumed and evaluated without the folder.
"""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dist_mem.config import ModelConfig, as_tree
from dist_mem.config.blocks import value_at
from dist_mem.errors import UnusableError, run_error
from dist_mem.hf.layout import Layout
from dist_mem.hf.names import LAYOUTS, take_published
from dist_mem.model import MemoryLM
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.file_schema import check, plain_name, read_json, record, table
from dist_mem.runtime.files import by_name

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"  # of weights in several files
_INDEX = record({"weight_map": table(plain_name)}, is_open=True)  # tensor -> file of this folder
_AGAIN = "write the model again with transformers' save_pretrained"


def read_published_config(folder: Path, layout: Layout) -> dict[str, Any]:
    """Read config.json of a model in this layout.

    Raises:
        UnusableError: there is none, a key that is read has a wrong value, or its model is not supported here.
    """
    path = folder / CONFIG
    published = _read(path)
    # What a file lacks is named last: it may be of another kind of model, which is the reason.
    problem = next(record({}, layout.types, is_open=True)("", published), None)
    for key, value, allowed in () if problem else layout.unsupported(published):
        shown = reprlib.repr(value)
        raise UnusableError(
            f"model.pretrained: {path} has {key} {shown}, which is not computed here; it must be {allowed}"
        )
    required = {key: schema for key, schema in layout.types.items() if key not in layout.optional}
    problem = problem or next(record(required, is_open=True)("", published), None)
    if problem:
        raise UnusableError(f"model.pretrained: {path} is no configuration of {layout.name}: {problem}")
    return dict(published)


def _read(path: Path) -> Any:
    """Return the content of a JSON file of a folder. Raises RunError if it cannot be read."""
    try:
        return read_json(path, UnusableError)
    except UnusableError as error:
        raise UnusableError(f"model.pretrained: {error}: {_AGAIN}") from error
    except OSError as error:
        raise run_error(error, f"model.pretrained: {path} cannot be read: {error.strerror}") from error


def check_sizes(model: ModelConfig, vocab_size: int | None) -> None:
    """Compare a configuration with its `model.pretrained`; `vocab_size` is None if the data are not built yet.

    Raises:
        UnusableError: names every key that differs, and its right value.
    """
    assert model.pretrained is not None
    layout = LAYOUTS[model.kind]
    path = Path(model.pretrained) / CONFIG
    published = read_published_config(Path(model.pretrained), layout)
    effective: dict[str, Any] = {"d_head": model.d_head or model.d_model // model.num_heads}
    effective["num_kv_heads"] = model.num_kv_heads or model.num_heads
    if model.rope is not None:
        effective["rope.original_positions"] = model.rope.original_positions or model.num_positions
    tree = as_tree(model)
    sizes = layout.sizes(published)
    configured = {key: effective.get(key, value_at(tree, key)) for key in sizes}
    wrong = {key: value for key, value in sizes.items() if configured[key] != value}
    if wrong:
        given = ", ".join(f"model.{key} is {_as_json(configured[key])}" for key in wrong)
        fix = " ".join(f"model.{key}={_as_json(value)}" for key, value in wrong.items())
        raise UnusableError(f"{given}, but not in {path}: set {fix}")
    if vocab_size not in (None, published["vocab_size"]):
        raise UnusableError(
            f"data.path has a tokenizer of {vocab_size} tokens, {path} has vocab_size {published['vocab_size']}: "
            f"{build_again(model)}"
        )


def build_again(model: ModelConfig) -> str:
    """Return how to build data with the tokenizer of `model.pretrained`."""
    return f"build the data with the model's tokenizer (--tokenizer-from {model.pretrained})"


def _as_json(value: Any) -> str:
    """Return a value as an override writes it; of a block, its keys."""
    if isinstance(value, dict):
        return f"a block of {', '.join(value)}"
    return json_text(value) if value is None or isinstance(value, bool) else str(value)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a folder, from one file or, where there is none but an index, from several.

    Raises:
        UnusableError: a file is missing or damaged.
        UnfitError: its disk fails.
    """
    path = folder / INDEX
    names = [WEIGHTS]
    if path.exists() and not (folder / WEIGHTS).exists():
        index = _read(path)
        check(index, _INDEX, path, UnusableError, f": {_AGAIN}")
        names = sorted(set(index["weight_map"].values()))
    weights: dict[str, Tensor] = {}
    for path in (folder / name for name in names):
        try:
            with by_name(path) as name:
                weights |= load_file(name)
        except (FileNotFoundError, SafetensorError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UnusableError(f"model.pretrained: {path} cannot be read ({reason}): {_AGAIN}") from error
        except OSError as error:
            raise run_error(error, f"model.pretrained: {path} cannot be read: {error}") from error
    return weights


def load_pretrained(model: MemoryLM, sizes: ModelConfig, vocab_size: int) -> list[str]:
    """Load the weights of `model.pretrained` into a model that is not yet under DeepSpeed.

    Returns:
        Names of the parameters that keep their initial values, because the folder does not have them.

    Raises:
        UnusableError: the folder cannot be read, or is of another size; names file, key and right value.
    """
    check_sizes(sizes, vocab_size)
    folder = Path(sizes.pretrained or "")
    weights = read_weights(folder)
    try:
        return take_published(model, weights, str(folder / WEIGHTS))
    except ValueError as error:
        raise UnusableError(f"model.pretrained: {error}") from error
