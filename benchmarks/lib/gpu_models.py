"""The models of gpu.sh: every memory, every preset of the linear family, and trainings of configs/speed with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from lib.common import ROOT
from lib.speed import memories
from omegaconf import OmegaConf

from dist_mem.config import Config, load_config
from dist_mem.memory import memory_options

BASE = "transformer_xl_base"  # NVIDIA's base configuration of Transformer-XL
VOCAB = {BASE: 267_736}
GPT2_VOCAB, TINY_VOCAB = 50_258, 501
TINY: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 2, "d_model": 32, "num_heads": 2, "d_head": None, "d_inner": 64},
    "train": {"global_batch_size": 4, "micro_batch_size": 4, "seg_len": 16},
}


def every_memory(mem_len: int) -> dict[str, dict[str, Any]]:
    """Return blocks of every memory with M rows: those of `memories`, and variants that take other kernels."""
    blocks = memories(mem_len)
    for path in sorted((ROOT / "configs" / "memory").glob("*.yaml")):
        memory: Any = OmegaConf.to_container(OmegaConf.load(path).memory)
        if memory["kind"] == "linear":
            blocks[path.stem] = memory
    blocks["infinite, gibbs"] = {**blocks["infinite"], "density": "gibbs"}
    return {"causal": {"kind": "causal"}, **blocks}


def model_keys(memory: dict[str, Any], seg_len: int) -> dict[str, Any]:
    """Return the keys of `model` that a memory needs: without one, positions are learned, as GPT-2 does."""
    return {"kind": "gpt2", "num_positions": seg_len, "adaptive": None} if memory["kind"] == "causal" else {}


class Training(NamedTuple):
    """A model whose training is measured."""

    size: str  # of configs/speed
    memory: str  # of every_memory
    is_compiled: bool = False

    @property
    def name(self) -> str:
        return f"speed {self.size} {self.memory}{' compiled' if self.is_compiled else ''}"

    @property
    def vocab(self) -> int:
        return VOCAB.get(self.size, GPT2_VOCAB)

    def configuration(self, *, tiny: bool) -> Config:
        """Return configs/speed/SIZE.yaml with the memory, small if `tiny`."""
        path = str(ROOT / "configs" / "speed" / f"{self.size}.yaml")
        seg_len = TINY["train"]["seg_len"] if tiny else load_config([path]).train.seg_len
        memory = every_memory(seg_len)[self.memory]
        blocks = {name: dict(keys) for name, keys in TINY.items()} if tiny else {"model": {}, "train": {}}
        adaptive = {"adaptive": {"cutoffs": [20, 100]}} if tiny and self.size == BASE else {}
        keys = {
            "model": blocks["model"] | adaptive | model_keys(memory, seg_len),
            "train": blocks["train"] | {"compile": self.is_compiled},
            "memory": memory,
            "schedule": {"kind": "constant", "warmup_steps": 0},
            "tracking": {"mlflow": False},
        }
        overrides = [f"{name}={json.dumps(value)}" for name, value in _flat(keys)]
        return load_config([path, *overrides], memory_options=memory_options)


def _flat(keys: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield overrides; a memory replaces the one of the file."""
    for block, entries in keys.items():
        if block == "memory":
            yield block, entries
        else:
            yield from ((f"{block}.{name}", value) for name, value in entries.items())


FIRST = ("causal", "transformer_xl", "transformer_xl, rotary", "gated_deltanet")


def trainings() -> list[Training]:
    """Return what is measured, in order: what most models share, then every memory, then larger models."""
    later = [memory for memory in every_memory(1) if memory not in FIRST]
    compiled = (*FIRST, "none", "lamemo", "infini", "titans, chunks of 256")
    return [
        *(Training("125m", memory) for memory in FIRST),
        *(Training("125m", memory, is_compiled=True) for memory in FIRST),
        Training("1.3b", "transformer_xl"),
        Training("1.3b", "transformer_xl", is_compiled=True),
        *(Training("125m", memory) for memory in later),
        *(Training("125m", memory, is_compiled=True) for memory in compiled if memory not in FIRST),
        Training(BASE, "transformer_xl"),
    ]
