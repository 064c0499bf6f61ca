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

from dist_mem.config import Config, ModelConfig
from dist_mem.errors import UnusableError
from dist_mem.gpt2.names import take_published
from dist_mem.model import MemoryLM

CONFIG, WEIGHTS = "config.json", "model.safetensors"
# Keys of config.json that change the computation, and the values supported here.
COMPUTED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}


def sizes_of(published: dict[str, Any]) -> dict[str, int]:
    """Return the sizes in a config.json by our keys of `model`."""
    return {
        "num_layers": published["n_layer"],
        "d_model": published["n_embd"],
        "num_heads": published["n_head"],
        "d_inner": published.get("n_inner") or 4 * published["n_embd"],
        "num_positions": published["n_positions"],
    }


def read_published_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a GPT-2.

    Raises:
        UnusableError: there is none, or its model is not supported here.
    """
    path = folder / CONFIG
    try:
        published = json.loads(path.read_text(encoding="utf-8"))
        sizes_of(published)
        int(published["vocab_size"])
    except OSError as error:
        raise UnusableError(f"model.pretrained: {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UnusableError(f"model.pretrained: {path} is no configuration of a GPT-2: {error!r}") from error
    for key, values in COMPUTED.items():
        if published.get(key, values[0]) not in values:
            raise UnusableError(
                f"model.pretrained: {path} has {key} {published[key]!r}, which is not computed here; it must be "
                f"{' or '.join(map(str, values))}"
            )
    return published


def check_sizes(model: ModelConfig, vocab_size: int | None) -> None:
    """Compare a configuration with its `model.pretrained`; `vocab_size` is None if the data are not built yet.

    Raises:
        UnusableError: names every key that differs, and its right value.
    """
    assert model.pretrained is not None
    path = Path(model.pretrained) / CONFIG
    published = read_published_config(Path(model.pretrained))
    wrong = {key: value for key, value in sizes_of(published).items() if getattr(model, key) != value}
    if wrong:
        configured = ", ".join(f"model.{key} is {getattr(model, key)}" for key in wrong)
        fix = " ".join(f"model.{key}={value}" for key, value in wrong.items())
        raise UnusableError(f"{configured}, but not in {path}: set {fix}")
    if vocab_size not in (None, published["vocab_size"]):
        raise UnusableError(
            f"data.path has a tokenizer of {vocab_size} tokens, {path} has vocab_size {published['vocab_size']}: build "
            "the data with the model's tokenizer (shards/gpt2_tokenizer.py)"
        )


def load_pretrained(model: MemoryLM, config: Config, vocab_size: int) -> list[str]:
    """Load the weights of `model.pretrained` into a model that is not yet under DeepSpeed.

    Returns:
        Names of the parameters that keep their initial values, because the folder does not have them.

    Raises:
        UnusableError: the folder cannot be read, or is of another size; names file, key and right value.
    """
    check_sizes(config.model, vocab_size)
    path = Path(config.model.pretrained or "") / WEIGHTS
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        fix = "write the model again with transformers' save_pretrained"
        raise UnusableError(f"model.pretrained: {path} cannot be read ({error}): {fix}") from error
    try:
        return take_published(model, weights, str(path))
    except ValueError as error:
        raise UnusableError(f"model.pretrained: {error}") from error
