"""A model with a published tokenizer may end its text with EOS, wherever it is generated; others write on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_mem
from dist_mem.__main__ import main
from dist_mem.data.tokenizers.registry import KINDS, find_tokenizer
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from dist_mem.evaluation.export import run as export
from dist_mem.evaluation.trained_model import TrainedModel, load_model
from dist_mem.generation.generate import Sampling, generate
from dist_mem.generation.reading import read, start
from dist_mem.lm_eval.model import DistMemLM
from dist_mem.runtime.terminal import make_printable
from tests.support.jobs import write_config
from tests.support.scored_library import Request

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

from tests.support.published_tokenizers import PUBLISHED, save_published  # noqa: E402

PROMPT, NUM_TOKENS, NUM_TEXTS = "It was the best", 200, 12  # every text ends early with a probability of about 0.3
HOT = Sampling(temperature=1.0)


def exported(root: Path, layout: str = "dist_mem") -> Path:
    """Export a model that finds every token about equally probable; return its folder, below `root`."""
    text = root / "text.txt"
    text.write_text("It was the best of times. " * 40, encoding="utf-8")
    splits = {"train": [SourceDocument(id="0", title="text", source=text, year=1900)]}
    tokenizer = find_tokenizer(save_published("llama3", root / "published"))
    build_dataset(splits, root / "shards", name="text", tokenizer=tokenizer)
    config = write_config(root / "run.yaml", root / "shards", root / "run")
    assert export(config, out=root / "model", layout=layout) == 0
    return root / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(tmp_path_factory.mktemp("published"))


def written(trained: TrainedModel) -> list[torch.Tensor]:
    """Return what is generated in lanes whose random numbers are those of the texts 0, 1, ..."""
    reading = read(trained, start(trained, NUM_TEXTS), [trained.tokenizer.encode(PROMPT)] * NUM_TEXTS)
    return generate(trained, reading, num_tokens=NUM_TOKENS, sampling=HOT).tokens


def test_eos_is_drawn_and_ends_its_lane_alone(folder: Path) -> None:
    trained = load_model(folder)
    eos, lengths = trained.tokenizer.eos_id, list[int]()
    for tokens in written(trained):
        ends = (tokens == eos).nonzero().flatten().tolist()
        assert ends == ([len(tokens) - 1] if len(tokens) < NUM_TOKENS else ends[:1])
        lengths.append(len(tokens))
        assert trained.tokenizer.bos_id not in tokens
    assert min(lengths) < max(lengths) == NUM_TOKENS


def test_the_command_the_api_and_the_harness_show_the_text_before_eos(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = load_model(folder)
    expected = written(trained)
    assert min(map(len, expected)) < NUM_TOKENS
    texts = [
        b"".join(trained.tokenizer.pieces[token] for token in tokens).decode("utf-8", "replace") for tokens in expected
    ]
    shared = ["generate", str(folder), "--prompt", PROMPT, "--tokens", str(NUM_TOKENS), "--top-p", "1"]
    assert main([*shared, "--samples", str(NUM_TEXTS), "--out", str(tmp_path / "out.json")]) == 0
    (found,) = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["continuations"]
    assert found["texts"] == texts and found["num_tokens"] == list(map(len, expected))
    capsys.readouterr()
    asked = (PROMPT, {"max_gen_toks": NUM_TOKENS, "until": [], "do_sample": True, "temperature": 1.0})
    assert DistMemLM(trained).generate_until([Request(asked)] * NUM_TEXTS) == texts
    model = dist_mem.Model(trained)
    for seed in range(2):
        pieces = list(model.generate(PROMPT, num_tokens=NUM_TOKENS, sampling=Sampling(seed=seed)))
        assert main([*shared, "--seed", str(seed)]) == 0
        assert capsys.readouterr().out == make_printable("".join(pieces)) + "\n"
        if seed == 0:
            assert "".join(pieces) == texts[0]


@pytest.mark.parametrize("kind", PUBLISHED)
def test_the_eos_that_a_published_tokenizer_names_ends_a_text_and_is_not_shown(kind: str, tmp_path: Path) -> None:
    tokenizer = find_tokenizer(save_published(kind, tmp_path / "published"))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "published"))
    assert tokenizer.end_ids == {theirs.eos_token_id}
    assert tokenizer.pieces[theirs.eos_token_id] == b""


def test_no_token_of_our_own_kinds_ends_a_text() -> None:
    assert BytesTokenizer().end_ids == set()
    assert {name for name, kind in KINDS.items() if "end_ids" in vars(kind)} == {"huggingface"}


@pytest.mark.usefixtures("own_modules")
def test_an_export_for_transformers_ends_there_too(tmp_path: Path) -> None:
    folder = exported(tmp_path, "transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=True)
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": NUM_TOKENS, "num_return_sequences": NUM_TEXTS}
    found = model.generate(**tokenizer(PROMPT, return_tensors="pt"), **options, pad_token_id=tokenizer.eos_token_id)
    for tokens in found:
        ends = (tokens == tokenizer.eos_token_id).nonzero().flatten().tolist()
        assert ends == list(range(len(tokens) - len(ends), len(tokens))), "nothing but padding follows EOS"
    assert (found[:, -1] == tokenizer.eos_token_id).any()
