"""Load a trained model from a checkpoint or an export, for `dist-mem evaluate` and for notebooks.

    trained = load_model("runs/demo")
    lanes = read_lanes(trained, [3])  # the memory that lane 3 carried at the checkpoint

This module reads the fp32 weights of checkpoints of any ZeRO stage and number of ranks, and exports (export.py). It
needs no process group. An export has every tensor once, by our names or, for a published kind of model, by Hugging
Face's. `dist_mem.load` (dist_mem/api/model.py) joins it with the functions that score and generate.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import load_model as load_into
from torch import Tensor, nn

from dist_mem.block import ModelSpec, model_spec
from dist_mem.checkpoint.engine_files import EngineReader
from dist_mem.checkpoint.lane_states import read_lanes as read_saved_lanes
from dist_mem.checkpoint.manifest import first_verified, list_steps, read_manifest, run_of, step_dir, verify
from dist_mem.checkpoint.schemas import WEIGHTS
from dist_mem.config import Config, ConfigError, DataConfig, load_block, load_config
from dist_mem.config.check import Problem, stop_on
from dist_mem.config.environment_values import checksum, from_environment, hide
from dist_mem.config.keys import EVALUATION
from dist_mem.config.settings import keys_set_by, may_set
from dist_mem.config.values import as_override
from dist_mem.data.curriculum import name_training_data, with_ends
from dist_mem.data.directory import open_tokenizer
from dist_mem.data.mixture import MixturePart
from dist_mem.data.remote.fetch import is_remote, show
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.registry import JSON_NAME, TOKENIZER_DIR, load_tokenizer
from dist_mem.errors import CheckpointError, run_error
from dist_mem.evaluation.protocol import for_evaluation, lengths_named
from dist_mem.hf.folder import CONFIG
from dist_mem.hf.names import LAYOUTS, check_types, take_published
from dist_mem.memory import memory_options
from dist_mem.memory.base import map_state
from dist_mem.memory.outside import kept_kinds
from dist_mem.model import LMState, MemoryLM
from dist_mem.nn.half_products import widen_half_products
from dist_mem.nn.layers import DTYPES
from dist_mem.runtime.files import by_name
from dist_mem.runtime.gpu import present_device
from dist_mem.runtime.outside_code import source_of
from dist_mem.runtime.process_state import drawing

_GIVE = "give a run directory or one checkpoint in it"


class Checkpoint(NamedTuple):
    """A verified checkpoint, or a verified export."""

    directory: Path
    run_dir: Path  # for an export, its own directory
    manifest: dict[str, Any]
    remarks: list[str]  # why newer checkpoints were not used

    @property
    def is_export(self) -> bool:
        """Whether this is an export, which has weights and a tokenizer but no training state."""
        return WEIGHTS in self.manifest["files"]


class Candidates(NamedTuple):
    """Directories of which the first that verifies is used."""

    directories: list[Path]  # one at least
    is_named: bool  # the user gives this one


class TrainedModel(NamedTuple):
    """A model in evaluation mode, with its tokenizer, configuration and checkpoint."""

    model: MemoryLM
    tokenizer: Tokenizer
    config: Config  # with the lengths of `eval`
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype  # of the weights


def find_checkpoint(path: Path, step: int | None = None) -> Checkpoint:
    """Return the checkpoint or export at `path`, or the checkpoint of `step` in the run directory `path`.

    Args:
        step: None: the newest that verifies.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    return first_checkpoint(lambda: list_candidates(path, step), verify)


def list_candidates(path: Path, step: int | None) -> Candidates:
    """Return what `find_checkpoint` looks at. Raises CheckpointError: there is nothing."""
    if not path.exists():
        raise CheckpointError(f"{path.absolute()} does not exist: no checkpoint; {_GIVE}, or an export")
    if step is not None and not step_dir(path, step).exists():
        steps = ", ".join(str(other) for other in list_steps(path))
        has = f"steps {steps}" if steps else "no checkpoints"
        raise CheckpointError(f"{step_dir(path, step)}: there is no such checkpoint; {path} has {has}")
    if step is not None or (path / "manifest.json").exists():
        return Candidates([path if step is None else step_dir(path, step)], is_named=True)
    existing = list_steps(path)
    if not existing:
        is_export = "an export (a folder with a manifest.json)"
        raise CheckpointError(f"{path / 'checkpoints'}: no checkpoint; {_GIVE}, or {is_export}")
    return Candidates([step_dir(path, each) for each in reversed(existing)], is_named=False)


def first_checkpoint(find: Callable[[], Candidates], check: Callable[[Path], dict[str, Any]]) -> Checkpoint:
    """Return the first candidate that verifies.

    Args:
        find: as for `first_verified`.
        check: verifies a directory and returns its manifest.

    Raises:
        CheckpointError: none verifies.
    """
    (directory, *_), is_named = find()
    if is_named:
        manifest, reasons = check(directory), list[str]()
    else:
        found = first_verified(lambda: find().directories, check)
        assert found is not None, "there are candidates"
        directory, manifest, reasons = found
    run_dir = directory if WEIGHTS in manifest["files"] else run_of(directory)
    return Checkpoint(directory, run_dir, manifest, [f"passed over: {reason}" for reason in reasons])


def read_settings(directory: Path, overrides: Sequence[str], *, reads_data: bool = False) -> Config:
    """Return the configuration of a checkpoint or an export with the overrides of an evaluation.

    Args:
        reads_data: the data will be opened. A folder may come from an untrusted source, so data at a server or from a
            command, and any data of an export, are opened only if `overrides` name them.

    Raises:
        ConfigError: as `load_config`; also for an override of a key that the weights depend on, for data that only
            the folder names, and for a memory that is a program in the folder, without eval.allow_code.
    """
    for override in overrides:
        key = override.split("=")[0]
        if not may_set(EVALUATION, key):
            allowed = ", ".join(keys_set_by(EVALUATION))
            raise ConfigError([Problem(key, f"is fixed by the checkpoint; an evaluation may set {allowed}")])
    # Evaluation during training allows no other eval.seg_len; the others depend on it.
    no_training = ["eval.every=null", "checkpoint.keep_best=null", "data.until_accuracy=null"]
    path = directory / "config.yaml"
    given = load_config([str(path), *no_training, *overrides], trains=False)
    is_foreign = is_remote(given.data.path) or (directory / WEIGHTS).exists()
    if reads_data and is_foreign and not any(override.startswith("data.path=") for override in overrides):
        text = f"give data.path=FOLDER or its URL: servers and commands that only {path} names are not used"
        raise ConfigError([Problem("data.path", text)])
    kept = kept_kinds(given.memory, directory)  # the program as trained, even if the original has changed
    if kept and not given.eval.allow_code:
        source = source_of(as_override(kept[0].partition("=")[2]))
        text = f"{source} is a program, which loading {directory} would run: read it, then add eval.allow_code=true"
        raise ConfigError([Problem("memory", text)])
    config = load_config([str(path), *no_training, *kept, *overrides], memory_options=memory_options, trains=False)
    then = read_manifest(directory).get("environment", {})
    stop_on(
        Problem(key, f"is {found.written}, which has another value than in training; set it back")
        for key, found in from_environment(config.document).items()
        if key.startswith(("model.", "memory.")) and then.get(key) not in (None, checksum(key, found.value))
    )
    return config


def name_data_of(checkpoint: Checkpoint) -> str | None:
    """Return the names of the data that a checkpoint was trained on; None of an export, which keeps no places.

    What a path takes from the environment is not shown.
    """
    if checkpoint.is_export:
        return None
    manifest = checkpoint.manifest
    data = load_block(DataConfig, "data", [], saved=checkpoint.directory / "config.yaml")
    parts = [MixturePart(**part) for part in manifest.get("mixture", ())]
    hidden = replace(
        data,
        path=hide(data.path),
        mixture=[replace(source, path=hide(source.path)) for source in data.mixture],
        curriculum=[replace(stage, path=hide(stage.path)) for stage in data.curriculum],
    )
    return name_training_data(with_ends(hidden, manifest.get("stage_ends", ())), manifest["step"], parts)


def tokens_read_by(checkpoint: Checkpoint) -> int | None:
    """Return how many tokens the training read, without skipped updates; None of an export or an older version."""
    found = checkpoint.manifest.get("meter", {}).get("tokens_read")
    return None if found is None else int(found)


def tokenizer_of_checkpoint(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer in a checkpoint or an export."""
    in_folder = f"{TOKENIZER_DIR}/{JSON_NAME}" in checkpoint.manifest["files"]  # not in an export for dist_mem
    return load_tokenizer(checkpoint.directory / TOKENIZER_DIR if in_folder else checkpoint.directory)


def tokenizer_of_data(checkpoint: Checkpoint, data: DataConfig) -> Tokenizer:
    """Return the tokenizer of `data.path`; if that is remote, `refresh` must be called first.

    Raises:
        ValueError: data.path has no tokenizer, or one that differs from the model's.
    """
    tokenizer = open_tokenizer(data)
    if tokenizer.fingerprint != checkpoint.manifest["tokenizer_fingerprint"]:
        raise ValueError(
            f"data.path = {show(data.path)}: its tokenizer is {tokenizer.fingerprint[:12]}, but the model was "
            f"trained with {checkpoint.manifest['tokenizer_fingerprint'][:12]}; point data.path at data built with "
            "that tokenizer"
        )
    return tokenizer


def _load_weights(model: MemoryLM, checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint or an export. Raises CheckpointError if names or shapes differ."""
    directory = checkpoint.directory
    if checkpoint.is_export:
        is_published = model.kind in LAYOUTS  # in an export for transformers, which has a config.json
        load_exported(model, directory, is_published=is_published and CONFIG in checkpoint.manifest["files"])
        return
    weights = EngineReader(directory).weights()
    both = (model.state_dict(), weights)
    wanted, found = ({name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in both)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            has, wants = (shapes.get(name, "missing") for shapes in (found, wanted))
            raise CheckpointError(f"{directory}: {name} is {has}, but in the model of its config.yaml {wants}")
    model.load_state_dict(weights)


def open_model(
    checkpoint: Checkpoint,
    config: Config,
    tokenizer: Tokenizer,
    device: torch.device | str,
    *,
    check: Callable[[ModelSpec], object] = lambda spec: None,
) -> TrainedModel:
    """Load the model of a checkpoint or an export, in `eval.precision` and with the lengths of `eval`.

    Args:
        check: of the model with these lengths, before anything is allocated.

    Raises:
        ValueError: the memory does not allow these lengths, or what `check` raises.
    """
    trained_memory, config = config.memory, for_evaluation(config)
    device, dtype = torch.device(device), DTYPES[config.eval.precision]
    widen_half_products(device, dtype)
    spec = model_spec(config, tokenizer.vocab_size)._replace(trained_memory=trained_memory)
    with lengths_named(config.eval):
        check(spec)
        with drawing():  # weights, which those of the file replace
            model = MemoryLM(spec)
    _load_weights(model, checkpoint)
    model.to(device, dtype).eval()
    return TrainedModel(model, tokenizer, config, checkpoint, device, dtype)


def load_model(
    path: Path | str, *overrides: str, step: int | None = None, device: torch.device | str = "cpu"
) -> TrainedModel:
    """Load the model of a run or an export. No data are needed, because the checkpoint contains the tokenizer.

    Args:
        path: a run directory, one checkpoint in it, or an export.
        overrides: `key=value`, for keys that an evaluation may set: "eval.mem_len=384", "eval.precision=bf16".
        step: step of the checkpoint; None: the newest that verifies.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        TypeError: `path` is not a path, or an override is not a string.
        ValueError: an override is invalid, or there is no such device; the message gives the reason.
    """
    if not isinstance(path, str | Path):
        raise TypeError(f"path is {path!r}, but must be the path of a run, a checkpoint or an export")
    for override in overrides:
        if not isinstance(override, str):
            raise TypeError(f"an override is {override!r}, but must be a str 'KEY=VALUE'; a step is given as step=400")
    device = present_device(device, "device")
    checkpoint = find_checkpoint(Path(path), step)
    for remark in checkpoint.remarks:
        logging.getLogger(__name__).warning(remark)
    config = read_settings(checkpoint.directory, overrides)
    return open_model(checkpoint, config, tokenizer_of_checkpoint(checkpoint), device)


def init_state(trained: TrainedModel, document_ids: Sequence[int] | Tensor = (0,)) -> LMState:
    """Return empty memories, one per document; the ids matter only to memories that draw random numbers."""
    numbers = _row_of_ints("document_ids", document_ids)
    return trained.model.init_state(numbers.to(trained.device), trained.device, trained.dtype)


def _row_of_ints(name: str, value: Any) -> Tensor:
    """Return the argument `name` as a tensor (num,) int64. Raises TypeError if it is not a row of ints."""
    with suppress(TypeError, ValueError):  # raised if torch cannot convert the value to a tensor
        row = torch.as_tensor(value)
        if row.dim() == 1 and not (row.is_floating_point() or row.dtype == torch.bool):
            return row.to(torch.int64)
    raise TypeError(f"{name} is {value!r}, but must be a row of ints, as [0]")


def read_lanes(trained: TrainedModel, lane_ids: Sequence[int]) -> LMState:
    """Return the memories of these training lanes at the checkpoint, in the model's precision.

    Raises:
        CheckpointError: there is no such lane, eval.seg_len changes the shape of a memory, or this is an export.
    """
    wanted = _row_of_ints("lane_ids", lane_ids)
    directory, _, manifest, _ = trained.checkpoint
    if trained.checkpoint.is_export:
        raise CheckpointError(f"{directory}: an export has weights but no memories of lanes; load the run itself")
    empty = trained.model.init_state(wanted, "cpu", DTYPES[trained.config.train.precision])
    saved = read_saved_lanes(directory, manifest, wanted, [empty]).states[0]
    empty = trained.model.init_state(wanted, trained.device, trained.dtype)
    return map_state(lambda part, like: part.to(like), saved, empty)  # parts that a memory keeps in fp32 stay so


def distinct_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the model's state_dict, each under its first name only."""
    names = model.state_dict().keys()
    tensors = chain(model.named_parameters(), model.named_buffers())
    return {name: tensor.detach().contiguous() for name, tensor in tensors if name in names}


def load_exported(model: MemoryLM, directory: Path, *, is_published: bool) -> None:
    """Load the weights of an export.

    Args:
        is_published: they have Hugging Face's names.

    Raises:
        RunError: the file cannot be read, is damaged, or its names or shapes differ from the model's.
    """
    path = directory / WEIGHTS
    try:
        with by_name(path) as opened:
            if not is_published:
                with safe_open(opened, "pt") as file:
                    check_types({name: file.get_tensor(name).dtype for name in file.keys()}, str(path))  # noqa: SIM118
                load_into(model, opened)
            elif left := take_published(model, load_file(opened), str(path)):
                raise ValueError(f"it has no {left[0]}")
    except OSError as error:
        raise run_error(error, f"{path} cannot be read: {error}") from error
    except (RuntimeError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} does not fit its config.yaml: {error}") from error
