"""Argument checks for the functions behind the Python API.

A wrong type raises TypeError and a wrong value ValueError, before any computation. The message contains the argument,
its value and the accepted values.

Callers of other libraries pass options that this project has no use for. A value that asks for nothing, as None, is
accepted, because results with and without the option are equal. Any other value is refused with the reason, because
ignoring it would silently give other results.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_mem.evaluation.trained_model import TrainedModel
from dist_mem.runtime.gpu import present_device
from dist_mem.runtime.terminal import count_noun

ROWS = "a list with one row of ids per lane, as [trained.tokenizer.encode('It was')]"


def wrong_type(name: str, value: Any, wanted: str) -> TypeError:
    """Return the TypeError for an argument of a wrong type."""
    return TypeError(f"{name} is {reprlib.repr(value)}, but must be {wanted}")


def check_trained(trained: Any) -> None:
    """Raise TypeError unless `trained` is a TrainedModel."""
    if not isinstance(trained, TrainedModel):
        raise wrong_type("trained", trained, "a model that load_model returned")


def check_int(name: str, value: Any, *, least: int) -> None:
    """Raise TypeError or ValueError unless `value` is an int of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise wrong_type(name, value, "an int")
    if value < least:
        raise ValueError(f"{name} is {value}, but must be at least {least}")


def id_row(name: str, row: Any, vocab_size: int) -> Tensor:
    """Return a row of token ids as a tensor (num_tokens,) int64 on the CPU.

    Args:
        row: a sequence of ints, or an array or tensor of any integer type.

    Raises:
        TypeError: the elements are not integers.
        ValueError: the row has more than one dimension, or an id outside the vocabulary.
    """
    ids = row.detach().cpu().numpy() if isinstance(row, Tensor) else np.asarray(row)
    if ids.ndim == 0:
        raise wrong_type(name, row, "a row of ids")
    if ids.ndim > 1:
        raise ValueError(f"{name} has {ids.ndim} dimensions, but must be a row of ids")
    if len(ids) and not np.issubdtype(ids.dtype, np.integer):
        raise wrong_type(name, row, "a row of ids")
    check_ids(name, ids.tolist(), vocab_size)
    return torch.from_numpy(ids.astype(np.int64))


def check_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    """Raise ValueError unless all ids are in the vocabulary."""
    for wrong in (token for token in ids if not 0 <= token < vocab_size):
        raise ValueError(f"{name} has the id {wrong}, but ids of this model range from 0 to {vocab_size - 1}")


def id_rows(name: str, rows: Any, *, num_lanes: int, vocab_size: int) -> list[Tensor]:
    """Return one row of token ids per lane. Raises as `id_row`, and ValueError for a wrong number of rows."""
    if isinstance(rows, str | bytes) or not hasattr(rows, "__len__"):
        raise wrong_type(name, rows, ROWS)
    found = [id_row(f"{name}[{lane}]", row, vocab_size) for lane, row in enumerate(rows)]
    if len(found) != num_lanes:
        lanes = count_noun(len(found), "lane")
        raise ValueError(f"{name} has rows for {lanes}, but the reading has {num_lanes}; give {ROWS}")
    return found


class NeutralValues(NamedTuple):
    """The values of an option that ask for nothing."""

    values: tuple[Any, ...] | None  # None: all
    reason: str = ""  # why others are refused, or what to do instead


_ALIKE = NeutralValues(None)  # about downloads and reading: the same is loaded from a folder
_ONE_DEVICE = "the whole model is on one device (device_map)"
_KERNELS = "it has no kernels from a hub"
_FULL_WEIGHTS = NeutralValues((False,), "weights are float32 or bfloat16 (dtype), as exported")
_WHOLE_FILES = NeutralValues((False,), "the folder must be as exported: its files are compared with their SHA-256")
_ONE_TEXT = NeutralValues((1,), "one text is written for each prompt")
_NO_BEAMS = "there is no beam search here; omit it, or load the export with transformers"
_FEWER_CHOICES = "tokens are drawn by temperature, top_k and top_p only"
_UNCHANGED = "log-probabilities are those of the model, without penalties"
_TEXT_ONLY = NeutralValues((False,), "only texts are returned; use the export with transformers")
_TRAINING = "train with dist_mem"

LOADING: Mapping[str, NeutralValues] = {  # of `from_pretrained`
    **dict.fromkeys(("adapter_kwargs", "cache_dir", "code_revision", "force_download", "local_files_only"), _ALIKE),
    **dict.fromkeys(("proxies", "resume_download", "token", "trust_remote_code", "use_auth_token"), _ALIKE),
    **dict.fromkeys(("_commit_hash", "_fast_init", "_from_auto", "_from_pipeline", "mirror", "tqdm_class"), _ALIKE),
    **dict.fromkeys(("disable_mmap", "low_cpu_mem_usage", "weights_only"), _ALIKE),
    "revision": NeutralValues(("main",), "a folder has one revision; download the one you want"),
    "subfolder": NeutralValues(("",), "give the folder itself"),
    "use_safetensors": NeutralValues((True,), "weights are safetensors, and nothing loads a pickle"),
    **dict.fromkeys(("from_tf", "from_flax"), NeutralValues((False,), "weights are safetensors")),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "quantization_config"), _FULL_WEIGHTS),
    **dict.fromkeys(("ignore_mismatched_sizes",), _WHOLE_FILES),
    **dict.fromkeys(("gguf_file", "key_mapping", "state_dict", "variant"), NeutralValues((), _WHOLE_FILES.reason)),
    **dict.fromkeys(("max_memory", "offload_folder", "tp_plan", "tp_size"), NeutralValues((), _ONE_DEVICE)),
    **dict.fromkeys(("device_mesh", "distributed_config"), NeutralValues((), _ONE_DEVICE)),
    **dict.fromkeys(("offload_buffers", "offload_state_dict"), NeutralValues((False,), _ONE_DEVICE)),
    **dict.fromkeys(("allow_all_kernels", "use_kernels"), NeutralValues((False,), _KERNELS)),
    **dict.fromkeys(("fusion_config", "kernel_config"), NeutralValues(({},), _KERNELS)),
    "adapter_name": NeutralValues(("default",), "it has no adapters"),
    "output_loading_info": NeutralValues((False,), "every weight is loaded, or none"),
}

# Of a configuration that a caller has changed; other attributes are the weights'.
CONFIGURED: Mapping[str, NeutralValues] = {
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "return_dict"), _ALIKE),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), _ALIKE),  # forward looks at them
    **dict.fromkeys(("architectures", "auto_map", "dtype", "transformers_version", "_name_or_path"), _ALIKE),
    "attn_implementation": NeutralValues(
        ("eager", "sdpa"), "model.attention in the folder's config.yaml chooses it; all compute the same"
    ),
}

READING: Mapping[str, NeutralValues] = {  # of a model's forward
    **dict.fromkeys(("tokenizer", "assistant_tokenizer"), _ALIKE),  # of generate, which hands them down
    "output_attentions": NeutralValues(
        (False,), "use dist_mem.Model(model.trained).inspect, which shows where it looked"
    ),
    "output_hidden_states": NeutralValues(
        (False,), "use model.trained.model.features, which returns those of the softmax"
    ),
    "inputs_embeds": NeutralValues((), "a text is read from its token ids, which are also kept in the cache"),
    "position_ids": NeutralValues((), "positions follow from the tokens that are read; mark padding by attention_mask"),
    "token_type_ids": NeutralValues((), "types follow from the text (model.token_types)"),
    "num_items_in_batch": NeutralValues((), _TRAINING),
}

WRITING: Mapping[str, NeutralValues] = {  # of a generation
    **dict.fromkeys(("num_beams", "num_beam_groups"), NeutralValues((1,), _NO_BEAMS)),
    "early_stopping": NeutralValues((False,), _NO_BEAMS),
    "length_penalty": NeutralValues((1.0,), _NO_BEAMS),
    "diversity_penalty": NeutralValues((0.0,), _NO_BEAMS),
    **dict.fromkeys(("best_of", "n", "num_return_sequences"), _ONE_TEXT),
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty"), NeutralValues((1.0,), _UNCHANGED)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "penalty_alpha"), NeutralValues((0.0,), _UNCHANGED)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), NeutralValues((0,), _UNCHANGED)),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens"), NeutralValues(([],), _UNCHANGED)),
    **dict.fromkeys(("logit_bias", "sequence_bias"), NeutralValues(({},), _UNCHANGED)),
    "guidance_scale": NeutralValues((1.0,), _UNCHANGED),
    "typical_p": NeutralValues((1.0,), _FEWER_CHOICES),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), NeutralValues((0.0,), _FEWER_CHOICES)),
    "top_k": NeutralValues((0, -1)),  # of transformers and vLLM; other values are read
    **dict.fromkeys(("min_length", "min_new_tokens", "min_tokens"), NeutralValues((0,), "a text may end at once")),
    **dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), _TEXT_ONLY),
    **dict.fromkeys(("output_attentions", "output_hidden_states"), _TEXT_ONLY),
    # All change no text.
    **dict.fromkeys(("remove_invalid_values", "renormalize_logits", "use_cache"), NeutralValues(None)),
}


_ANY_DEVICE = ("auto", "balanced", "balanced_low_0", "sequential")  # device_map: one device is enough for all


def one_device(device_map: Any) -> torch.device:
    """Return the device of a `device_map` for a whole model; None: the CPU.

    Raises:
        ValueError: it is of several devices, or there is no such device.
    """
    place = device_map[""] if isinstance(device_map, Mapping) and device_map.keys() == {""} else device_map
    if isinstance(place, str) and place in _ANY_DEVICE:
        place = "cuda" if torch.cuda.is_available() else "cpu"
    return present_device("cpu" if place is None else place, "device_map")


def differing_entries(found: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are not as written."""
    return {name: value for name, value in found.items() if value != written.get(name)}


def is_neutral(name: str, value: Any, table: Mapping[str, NeutralValues]) -> bool:
    """Return whether an option has one of its neutral values; an option without an entry has none but None."""
    if value is None:
        return True
    known = table.get(name)
    if known is None:
        return False
    return known.values is None or any(isinstance(value, type(each) | int) and value == each for each in known.values)


def refuse_what_is_asked(
    given: Mapping[str, Any], table: Mapping[str, NeutralValues], what: str, *, otherwise: str = "omit it"
) -> None:
    """Raise ValueError, with the reason, for the first option that asks for something.

    Args:
        what: the beginning of the message.
        otherwise: the reason where the table has no entry.
    """
    for name, value in given.items():
        if not is_neutral(name, value, table):
            known = table.get(name)
            shown = type(value).__name__ if isinstance(value, torch.Tensor) else reprlib.repr(value)
            raise ValueError(f"{what} takes no {name} ({shown}): {known.reason if known else otherwise}")
