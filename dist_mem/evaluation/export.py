"""Export a trained model as a self-contained directory.

    dist-mem export runs/demo --out models/demo
    dist-mem export runs/demo --out models/demo --checkpoint 400 --precision bf16
    dist-mem export runs/demo --out models/demo --mlflow --register demo --alias champion
    dist-mem export runs/llama_lora --out models/adapter --format peft      # what LoRA has learned, without the model
    dist-mem export configs/papers/gpt2.yaml --out models/gpt2_zero_shot    # its initial model

    DIR/
        model.safetensors   the weights; weights shared by layers are stored once
        config.yaml         the training configuration without paths and addresses of the training machine
        tokenizer.json ...  the tokenizer
        memory/NAME.py      memories from outside the package, if the model has any
        README.md           description, loading instructions, metrics, limits (card.py)
        manifest.json       written last: size and SHA-256 of every file, as in a checkpoint

`dist-mem evaluate` and `dist_mem.load` accept it in place of a run. It can be made from a checkpoint of any ZeRO
stage, number of ranks and format. It contains only data, except a memory from outside the package, which is a program.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from dist_mem.block import model_spec
from dist_mem.checkpoint.manifest import describe_file, files_in, write_manifest
from dist_mem.checkpoint.rank_file import safetensors_parts
from dist_mem.config import Config, as_tree, change_config, deepspeed_keys, load_config, save_config, to_yaml
from dist_mem.config.blocks import value_at
from dist_mem.config.check import flatten
from dist_mem.data.directory import open_tokenizer, refresh
from dist_mem.data.tokenizers.registry import TOKENIZER_DIR, save_tokenizer
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, UnusableError, run_error
from dist_mem.evaluation.card import card, outside_memories
from dist_mem.evaluation.export_transformers import write_transformers
from dist_mem.evaluation.trained_model import WEIGHTS, Checkpoint, TrainedModel, distinct_weights, load_model
from dist_mem.hf.adapter import CONFIG as ADAPTER_CONFIG
from dist_mem.hf.adapter import WEIGHTS as ADAPTER_WEIGHTS
from dist_mem.hf.adapter import adapter_of
from dist_mem.hf.folder import load_pretrained
from dist_mem.hf.vocabulary import compare_tokens
from dist_mem.memory import memory_options
from dist_mem.memory.outside import kept_kinds, sources
from dist_mem.model import MemoryLM
from dist_mem.nn.layers import DTYPES
from dist_mem.nn.low_rank import NAME
from dist_mem.runtime.figures import json_text
from dist_mem.runtime.files import is_wrong_path, new_folder, read_regular, write_hashed, write_text
from dist_mem.runtime.process_state import drawing
from dist_mem.tracking.mlflow.models import Registration, check_registration, log_export, open_run
from dist_mem.tracking.mlflow.store import read_run_id

# Keys of run, data and MLflow, which have their defaults in an export.
_PLACES = (
    *("run_dir", "resume", "tracking", "launch", "model.pretrained"),
    *("data.path", "data.curriculum", "data.mixture", "data.until_accuracy"),
    *("data.cache", "data.stage", "data.stage_dir"),
)
_METADATA = (  # of the checkpoint
    *("step", "tokenizer_fingerprint", "data_fingerprint", "mlflow_run_id", "versions"),
    *("commit", "validation"),
)


def run(
    path: Path,
    *,
    out: Path,
    checkpoint: int | None = None,
    precision: str = "fp32",
    layout: str = "dist_mem",
    registration: Registration | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Run the command and return the exit code of the process.

    Args:
        path: a run directory, one checkpoint in it, or a configuration, which exports the initial model of its run.
        out: the directory to create.
        checkpoint: step of the checkpoint; None: the newest that verifies.
        precision: of the weights, fp32, bf16 or fp16.
        layout: dist_mem, transformers (export_transformers.py), or peft: an adapter of model.pretrained.
        registration: in MLflow, to which the export is logged; None: it is not.
        overrides: `key=value`; `data.path` gives the present place of the tokenizer, `tracking.uri` MLflow's store.

    Raises:
        UnusableError: the checkpoint or the data are unusable, `out` exists, or MLflow refuses the model.
        UnfitError: MLflow's store does not answer; the export is written if it did at first.
    """
    if registration is not None:
        if layout == "peft":
            raise UnusableError("--mlflow: not with --format peft, an adapter that MLflow cannot load: leave one out")
        check_registration(registration)
    if out.exists():
        raise UnusableError(f"--out {out} exists already; remove it, or give another name")
    _check_used(path, checkpoint, overrides)
    with ExitStack() as stack:
        try:
            trained = (
                stack.enter_context(_initial_model(path, overrides, precision))
                if _is_configuration(path)
                else load_model(path, *overrides, f"eval.precision={precision}", step=checkpoint)
            )
        except (OSError, ValueError) as error:
            raise run_error(error) from error
        if registration is None:
            return _export(trained, path, out, layout)
        run_id = _mlflow_run(trained.checkpoint)
        opened = open_run(trained.config.tracking, trained.checkpoint.run_dir, run_id, registration, overrides)
        code = _export(trained, path, out, layout)
        if code == EXIT_DONE:
            address = log_export(opened, out, registration, step=trained.checkpoint.manifest["step"])
            print(f"{out} logged to MLflow as {address}")
            if outside_memories(trained.checkpoint):
                print("notice: mlflow models serve cannot load it: its memory is a program (eval.allow_code)")
        return code


def _check_used(path: Path, checkpoint: int | None, overrides: Sequence[str]) -> None:
    """Raise UnusableError for what an export would not have."""
    is_configuration = _is_configuration(path)
    if is_configuration and checkpoint is not None:
        raise UnusableError(
            f"--checkpoint {checkpoint}: {path} is a configuration, of which the initial model is exported: give the "
            "run directory"
        )
    lost = [word for word in overrides if word.startswith("eval.") and not word.startswith("eval.allow_code=")]
    if lost and not is_configuration:
        raise UnusableError(
            f"{lost[0]}: an export has the settings of its training: give it where the export is loaded, and the "
            "precision of the weights as --precision"
        )


def _mlflow_run(checkpoint: Checkpoint) -> str | None:
    """Return the id of the MLflow run of a checkpoint; that in the run directory is never older."""
    return read_run_id(checkpoint.run_dir) or checkpoint.manifest.get("mlflow_run_id")


def _is_configuration(path: Path) -> bool:
    """Return whether this is a configuration file and not a run."""
    return path.suffix in (".yaml", ".yml")


@contextmanager
def _initial_model(path: Path, overrides: Sequence[str], precision: str) -> Iterator[TrainedModel]:
    """Provide the model of a configuration at step 0, with the weights of `model.pretrained`, and its tokenizer.

    Its checkpoint has the configuration's own `eval.precision`, as that of a run; `precision` is of the weights.

    Raises:
        ValueError: the configuration, the data or the weights are invalid.
    """
    config = load_config([str(path), *overrides], memory_options=memory_options)
    refresh(config.data, [])
    tokenizer = open_tokenizer(config.data)
    with drawing(config.train.seed):  # a run initialises its weights with the same seed
        model = MemoryLM(model_spec(config, tokenizer.vocab_size))
    if config.model.pretrained is not None:
        load_pretrained(model, config.model, tokenizer.vocab_size)
        if remark := compare_tokens(config.model, tokenizer):
            print(f"notice: {remark}")
    dtype = DTYPES[precision]
    with TemporaryDirectory() as folder:
        save_config(config, Path(folder) / "config.yaml")
        programs = sources(config.memory)
        for name, text in programs.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            write_text(Path(folder) / name, text)
        files = {name: describe_file(Path(folder) / name) for name in programs}
        manifest = {"step": 0, "tokenizer_fingerprint": tokenizer.fingerprint, "files": files}
        checkpoint = Checkpoint(Path(folder), Path(folder), manifest, [])
        config = change_config(config, {"eval.precision": precision})
        yield TrainedModel(model.to(dtype).eval(), tokenizer, config, checkpoint, torch.device("cpu"), dtype)


def _export(trained: TrainedModel, path: Path, out: Path, layout: str) -> int:
    if trained.dtype == torch.float16:
        for tensor_name, tensor in distinct_weights(trained.model).items():
            if not tensor.isfinite().all():
                raise UnusableError(f"--precision fp16 cannot hold the values of {tensor_name}; use bf16 or fp32")
    try:
        with new_folder(out) as staging:
            if layout == "peft":
                write_adapter(trained, staging)
            else:
                write_export(trained, staging, name=out.absolute().name, layout=layout)
    except OSError as error:
        if is_wrong_path(error):
            raise UnusableError(f"--out {out} cannot be written: {error.strerror}; give another folder") from error
        print(f"error: {out} cannot be written: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(f"{path if _is_configuration(path) else trained.checkpoint.directory} exported to {out}")
    return EXIT_DONE


def write_export(trained: TrainedModel, directory: Path, *, name: str, layout: str = "dist_mem") -> None:
    """Write a model and everything needed to load it into an empty directory, durably, with the manifest last.

    Raises:
        UnusableError: transformers cannot have this model's tokenizer or, of a GPT-2, its attention.
    """
    checkpoint = trained.checkpoint
    config = _portable_settings(checkpoint)
    if layout == "transformers":
        config = change_config(config, {"model.lora": None})  # it is in the weights
        write_transformers(trained, directory)
        save_tokenizer(trained.tokenizer, directory / TOKENIZER_DIR)  # the names beside it are those of transformers
    else:
        write_hashed(directory / WEIGHTS, safetensors_parts(distinct_weights(trained.model)))
        save_tokenizer(trained.tokenizer, directory)
    write_text(directory / "config.yaml", to_yaml(config, resolve=True))  # readable without environment variables
    for source in outside_memories(checkpoint):
        (directory / source).parent.mkdir(exist_ok=True)
        write_text(directory / source, read_regular(checkpoint.directory / source).decode())
    write_text(directory / "README.md", card(trained, config, name, layout=layout))
    manifest = checkpoint.manifest
    metadata = {key: manifest[key] for key in _METADATA if key in manifest}
    files = {path.relative_to(directory).as_posix(): describe_file(path) for path in files_in(directory)}
    write_manifest(directory, {**metadata, "precision": trained.config.eval.precision, "files": files})


def write_adapter(trained: TrainedModel, directory: Path) -> None:
    """Write what LoRA has learned, for the library peft (hf/adapter.py), into an empty directory.

    Raises:
        UnusableError: the model has no LoRA, or the published weights beside it have been trained too, so that the
            adapter would not fit the published model.
    """
    settings = trained.config.model
    if settings.lora is None or settings.pretrained is None:
        key = "model.lora" if settings.lora is None else "model.pretrained"
        raise UnusableError(f"--format peft writes an adapter of a published model, but {key} is null: leave it out")
    published = deepcopy(trained.model).float()
    own = set(load_pretrained(published, settings, trained.tokenizer.vocab_size))
    weights = dict(trained.model.named_parameters())
    for name, parameter in published.named_parameters():
        if name not in own and not torch.equal(parameter.to(weights[name].dtype), weights[name]):
            raise UnusableError(
                f"--format peft: {name} is not that of {settings.pretrained} any more, and an adapter has none of it: "
                "give --format transformers, or train with optimizer.groups that keep it (trainable: false)"
            )
    content, tensors = adapter_of(trained.model, settings.lora, settings.pretrained)
    write_hashed(directory / ADAPTER_WEIGHTS, safetensors_parts(tensors, metadata={"format": "pt"}))
    write_text(directory / ADAPTER_CONFIG, json_text(content, indent=1) + "\n")
    if memory := [name for name in own if f".{NAME}." not in name]:
        print(f"notice: an adapter has no memory: {len(memory)} tensors as {memory[0]} are in other formats only")


def _portable_settings(checkpoint: Checkpoint) -> Config:
    """Return the configuration of a checkpoint without the places of run, data and MLflow."""
    path = checkpoint.directory / "config.yaml"
    kept = kept_kinds(load_config([str(path)]).memory, Path())  # memory/NAME.py, relative to the export
    default = as_tree(Config())
    changed = {key: value_at(default, key) for key in _PLACES}
    config = load_config([str(path), *kept])
    places = [key for key in flatten(config.deepspeed) if key.rpartition(".")[2] in deepspeed_keys.PATHS]
    return change_config(config, changed | {f"deepspeed.{key}": None for key in places})
