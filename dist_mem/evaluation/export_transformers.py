"""Export a trained model as a folder that Hugging Face's transformers loads, and dist_mem too.

    dist-mem export runs/demo --out models/mine --format transformers

    DIR/
        config.json, model.safetensors   what AutoModelForCausalLM reads
        tokenizer.json, ...              what AutoTokenizer reads; the ids of a text are those of training
        modeling_dist_mem.py             a program that trust_remote_code=True runs; it imports dist_mem
        tokenization_dist_mem.py         of a Qwen2 with another tokenizer: a program that imports its class
        config.yaml, tokenizer/, ...     what `dist_mem.load` reads (export.py)

A GPT-2 or Llama has Hugging Face's names, so that GPT2LMHeadModel or LlamaForCausalLM loads it without a program; the
weights of a memory are in the same file under other names, which these classes ignore with a warning. All other models
keep our names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dist_mem.checkpoint.rank_file import safetensors_parts
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.byte_pairs import END_OF_TEXT, BytePairTokenizer, write_byte_pairs
from dist_mem.data.tokenizers.huggingface import CONFIG_NAME, HuggingFaceTokenizer, write_folder
from dist_mem.errors import UnusableError
from dist_mem.evaluation.trained_model import TrainedModel, distinct_weights
from dist_mem.hf.folder import CONFIG, WEIGHTS
from dist_mem.hf.names import LAYOUTS, to_published
from dist_mem.runtime.extras import require
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.files import write_hashed, write_text

MODELING, TOKENIZATION = "modeling_dist_mem.py", "tokenization_dist_mem.py"
_MEMORY_CLASSES = {  # of model_type
    **{"gpt2": "MemoryGPT2", "llama": "MemoryLlama", "mistral": "MemoryMistral"},
    **{"qwen2": "MemoryQwen2", "qwen3": "MemoryQwen3"},
}
_PROGRAM = '''"""The classes of this model. They are in dist_mem, so that this folder has no copy of its code."""

try:
    from dist_mem.generation.transformers_model import MemoryConfig, MemoryForCausalLM, {memory}
except ImportError as error:
    raise ImportError(
        f"this model needs dist_mem of this or a newer commit ({error}): clone it, then pip install --editable FOLDER"
    ) from error
'''

# A class of its own: transformers marks the one that it opens, and copies its program wherever that is saved.
_TOKENIZER_PROGRAM = '''"""The tokenizer of this model, as transformers has it."""

import transformers


class {name}(transformers.{name}):
    pass
'''


def write_transformers(trained: TrainedModel, directory: Path) -> None:
    """Write what transformers reads into an empty directory; without the files of export.py.

    Raises:
        UnusableError: the tokenizer has no fast form or names no class, or a GPT-2's or Llama's attention is another.
    """
    kind = trained.config.model.kind
    is_published = kind in LAYOUTS
    weights = _to_published(trained) if is_published else distinct_weights(trained.model)
    content = published_config(trained) if is_published else native_config(trained)
    if kind == "gpt2" and isinstance(trained.tokenizer, BytePairTokenizer):
        _write_gpt2_tokenizer(trained.tokenizer, directory)
    else:
        try:
            adds_bos = not trained.config.data.blocks
            write_tokenizer(trained.tokenizer, directory, adds_bos=adds_bos, purpose="export --format transformers")
        except UnusableError:
            raise
        except ValueError as error:
            raise UnusableError(f"--format transformers: {error}: leave --format out") from error
    if content["model_type"] == "qwen2":
        _keep_tokenizer_class(directory)
    write_hashed(directory / WEIGHTS, safetensors_parts(weights, metadata={"format": "pt"}))
    write_text(directory / CONFIG, json_text(content, indent=1) + "\n")
    if "auto_map" in content:
        memory = _MEMORY_CLASSES.get(content["model_type"], "MemoryGPT2")
        write_text(directory / MODELING, _PROGRAM.replace("{memory}", memory))


def _to_published(trained: TrainedModel) -> dict[str, Any]:
    try:
        return to_published(trained.model)
    except ValueError as error:
        raise UnusableError(f"--format transformers: {error}") from error


def published_config(trained: TrainedModel) -> dict[str, Any]:
    """Return the content of config.json for a GPT-2 or Llama; without `auto_map` if there is nothing to carry."""
    model = trained.config.model
    layout = LAYOUTS[model.kind]
    # Token types are also carried from segment to segment.
    has_memory = trained.config.memory["kind"] not in layout.plain or bool(model.token_types)
    content = layout.content(model)
    return {
        **content,
        "vocab_size": trained.tokenizer.vocab_size,
        "bos_token_id": trained.tokenizer.bos_id,
        "eos_token_id": trained.tokenizer.eos_id,
        "dtype": str(trained.dtype).removeprefix("torch."),
        **({"auto_map": _auto_map(AutoModelForCausalLM=_MEMORY_CLASSES[content["model_type"]])} if has_memory else {}),
    }


def native_config(trained: TrainedModel) -> dict[str, Any]:
    """Return the content of config.json for every other model: the sizes that transformers knows by name."""
    model = trained.config.model
    return {
        "architectures": ["MemoryForCausalLM"],
        "model_type": "dist_mem",
        "vocab_size": trained.tokenizer.vocab_size,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.d_model,
        "num_attention_heads": model.num_heads,
        "bos_token_id": trained.tokenizer.bos_id,
        "eos_token_id": next(iter(trained.tokenizer.end_ids), None),
        "tie_word_embeddings": False,  # ties are made by dist_mem, and not once more by transformers
        "dtype": str(trained.dtype).removeprefix("torch."),
        "auto_map": _auto_map(AutoConfig="MemoryConfig", AutoModelForCausalLM="MemoryForCausalLM"),
    }


def _auto_map(**classes: str) -> dict[str, str]:
    return {auto: f"{Path(MODELING).stem}.{name}" for auto, name in classes.items()}


def _write_gpt2_tokenizer(tokenizer: BytePairTokenizer, directory: Path) -> None:
    write_byte_pairs(tokenizer, directory)
    settings = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    settings["tokenizer_class"] = "GPT2Tokenizer"
    write_text(directory / CONFIG_NAME, json_text(settings, indent=1) + "\n")


def _keep_tokenizer_class(directory: Path) -> None:
    """Let AutoTokenizer open the class that the folder names: for a Qwen2 it takes Qwen2Tokenizer, with other ids.

    It does not where `auto_map` names a class, which it imports from a program with trust_remote_code=True only.
    """
    path = directory / CONFIG_NAME
    settings = json.loads(path.read_text(encoding="utf-8"))
    name = str(settings.get("tokenizer_class"))
    if not name.isidentifier():
        raise UnusableError(
            f"--format transformers: {CONFIG_NAME} of the tokenizer has tokenizer_class {name!r}, which is no class of "
            "transformers: leave --format out"
        )
    if name.removesuffix("Fast") != "Qwen2Tokenizer":
        settings["auto_map"] = {"AutoTokenizer": [None, f"{Path(TOKENIZATION).stem}.{name}"]}
        write_text(path, json_text(settings, indent=1) + "\n")
        write_text(directory / TOKENIZATION, _TOKENIZER_PROGRAM.format(name=name))


def write_tokenizer(tokenizer: Tokenizer, directory: Path, *, adds_bos: bool, purpose: str) -> None:
    """Write what AutoTokenizer reads.

    Args:
        adds_bos: BOS comes before every text; not used for a published model's tokenizer, which says so itself.
        purpose: what needs the tokenizer, for the message if a library is not installed.

    Raises:
        ValueError: the tokenizer has no fast form, or a library is not installed.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):  # as it came: whether it puts BOS before a text too
        write_folder(tokenizer, directory)
        return
    for library in ("tokenizers", "google.protobuf"):  # the latter reads SentencePiece's models
        require(library, purpose)
    from dist_mem.data.tokenizers.fast import bos_token, fast_tokenizer

    fast = fast_tokenizer(tokenizer, adds_bos=adds_bos)
    name = bos_token(tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name,
        "pad_token": name,  # padding is not read, so any token does; the model has no other without text
        "padding_side": "left",
        "split_special_tokens": True,  # in a text, the name of BOS is text
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    write_text(directory / "tokenizer.json", fast.to_str(pretty=True) + "\n")
    write_text(directory / CONFIG_NAME, json_text(settings, indent=1) + "\n")
