"""A small library to score, a small model, and a comparison of two reports."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dist_mem.block import model_spec
from dist_mem.checkpoint.engine_files import ENGINE_JSON, engine_index, engine_ranges, engine_tensors
from dist_mem.checkpoint.manifest import describe_file, files_in, step_dir, write_manifest
from dist_mem.checkpoint.rank_file import rank_file, tensors_of_file
from dist_mem.config import save_config
from dist_mem.data.shard import Index, TokenizedDocument, read_index, write_split
from dist_mem.data.tokenizers.base import Tokenizer
from dist_mem.data.tokenizers.registry import TOKENIZER_DIR, save_tokenizer
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.engine.zero_state import Slice
from dist_mem.evaluation.scores import Report
from dist_mem.evaluation.scoring import InitState, score_split
from dist_mem.model import MemoryLM
from dist_mem.runtime.distributed import World
from tests.support.configs import config_from
from tests.support.saving import FACTS

SEG_LEN, MEM_LEN = 8, 16
TOKENIZER = BytesTokenizer()
ALONE = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))
LENGTHS = (100, 0, 7, 8, 1, 41, 64, 16, 23)  # include 0, 1, exactly one segment, and five segments and one token


def make_document(number: int, length: int) -> TokenizedDocument:
    text = "".join(f"{number} word{place} \n" for place in range(length))[:length]
    tokens = TOKENIZER.encode(text)
    recall = np.zeros(length, dtype=np.int32)
    for place in range(number, length, 5):
        recall[place] = min(place, 1 + 7 * number) or 0
    return TokenizedDocument(
        id=f"doc{number}",
        title=f"Title {number}",
        year=1900,
        words=len(text.split()),
        bytes=length,
        tokens=tokens,
        recall=recall,
    )


def write_library(folder: Path) -> Path:
    """Write a data directory with a split `test` of nine small documents."""
    save_tokenizer(TOKENIZER, folder)
    documents = [make_document(number, length) for number, length in enumerate(LENGTHS)]
    write_split(documents, folder / "test", name="tiny", split="test", tokenizer_fingerprint=TOKENIZER.fingerprint)
    return folder


def write_other(folder: Path, number: int = 0) -> tuple[Path, str]:
    """Write other data of one document, by `number`; return their directory, and their part of names of results."""
    save_tokenizer(TOKENIZER, folder)
    documents = [make_document(number, 50)]
    write_split(documents, folder / "test", name="a-b", split="test", tokenizer_fingerprint=TOKENIZER.fingerprint)
    return folder, f"-a_b_{read_index(folder / 'test').fingerprint[:6]}"


def make_config(**overrides: Any) -> Any:
    small = {
        "model": {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_inner": 32},
        "memory": {"kind": "transformer_xl", "mem_len": MEM_LEN},
        "train": {
            "seg_len": SEG_LEN,
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "precision": "fp32",
            "steps": 10,
            "threads": 1,
        },
        "tracking": {"mlflow": False},
        "deepspeed": {},
    }
    return config_from(small, overrides)


def make_model() -> MemoryLM:
    torch.manual_seed(0)
    model = MemoryLM(model_spec(make_config(model={"init_std": 0.3}), TOKENIZER.vocab_size))
    return model.eval()


def save_weights(run_dir: Path, model: MemoryLM, config: Any, *, step: int, tokenizer: Tokenizer = TOKENIZER) -> Path:
    """Write the part of a checkpoint that evaluation reads, of one rank."""
    directory = step_dir(run_dir, step)
    (directory / rank_file(0)).parent.mkdir(parents=True)
    weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    facts = {"counters": {}, "shapes": {name: list(weight.shape) for name, weight in weights.items()}, "aliases": {}}
    slices = [Slice(name, 0, weight.numel(), {"master": weight.view(-1)}) for name, weight in weights.items()]
    save_file(tensors_of_file({"engine": engine_tensors(slices)}), directory / rank_file(0))
    (directory / ENGINE_JSON).write_text(json.dumps(engine_index(facts, [engine_ranges(slices, facts["shapes"])])))
    save_config(config, directory / "config.yaml")
    save_tokenizer(tokenizer, directory / TOKENIZER_DIR)
    files = {path.relative_to(directory).as_posix(): describe_file(path) for path in files_in(directory)}
    described = {
        **FACTS,
        "meter": {"tokens_read": 96.0},
        "step": step,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "files": files,
    }
    write_manifest(directory, described)
    return directory


def score(
    index: Index,
    model: Any,
    *,
    num_lanes: int = 3,
    micro_lanes: int = 2,
    seg_len: int = SEG_LEN,
    mem_len: int = MEM_LEN,
    world: World = ALONE,
    init_state: InitState | None = None,
    cut: str = "start",
    tokenizer: Tokenizer = TOKENIZER,
    **settings: Any,
) -> Report:
    """Score a split with a model or another forward; `cut` is `data.cut`, `settings` are keys of `eval`."""
    return score_split(
        model,
        init_state or (lambda lane_ids: model.init_state(lane_ids, "cpu", torch.float32)),
        config=make_config(
            memory={"mem_len": mem_len},
            data={"cut": cut},
            train={"seg_len": seg_len, "micro_batch_size": micro_lanes},
            eval={"batch_size": num_lanes, **settings},
        ),
        index=index,
        tokenizer=tokenizer,
        world=world,
    )


def assert_same(found: Report, expected: Report) -> None:
    """Assert equal counts, and metrics equal to 1e-6: in total, by document, and by distance."""
    assert counts(found) == counts(expected)
    assert found.metrics() == pytest.approx(expected.metrics(), rel=1e-6, abs=0)
    for part in ("documents", "recall"):
        nll = [score.nll for score in getattr(found, part)]
        assert nll == pytest.approx([score.nll for score in getattr(expected, part)], rel=1e-6, abs=0)


def counts(report: Report) -> list[Any]:
    documents = [(entry.id, entry.num_scored, entry.words, entry.bytes) for entry in report.documents]
    return [report.num_words, *documents, *((entry.distance, entry.num_scored) for entry in report.recall)]


class Request:
    """A request as the harness makes it."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args
