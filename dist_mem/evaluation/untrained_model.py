"""Build the initial model of a configuration, for example to score GPT-2 before any fine-tuning.

dist-mem export configs/papers/gpt2.yaml --out models/gpt2_zero_shot
dist-mem evaluate models/gpt2_zero_shot --split test data.path=data/gpt2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from dist_mem.config import load_config, save_config
from dist_mem.data.directory import open_tokenizer, refresh
from dist_mem.evaluation.trained_model import Checkpoint, TrainedModel
from dist_mem.gpt2.folder import load_pretrained
from dist_mem.memory import memory_options
from dist_mem.model import MemoryLM
from dist_mem.nn.layers import DTYPES


def is_configuration(path: Path) -> bool:
    """Return whether this is a configuration file and not a run."""
    return path.suffix in (".yaml", ".yml")


@contextmanager
def untrained_model(path: Path, overrides: Sequence[str]) -> Iterator[TrainedModel]:
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
