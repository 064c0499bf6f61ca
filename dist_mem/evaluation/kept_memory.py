"""The memory of one lane outside a run: what a memory file keeps of it, and which model may continue from it.

A model continues from a memory that it has read itself, or that the same model has read elsewhere: a checkpoint, its
copy, or its export in the same precision. The SHA-256 of the weights decides, not the name of a run, and the settings
on which a state depends must be equal. So a continuation equals that of reading the text again, on the same kind of
machine bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from dist_mem.config.check import flatten
from dist_mem.errors import UnusableError
from dist_mem.evaluation.memory_file import FORMAT_VERSION, OPEN_SEGMENT, MemoryFile, TextRead, digest_of
from dist_mem.evaluation.protocol import protocol_of
from dist_mem.evaluation.scoring import InitState
from dist_mem.evaluation.split_layout import NO_INPUTS
from dist_mem.evaluation.trained_model import TrainedModel, init_state
from dist_mem.memory import memory_class, memory_options
from dist_mem.memory.base import map_state, named_tensors
from dist_mem.memory.outside import is_file
from dist_mem.model import LMState

_OF_EVAL = ("seg_len", "mem_len", "clamp_len", "same_length", "blocks", "precision")  # fields of Protocol, keys of eval


def states_and_inputs(trained: TrainedModel, memory: MemoryFile | None) -> tuple[InitState, np.ndarray]:
    """Return the states in which documents begin and the inputs before them, as `score_split` takes both.

    Args:
        memory: of a text that every document continues; None: documents begin with empty memories and BOS.

    Raises:
        UnusableError: another model has read `memory`.
    """
    if memory is None:
        return partial(init_state, trained), NO_INPUTS
    state, inputs = fit(trained, memory)

    def begin(document_ids: Tensor) -> LMState:
        return map_state(lambda part: part.expand(len(document_ids), *part.shape[1:]), state)

    return begin, inputs.numpy()


def model_settings(trained: TrainedModel) -> dict[str, Any]:
    """Return the settings that a memory depends on besides the weights, by their keys of the configuration."""
    config, spec = trained.config, trained.model.memories()[0].spec
    protocol, types = protocol_of(config)._asdict(), trained.model.token_types
    settings = {
        **{f"eval.{name}": protocol[name] for name in _OF_EVAL},
        "model.num_heads": spec.num_heads,
        "model.norm": spec.norm,
        "model.token_types": types and [types.ids, types.markers],
        "train.seed": spec.seed,
        "data.cut": config.data.cut,
        **flatten(_make_portable(memory_options(config.memory)), "memory"),
    }
    return cast(dict[str, Any], json.loads(json.dumps(settings, default=str)))


def _make_portable(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a memory block that names memories from outside the package by the SHA-256 of their file."""
    portable = {name: _make_portable(child) if isinstance(child, Mapping) else child for name, child in block.items()}
    kind: str = block.get("kind", "")
    if is_file(kind):
        portable["kind"] = f"{memory_class(kind).__module__}:{kind.rpartition(':')[2]}"
    return portable


def content_of(trained: TrainedModel, state: LMState, inputs: Tensor, texts: Sequence[TextRead]) -> MemoryFile:
    """Return the content of a file of this memory.

    Args:
        state: one lane, after its last complete segment.
        inputs: (num_inputs,) int64, on the CPU: inputs of the open segment; BOS comes first at a text's start.
        texts: in the order in which they were read, as one document.
    """
    header = {
        "format_version": FORMAT_VERSION,
        "model": {
            "name": trained.config.name,
            "step": trained.checkpoint.manifest["step"],
            "weights_sha256": digest_of(trained.model.state_dict()),
        },
        "tokenizer_fingerprint": trained.tokenizer.fingerprint,
        "settings": model_settings(trained),
        "texts": [read._asdict() for read in texts],
    }
    return MemoryFile(Path("the memory"), header, {**named_tensors(state), OPEN_SEGMENT: inputs})


def fit(trained: TrainedModel, found: MemoryFile) -> tuple[LMState, Tensor]:
    """Return state and inputs of the memory in a file, as `content_of` takes them, on the device of the model.

    Raises:
        UnusableError: another model has read it, or this one with other settings.
    """
    _refuse_another_model(trained, found)
    state = _fit_state(trained, found)
    inputs = found.tensors[OPEN_SEGMENT]
    if not all(0 <= token < trained.tokenizer.vocab_size for token in inputs.tolist()):
        raise UnusableError(
            f"{found.path}: {OPEN_SEGMENT} has tokens unknown to this model: {_reading_command(trained, found.path)}"
        )
    return state, inputs


def _reading_command(trained: TrainedModel, path: Path) -> str:
    """Return the command that makes the file for this model."""
    return f"read the text again with this model: dist-mem read TEXT --run {trained.checkpoint.run_dir} -o {path}"


def _refuse_another_model(trained: TrainedModel, found: MemoryFile) -> None:
    """Raise UnusableError, with what differs and the fix, unless the file is a memory of this model."""
    path, again = found.path, _reading_command(trained, found.path)
    then, now = found.header["tokenizer_fingerprint"], trained.tokenizer.fingerprint
    if then != now:
        raise UnusableError(f"{path} was read with tokenizer {then[:12]}, but this model's is {now[:12]}: {again}")
    theirs, mine = found.header["settings"], model_settings(trained)
    other = [key for key in sorted(theirs.keys() | mine.keys()) if theirs.get(key) != mine.get(key)]
    reader, weights = found.header["model"], digest_of(trained.model.state_dict())
    if reader["weights_sha256"] != weights and "eval.precision" not in other:  # which changes the weights
        raise UnusableError(
            f"{path} was read by another model ({reader['name']} at step {reader['step']}, weights "
            f"{reader['weights_sha256'][:12]}), not by {trained.checkpoint.directory} (weights {weights[:12]}): give "
            f"that model, or {again}"
        )
    for key in other:
        was = (
            0 if (key, theirs.get(key)) == ("eval.clamp_len", None) else theirs.get(key)
        )  # null would mean: as trained
        fix = f"give {key}={_as_argument(was)}, or {again}" if key.startswith("eval.") else again
        raise UnusableError(
            f"{path} was read with {key} = {_as_argument(was)}, but here it is {_as_argument(mine.get(key))}: {fix}"
        )


def _as_argument(value: Any) -> str:
    """Return a value as on the command line."""
    return json.dumps(value).strip('"')


def _num_segments(trained: TrainedModel, found: MemoryFile) -> int:
    """Return how many whole segments a memory has read: BOS, if texts begin with it, and the texts but the open one.

    Raises:
        UnusableError: the open segment is not what remains of so many tokens.
    """
    num_inputs, seg_len = found.num_tokens + (not trained.config.data.blocks), trained.config.train.seg_len
    num_open = (num_inputs - 1) % seg_len + 1 if num_inputs else 0
    if len(found.tensors[OPEN_SEGMENT]) != num_open:
        raise UnusableError(
            f"{found.path}: {OPEN_SEGMENT} has {len(found.tensors[OPEN_SEGMENT])} inputs, but {num_open} after "
            f"{found.num_tokens:,} tokens: {_reading_command(trained, found.path)}"
        )
    return (num_inputs - num_open) // seg_len


def _fit_state(trained: TrainedModel, found: MemoryFile) -> LMState:
    """Return the tensors of a file as a state of the model. Raises UnusableError if they do not fit."""
    empty = init_state(trained)
    wanted = {name: (part.dtype, tuple(part.shape)) for name, part in named_tensors(empty).items()}
    has = {name: (part.dtype, tuple(part.shape)) for name, part in found.tensors.items() if name != OPEN_SEGMENT}
    for name in sorted(wanted.keys() | has.keys()):
        if wanted.get(name) != has.get(name):
            theirs, mine = (str(side.get(name, "missing")) for side in (has, wanted))
            raise UnusableError(
                f"{found.path}: {name} is {theirs}, but in this model {mine}: {_reading_command(trained, found.path)}"
            )
    names = iter(wanted)  # walks a state in the same order as map_state
    state: LMState = map_state(lambda part: found.tensors[next(names)].to(part.device), empty)
    for name, count in trained.model.counts(state, _num_segments(trained, found)).items():
        if ((count.value < count.least) | (count.value > count.most)).any():
            right = count.least if count.least == count.most else f"from {count.least} to {count.most}"
            raise UnusableError(
                f"{found.path}: {name} is {count.value.tolist()}, but {right} after {found.num_tokens:,} tokens: "
                f"{_reading_command(trained, found.path)}"
            )
    return state
