"""Export a trained model as a self-contained directory.

    dist-mem export runs/demo --out models/demo
    dist-mem export runs/demo --out models/demo --checkpoint 400 --precision bf16
    dist-mem export configs/papers/gpt2.yaml --out models/gpt2_zero_shot    # its initial model

    DIR/
        model.safetensors   the weights; weights shared by layers are stored once
        config.yaml         the training configuration without paths and addresses of the training machine
        tokenizer.json ...  the tokenizer
        memory/NAME.py      memories from outside the package, if the model has any
        README.md           description and loading instructions
        manifest.json       written last: size and SHA-256 of every file, as in a checkpoint

`dist-mem evaluate` and `dist_mem.load_model` accept it in place of a run. It can be made from a checkpoint of any ZeRO
stage, number of ranks and format. It contains only data, except a memory from outside the package, which is a program.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from dist_mem.checkpoint.manifest import describe_file, files_in, write_manifest
from dist_mem.checkpoint.tensor_file import safetensors_parts
from dist_mem.config import Config, load_config, save_config, to_yaml
from dist_mem.config.sources import plain_block
from dist_mem.data.directory import open_tokenizer, refresh
from dist_mem.data.tokenizers.registry import save_tokenizer
from dist_mem.errors import EXIT_DONE, EXIT_FAILED, UnusableError
from dist_mem.evaluation.export_transformers import write_transformers
from dist_mem.evaluation.trained_model import WEIGHTS, Checkpoint, TrainedModel, load_model
from dist_mem.gpt2.folder import load_pretrained
from dist_mem.memory import memory_options
from dist_mem.memory.outside import kept_kinds
from dist_mem.model import MemoryLM
from dist_mem.nn.layers import DTYPES
from dist_mem.runtime.files import fsync_path, is_wrong_path, write_hashed, write_text

_METADATA = ("step", "tokenizer_fingerprint", "data_fingerprint", "mlflow_run_id", "versions")  # of the checkpoint

_CARD = """# {name}

A language model that carries memory from one segment of a text to the next, trained with dist_mem for {step} steps:
memory `{memory}`, {num_layers} layers of width {d_model}, {num_parameters:,} parameters in {precision}, a vocabulary of
{vocab_size:,} ({tokenizer}), segments of {seg_len} tokens. `config.yaml` has the rest.

```python
import dist_mem

trained = dist_mem.load_model("{name}")  # the path of this folder
print(dist_mem.score(trained, "It was the best of times.").nll)  # of every token, in nats
```

To evaluate it on documents, name a data directory that was made with the same tokenizer:

```sh
dist-mem evaluate {name} --split test data.path=FOLDER
```

{trust}
"""
_DATA_ONLY = "All files are data: loading runs no code from them. Each is compared with its SHA-256 in `manifest.json`."
_CODE = """\
**`memory/` contains a program**: this memory is not part of dist_mem. Loading the model runs it, but only with
`"eval.allow_code=true"` as a further argument: read it first. All other files are data. Each is compared with its
SHA-256 in `manifest.json`."""


def run(
    path: Path,
    *,
    out: Path,
    checkpoint: int | None = None,
    precision: str = "fp32",
    layout: str = "dist_mem",
    overrides: Sequence[str] = (),
) -> int:
    """Run the command and return the exit code of the process.

    Args:
        path: a run directory, one checkpoint in it, or a configuration, which exports the initial model of its run.
        out: the directory to create.
        checkpoint: step of the checkpoint; None: the newest that verifies.
        precision: of the weights, fp32 or bf16.
        layout: dist_mem, or transformers (export_transformers.py).
        overrides: `key=value`; `data.path` gives the present place of the tokenizer.

    Raises:
        UnusableError: the checkpoint or the data are unusable, or `out` exists.
    """
    if out.exists():
        raise UnusableError(f"--out {out} exists already; remove it, or give another name")
    with ExitStack() as stack:
        try:
            settings = [*overrides, f"eval.precision={precision}"]
            trained = (
                stack.enter_context(_initial_model(path, settings))
                if _is_configuration(path)
                else load_model(path, *settings, step=checkpoint)
            )
        except UnusableError:
            raise
        except (OSError, ValueError) as error:
            raise UnusableError(str(error)) from error
        return _export(trained, path, out, layout)


def _is_configuration(path: Path) -> bool:
    """Return whether this is a configuration file and not a run."""
    return path.suffix in (".yaml", ".yml")


@contextmanager
def _initial_model(path: Path, overrides: Sequence[str]) -> Iterator[TrainedModel]:
    """Provide the model of a configuration at step 0, with the weights of `model.pretrained`, and its tokenizer.

    Raises:
        ValueError: the configuration, the data or the weights are invalid.
    """
    config = load_config([str(path), *overrides], memory_options=memory_options)
    refresh(config.data, [])
    tokenizer = open_tokenizer(config.data)
    torch.manual_seed(config.train.seed)  # a run initialises its weights with the same seed
    model = MemoryLM(config, tokenizer.vocab_size)
    if config.model.pretrained is not None:
        load_pretrained(model, config, tokenizer.vocab_size)
    dtype = DTYPES[config.eval.precision]
    with TemporaryDirectory() as folder:
        save_config(config, Path(folder) / "config.yaml")
        manifest = {"step": 0, "tokenizer_fingerprint": tokenizer.fingerprint, "files": {}}
        checkpoint = Checkpoint(Path(folder), Path(folder), manifest, [])
        yield TrainedModel(model.to(dtype).eval(), tokenizer, config, checkpoint, torch.device("cpu"), dtype)


def _export(trained: TrainedModel, path: Path, out: Path, layout: str) -> int:
    try:
        with _whole_or_nothing(out) as staging:
            if layout == "transformers":
                write_transformers(trained, staging, _portable_settings(trained.checkpoint))
            else:
                write_export(trained, staging, name=out.absolute().name)
    except OSError as error:
        if is_wrong_path(error):
            raise UnusableError(f"--out {out} cannot be written: {error.strerror}; give another folder") from error
        print(f"error: {out} cannot be written: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(f"{path if _is_configuration(path) else trained.checkpoint.directory} exported to {out}")
    return EXIT_DONE


def write_export(trained: TrainedModel, directory: Path, *, name: str) -> None:
    """Write a model and everything needed to load it into an empty directory, durably, with the manifest last."""
    checkpoint = trained.checkpoint
    config = _portable_settings(checkpoint)
    write_hashed(directory / WEIGHTS, safetensors_parts(_weights(trained.model)))
    write_text(directory / "config.yaml", to_yaml(config, resolve=True))  # readable without environment variables
    save_tokenizer(trained.tokenizer, directory)
    for source in _sources(checkpoint):
        (directory / source).parent.mkdir(exist_ok=True)
        write_text(directory / source, (checkpoint.directory / source).read_text(encoding="utf-8"))
    write_text(directory / "README.md", _card(trained, config, name))
    manifest = checkpoint.manifest
    metadata = {key: manifest[key] for key in _METADATA if key in manifest}
    files = {path.relative_to(directory).as_posix(): describe_file(path) for path in files_in(directory)}
    write_manifest(directory, {**metadata, "precision": trained.config.eval.precision, "files": files})


@contextmanager
def _whole_or_nothing(path: Path) -> Iterator[Path]:
    """Provide an empty directory that is durably renamed to `path`, or removed if filling it fails."""
    path = path.absolute()
    staging = path.with_name(f".{path.name}.{os.getpid()}.partial")
    staging.mkdir(parents=True)
    try:
        yield staging
        for folder in {file.parent for file in files_in(staging)}:
            fsync_path(folder)
        staging.rename(path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    fsync_path(path.parent)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the model's state_dict, each under its first name only."""
    names = model.state_dict().keys()
    tensors = chain(model.named_parameters(), model.named_buffers())
    return {name: tensor.detach().contiguous() for name, tensor in tensors if name in names}


def _portable_settings(checkpoint: Checkpoint) -> Config:
    """Return the configuration of a checkpoint without the places of run, data and MLflow."""
    path = checkpoint.directory / "config.yaml"
    kept = kept_kinds(plain_block(load_config([str(path)]).memory), Path())  # memory/NAME.py, relative to the export
    config, default = load_config([str(path), *kept]), Config()
    config.run_dir, config.resume, config.tracking = default.run_dir, default.resume, default.tracking
    config.launch, config.model.pretrained = default.launch, default.model.pretrained
    for key in ("path", "cache", "stage", "stage_dir"):
        setattr(config.data, key, getattr(default.data, key))
    return config


def _sources(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the memories from outside the package that a checkpoint contains."""
    return [name for name in checkpoint.manifest["files"] if name.startswith("memory/")]


def _card(trained: TrainedModel, config: Config, name: str) -> str:
    """Return the text of README.md."""
    return _CARD.format(
        name=name,
        step=trained.checkpoint.manifest["step"],
        memory=_name_of(plain_block(config.memory)),
        num_layers=config.model.num_layers,
        d_model=config.model.d_model,
        num_parameters=sum(parameter.numel() for parameter in trained.model.parameters()),
        precision=trained.config.eval.precision,
        vocab_size=trained.tokenizer.vocab_size,
        tokenizer=trained.tokenizer.kind,
        seg_len=config.train.seg_len,
        trust=_CODE if _sources(trained.checkpoint) else _DATA_ONLY,
    )


def _name_of(memory: Mapping[str, Any]) -> str:
    return f"{memory['kind']} over {_name_of(memory['over'])}" if memory.get("over") else memory["kind"]
