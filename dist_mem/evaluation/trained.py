"""A trained model out of a checkpoint or an export: for `dist-mem evaluate`, and for a notebook.

    import dist_mem

    trained = dist_mem.load_model("runs/demo")
    scores = dist_mem.score(trained, Path("book.txt").read_text(encoding="utf-8"))
    scores.nll  # of every token of the book, read with the memory of all that stands before it

It reads checkpoints of any ZeRO stage and number of ranks through their fp32 weights, and what export.py has made of
them, and needs no process group. The package offers `load_model`, `init_state`, `score` and `read_lanes` as its own
names (docs/python.md).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_model as load_into
from torch import Tensor

from dist_mem.checkpoint.engine_files import EngineReader
from dist_mem.checkpoint.lanes import read_lanes as read_saved_lanes
from dist_mem.checkpoint.manifest import (
    LAST_WITH_PICKLES,
    CheckpointError,
    newest_verified,
    read_manifest,
    run_of,
    step_dir,
    verify,
)
from dist_mem.config import Config, ConfigError, load_config
from dist_mem.config.check import Problem
from dist_mem.config.sources import plain_block
from dist_mem.data.directory import open_tokenizer, refresh
from dist_mem.data.documents import Document
from dist_mem.data.remote import show
from dist_mem.data.segments import collate, document_segments
from dist_mem.data.tokenizer import load_tokenizer
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.evaluation.protocol import apply_protocol, in_terms_of_eval
from dist_mem.layers import DTYPES
from dist_mem.memory import memory_options
from dist_mem.memory.base import map_state
from dist_mem.model import LMState, MemoryLM
from dist_mem.outside_memory import kept_kinds

WEIGHTS = "model.safetensors"  # of an export
OVERRIDABLE = ("eval.", "tracking.", "data.path", "data.cache", "data.stage", "train.micro_lanes", "train.threads")

log = logging.getLogger(__name__)


class Checkpoint(NamedTuple):
    """A checkpoint, or an export of one, whose files are what was written."""

    directory: Path
    run_dir: Path  # of an export: itself
    manifest: dict[str, Any]
    remarks: list[str]  # what a user should know of it: why newer ones were not taken, what loading it can do

    @property
    def is_export(self) -> bool:
        """Whether it holds weights only, and its tokenizer."""
        return WEIGHTS in self.manifest["files"]


class TrainedModel(NamedTuple):
    """A model in evaluation mode, and what belongs to it."""

    model: MemoryLM
    tokenizer: Tokenizer
    config: Config
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype  # of the weights


class Scores(NamedTuple):
    """A text, scored."""

    tokens: np.ndarray  # (num_tokens,) ids; tokenizer.decode([id]) is a token's text
    nll: Tensor  # (num_tokens,) float32, nats; nan for the first token of a block (data.blocks), which has none
    state: LMState  # the memory after the last complete segment


def find_checkpoint(path: Path, step: int | None = None) -> Checkpoint:
    """The checkpoint or export at `path`, or in the run directory `path` the checkpoint of `step`.

    Args:
        step: None: the newest that verifies.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if step is not None or (path / "manifest.json").exists():
        directory = path if step is None else step_dir(path, step)
        return _described(directory, verify(directory), [])
    newest, passed_over = newest_verified(path)
    if newest is None:
        raise CheckpointError(f"{path / 'checkpoints'}: no checkpoint; give a run directory or one checkpoint in it")
    return _described(newest, read_manifest(newest), [f"passed over: {reason}" for reason in passed_over])


def _described(directory: Path, manifest: dict[str, Any], remarks: list[str]) -> Checkpoint:
    if manifest["format_version"] <= LAST_WITH_PICKLES:
        remarks.append(
            f"{directory}: its weights are DeepSpeed's pickles (format {manifest['format_version']}), and loading a "
            "pickle can run any code; go on only if you trust where it comes from"
        )
    run_dir = directory if WEIGHTS in manifest["files"] else run_of(directory)
    return Checkpoint(directory, run_dir, manifest, remarks)


def read_settings(directory: Path, overrides: Sequence[str]) -> Config:
    """The configuration of a checkpoint with what may be changed for an evaluation.

    Raises:
        ConfigError: as `load_config`, or an override of a key that the weights depend on.
    """
    for override in overrides:
        key = override.split("=")[0]
        if not key.startswith(OVERRIDABLE):
            allowed = ", ".join(f"{name}*" if name.endswith(".") else name for name in OVERRIDABLE)
            raise ConfigError([Problem(key, f"is fixed by the checkpoint; an evaluation may set {allowed}")])
    # The run's: evaluation amid training, which allows no other eval.seg_len, and what is kept by it.
    own = ["eval.every=null", "checkpoint.keep_best=null"]
    path = directory / "config.yaml"
    kept = kept_kinds(plain_block(load_config([str(path)]).memory), directory)  # as trained, whatever the file says now
    return load_config([str(path), *own, *kept, *overrides], memory_options=memory_options)


def tokenizer_of_data(checkpoint: Checkpoint, config: Config) -> Tokenizer:
    """The tokenizer of `data.path`; where that is remote, after `refresh`.

    Raises:
        ValueError: data.path has no tokenizer, or another one than the model was trained with.
    """
    tokenizer = open_tokenizer(config.data)
    if tokenizer.fingerprint != checkpoint.manifest["tokenizer_fingerprint"]:
        raise ValueError(
            f"data.path = {show(config.data.path)}: its tokenizer is {tokenizer.fingerprint[:12]}, but the model was "
            f"trained with {checkpoint.manifest['tokenizer_fingerprint'][:12]}; point data.path at data made with that "
            "one"
        )
    return tokenizer


def _load_weights(model: MemoryLM, checkpoint: Checkpoint) -> None:
    directory = checkpoint.directory
    if checkpoint.is_export:
        load_into(model, directory / WEIGHTS)
    elif checkpoint.manifest["format_version"] > LAST_WITH_PICKLES:
        model.load_state_dict(EngineReader(directory).weights())
    else:
        from dist_mem.checkpoint.legacy import consolidated_state_dict  # takes DeepSpeed, which nothing else here needs

        model.load_state_dict(consolidated_state_dict(directory))


def open_model(
    checkpoint: Checkpoint, config: Config, tokenizer: Tokenizer, device: torch.device | str
) -> TrainedModel:
    """The model of a checkpoint or an export, in `eval.precision` and with the lengths of `eval`.

    Raises:
        ValueError: the memory cannot have these lengths.
    """
    apply_protocol(config)
    device, dtype = torch.device(device), DTYPES[config.eval.precision]
    try:
        model = MemoryLM(config, tokenizer.vocab_size)
    except ValueError as error:
        raise ValueError(in_terms_of_eval(str(error), config)) from error
    _load_weights(model, checkpoint)
    model.to(device, dtype).eval()
    return TrainedModel(model, tokenizer, config, checkpoint, device, dtype)


def load_model(
    path: Path | str, *overrides: str, step: int | None = None, device: torch.device | str = "cpu"
) -> TrainedModel:
    """The model of a run, or of an export.

    Args:
        path: a run directory, one checkpoint in it, or an export.
        overrides: `key=value`, of the keys in OVERRIDABLE: "data.path=elsewhere", "eval.precision=bf16".
        step: of the checkpoint; None: the newest that verifies.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        RemoteError: data.path is a URL, and its tokenizer cannot be had.
        ValueError: an override or the data cannot be used; the message says which and why.
    """
    checkpoint = find_checkpoint(Path(path), step)
    for remark in checkpoint.remarks:
        log.warning(remark)
    config = read_settings(checkpoint.directory, overrides)
    if checkpoint.is_export:
        return open_model(checkpoint, config, load_tokenizer(checkpoint.directory), device)
    refresh(config.data, [])
    return open_model(checkpoint, config, tokenizer_of_data(checkpoint, config), device)


def init_state(trained: TrainedModel, document_ids: Sequence[int] | Tensor = (0,)) -> LMState:
    """Empty memories, one for each document; only memories that draw random numbers care which number it has."""
    return trained.model.init_state(torch.as_tensor(document_ids, device=trained.device), trained.device, trained.dtype)


@torch.no_grad()
def score(trained: TrainedModel, text: str, *, state: LMState | None = None) -> Scores:
    """Negative log-likelihood of every token of a text, read segment after segment as a document of its own.

    Args:
        state: the memory, of one lane, to begin with; None: an empty one, as at the beginning of every document.
    """
    state = init_state(trained) if state is None else state
    tokens = trained.tokenizer.encode(text)
    seg_len, blocks = trained.config.train.seg_len, trained.config.data.blocks
    document = Document(0, tokens, scored=None, recall=None)
    parts = [torch.zeros(0)]
    segments = document_segments(document, start=0, seg_len=seg_len, bos_id=trained.tokenizer.bos_id, blocks=blocks)
    for segment, _ in segments:
        batch = collate([segment], seg_len=seg_len, with_recall=False).to(trained.device)
        output = trained.model(batch.tokens, batch.targets, batch.valid_len, state=state)
        state = output.state
        nll = output.nll[0, : len(segment.targets)].cpu()
        parts.append(torch.cat([torch.full((1,), torch.nan), nll[:-1]]) if blocks else nll)
    return Scores(tokens, torch.cat(parts), state)


def read_lanes(trained: TrainedModel, lane_ids: Sequence[int]) -> LMState:
    """The memories that these lanes of the training carried at the checkpoint, in the model's precision.

    Raises:
        CheckpointError: no such lane, eval.seg_len has changed what a memory holds, or it is an export.
    """
    directory, _, manifest, _ = trained.checkpoint
    if trained.checkpoint.is_export:
        raise CheckpointError(f"{directory}: an export holds weights and no memories of lanes; load the run itself")
    wanted = torch.tensor(lane_ids)
    saved_dtype = DTYPES[trained.config.train.precision]
    empty = trained.model.init_state(wanted, "cpu", saved_dtype)
    saved = read_saved_lanes(directory, manifest, wanted, [empty]).states[0]
    return map_state(lambda part: part.to(trained.device, trained.dtype if part.is_floating_point() else None), saved)
