"""Export a GPT-2 as a folder that Hugging Face's transformers and `model.pretrained` can load.

    dist-mem export runs/gpt2_small --out models/gpt2 --format transformers

    DIR/
        config.json, model.safetensors   as `save_pretrained` of GPT2LMHeadModel writes them
        vocab.json, merges.txt, ...      the tokenizer, if it is of GPT-2's kind
        config.yaml                      the training configuration without places of the training machine
        modeling_dist_mem.py             only for a model with memory: a program that trust_remote_code=True runs

The weights of a memory are in the same file under other names. GPT2LMHeadModel ignores them with a warning and loads
the GPT-2 below the memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from dist_mem import gpt2
from dist_mem.config import Config, to_yaml
from dist_mem.data.tokenizers.byte_pairs import END_OF_TEXT, BytePairTokenizer, write_byte_pairs
from dist_mem.errors import UnusableError
from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.gpt2.folder import CONFIG, WEIGHTS
from dist_mem.gpt2.names import to_published
from dist_mem.runtime.files import write_text

MODELING = Path(gpt2.__file__).parent / "modeling_dist_mem.py"  # copied into the export; only transformers runs it


def published_config(trained: TrainedModel) -> dict[str, Any]:
    """Return the content of config.json."""
    model = trained.config.model
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": trained.tokenizer.vocab_size,
        "n_layer": model.num_layers,
        "n_embd": model.d_model,
        "n_head": model.num_heads,
        "n_inner": model.d_inner,
        "n_positions": model.num_positions,
        "n_ctx": model.num_positions,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "attn_pdrop": model.attention_dropout,
        "bos_token_id": trained.tokenizer.bos_id,
        "eos_token_id": trained.tokenizer.bos_id,
        "tie_word_embeddings": True,
        "dtype": str(trained.dtype).removeprefix("torch."),
    }


def write_transformers(trained: TrainedModel, directory: Path, settings: Config) -> None:
    """Write the folder into an empty directory.

    Args:
        settings: the training configuration without places of the training machine.

    Raises:
        UnusableError: the model is not a GPT-2, or its attention is not GPT-2's.
    """
    if trained.config.model.kind != "gpt2":
        raise UnusableError(
            f"--format transformers is for model.kind=gpt2; {trained.checkpoint.directory} has "
            f"model.kind={trained.config.model.kind}: leave --format out"
        )
    try:
        weights = to_published(trained.model)
    except ValueError as error:
        raise UnusableError(f"--format transformers: {error}") from error
    # Token types are also carried from segment to segment.
    has_memory = trained.config.memory["kind"] != "causal" or bool(trained.config.model.token_types)
    if has_memory and any(name.startswith("memory/") for name in trained.checkpoint.manifest["files"]):
        raise UnusableError("--format transformers: a memory from outside the package cannot be part of such a folder")
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    published = published_config(trained)
    if has_memory:
        published["auto_map"] = {"AutoModelForCausalLM": f"{MODELING.stem}.MemoryGPT2"}
        write_text(directory / MODELING.name, MODELING.read_text(encoding="utf-8"))
    write_text(directory / CONFIG, json.dumps(published, indent=1) + "\n")
    write_text(directory / "config.yaml", to_yaml(settings, resolve=True))
    if isinstance(trained.tokenizer, BytePairTokenizer):
        write_byte_pairs(trained.tokenizer, directory)
        settings_of_tokenizer = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
        settings_of_tokenizer["tokenizer_class"] = "GPT2Tokenizer"
        write_text(directory / "tokenizer_config.json", json.dumps(settings_of_tokenizer, indent=1) + "\n")
