"""Runs with a small model of each memory, to be evaluated."""

from pathlib import Path
from typing import Any

import torch

from dist_mem.block import model_spec
from dist_mem.config import change_config
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.evaluation.evaluate import evaluate_checkpoint
from dist_mem.evaluation.scores import Report
from dist_mem.evaluation.trained_model import find_checkpoint, read_settings
from dist_mem.model import MemoryLM
from tests.support.scored_library import ALONE, MEM_LEN, TOKENIZER, make_config, save_weights

COMPRESSIVE = {"kind": "compressive", "mem_len": MEM_LEN, "cmem_len": 4, "compression_rate": 2}
INFINITE: dict[str, Any] = {"kind": "infinite", "num_basis": 8, "basis_widths": [0.1], "num_samples": 16}
MEMORIES = {
    "transformer_xl": {"kind": "transformer_xl", "mem_len": MEM_LEN},
    "lamemo": {"kind": "lamemo", "mem_len": MEM_LEN},
    "compressive": COMPRESSIVE,
    "infinite_over_transformer_xl": {**INFINITE, "over": {"kind": "transformer_xl", "mem_len": MEM_LEN}},
    "infinite_over_lamemo": {**INFINITE, "over": {"kind": "lamemo", "mem_len": MEM_LEN}},
    "infinite_over_compressive": {**INFINITE, "over": COMPRESSIVE},
    "infinite": {**INFINITE, "over": {"kind": "none"}},
    "none": {"kind": "none"},
    "infini": {"kind": "infini"},
}


def config_with(memory: dict[str, Any], **blocks: Any) -> Any:
    config = make_config(**blocks)
    return change_config(config, {"memory": memory})  # in place of the other one, not merged with it


def make_run(
    folder: Path, library: Path, memory: dict[str, Any], tokenizer: Tokenizer = TOKENIZER, **options: Any
) -> tuple[Path, MemoryLM]:
    """A run with that memory, and those options of the model, saved at step 3, and its model."""
    config = config_with(memory, data={"path": str(library)}, model={"init_std": 0.3, **options})
    torch.manual_seed(0)
    model = MemoryLM(model_spec(config, tokenizer.vocab_size)).eval()
    save_weights(folder / "run", model, config, step=3, tokenizer=tokenizer)
    return folder / "run", model


def make_diverged_run(folder: Path, library: Path) -> Path:
    """A run whose losses are nan from the first Z of a text on."""
    config = config_with(MEMORIES["transformer_xl"], data={"path": str(library)}, model={"tie_embeddings": False})
    torch.manual_seed(0)
    model = MemoryLM(model_spec(config, TOKENIZER.vocab_size)).eval()
    with torch.no_grad():
        model.get_parameter("embedding.bins.0.weight")[ord("Z")] = torch.inf
    save_weights(folder / "diverged", model, config, step=3)
    return folder / "diverged"


def asked(run_dir: Path, *overrides: str, **options: Any) -> Report:
    """What `dist-mem evaluate` finds; `options` are those of `evaluate_checkpoint`."""
    checkpoint = find_checkpoint(run_dir)
    config = read_settings(checkpoint.directory, ["eval.batch_size=3", *overrides])
    return evaluate_checkpoint(checkpoint, config, split="test", world=ALONE, **options)
