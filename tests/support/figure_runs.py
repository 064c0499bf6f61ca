"""Tiny runs of every memory, on documents that are long enough for every figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_mem.config.memory_blocks import PER_BLOCK, kinds_of
from dist_mem.data.shard import TokenizedDocument, write_split
from dist_mem.data.tokenizers.registry import save_tokenizer
from dist_mem.evaluation.trained_model import find_checkpoint
from dist_mem.memory import memory_class, memory_kinds
from dist_mem.model import MemoryLM
from dist_mem.papers.figures.parts.source import Settings, Source
from dist_mem.tracking.log import METRICS_FILE
from tests.support.scored_library import ALONE, SEG_LEN, TOKENIZER, make_config, save_weights
from tests.support.tracked import log_points

LENGTH = 160  # tokens of a document
NUM_TOKENS = 48  # read for a mean
NAMES = ("Anna", "Ben", "Clara", "David", "Ella")


def write_documents(folder: Path) -> Path:
    """Write a split `test` of three documents of short words; in each, every second line is a reply."""
    save_tokenizer(TOKENIZER, folder)
    draw = np.random.default_rng(0)
    documents = []
    for number in range(3):
        words = [NAMES[place] for place in draw.integers(len(NAMES), size=LENGTH)]
        text = "".join(f"{word}{'' if place % 4 else chr(10)} " for place, word in enumerate(words))[:LENGTH]
        scored = np.cumsum([letter == "\n" for letter in f" {text}"[:LENGTH]]) % 2 == 1
        documents.append(
            TokenizedDocument(
                id=f"doc{number}",
                title=f"Title {number}",
                year=1900,
                words=len(text.split()),
                bytes=LENGTH,
                tokens=TOKENIZER.encode(text),
                mask=scored,
            )
        )
    write_split(documents, folder / "test", name="tiny", split="test", tokenizer_fingerprint=TOKENIZER.fingerprint)
    return folder


def memories() -> dict[str, dict[str, Any]]:
    """Return every memory of the package by its file name, sticky sampling, the dialogue model's, and a map of two."""
    blocks = {kind: {"kind": kind, **memory_class(kind).small_options(SEG_LEN)} for kind in memory_kinds()}
    return {
        **blocks,
        "sticky": {**blocks["infinite"], "sampling": "sticky"},
        "gpt2": {**blocks["infinite"], "over": {"kind": "causal"}},
        "map": {"kind": PER_BLOCK, "default": blocks["transformer_xl"], "2": blocks["infinite"]},
    }


def make_run(folder: Path, data: Path, memory: dict[str, Any]) -> Path:
    """Write a run with random weights and three logged steps; a model with causal attention is a GPT-2."""
    model: dict[str, Any] = {"init_std": 0.3, "num_layers": 3}
    if "causal" in [kind for _, kind in kinds_of(memory)]:
        model |= {"kind": "gpt2", "num_positions": SEG_LEN}
    config = make_config(data={"path": str(data)}, model=model, eval={"split": "test"})
    config.memory = memory
    torch.manual_seed(0)
    save_weights(folder, MemoryLM(config, TOKENIZER.vocab_size).eval(), config, step=3)
    points = [{"step": step, "time": 0.0, "metrics": {"loss": 5.0 / step}} for step in (1, 2, 3)]
    log_points(folder / METRICS_FILE, points)
    return folder


def source_of(run: Path, **settings: Any) -> Source:
    """Return a run to draw from."""
    return Source(
        find_checkpoint(run), run.name, Settings(**{"num_tokens": NUM_TOKENS, **settings}), ALONE, lambda *_: None
    )
