"""The Python API equals the functions and commands below it, bit for bit, and its docstrings show what is so."""

import doctest
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import dist_mem
from dist_mem.api.model import Model
from dist_mem.errors import UnusableError
from dist_mem.evaluation.evaluate import evaluate_checkpoint
from dist_mem.generation.generate import generate
from dist_mem.generation.reading import read, start
from dist_mem.generation.text_memory import read_text
from dist_mem.generation.text_scores import score
from tests.support.messages import refused
from tests.support.scored_library import ALONE

SAMPLING = dist_mem.Sampling(temperature=0.9, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def model(api_folder: Path) -> Model:
    return dist_mem.load(api_folder / "runs" / "demo")


@pytest.fixture(scope="module")
def text(api_folder: Path) -> str:
    return (api_folder / "book.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["api.model", "api.training", "generation.text_memory"])
def test_examples_of_the_docstrings(name: str, api_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(api_folder)
    module = import_module(f"dist_mem.{name}")
    result = doctest.testmod(module, extraglobs={"dist_mem": dist_mem, "torch": torch})
    assert result.failed == 0 and result.attempted > 1


def test_scores_are_those_of_the_function_below(model: Model, text: str) -> None:
    scores, expected = model.score(text), score(model.trained, text)
    assert torch.equal(scores.nll, expected.nll) and (scores.tokens == expected.tokens).all()
    assert "".join(scores.pieces) == text and scores.memory.num_tokens == len(text)
    assert scores.mean == float(expected.nll.double().mean())
    several = model.score([text, text[:5]])
    assert torch.equal(several[0].nll, expected.nll) and len(several) == 2 and model.score([]) == []
    assert torch.equal(model.score(scores.tokens).nll, expected.nll), "token ids"


def test_scores_are_those_of_an_evaluation(model: Model, text: str) -> None:
    report = evaluate_checkpoint(model.trained.checkpoint, model.trained.config, split="test", world=ALONE)
    scored = next(document for document in report.documents if document.id == "0")
    assert float(model.score(text).nll.double().sum()) == pytest.approx(scored.nll, rel=1e-6)


@pytest.mark.parametrize("cut", [1, 16, 37])  # within a segment and at its border
def test_a_memory_stands_for_the_text_before(model: Model, text: str, tmp_path: Path, cut: int) -> None:
    whole, memory = model.score(text).nll, model.read(text[:cut])
    memory.save(tmp_path / "text.mem")
    pieces = list(model.generate(text[:90], num_tokens=30, sampling=SAMPLING))
    for before in (memory, model.score(text[:cut]).memory, dist_mem.Memory.load(tmp_path / "text.mem")):
        assert torch.equal(model.score(text[cut:], memory=before).nll, whole[cut:])
        assert list(model.generate(text[cut:90], memory=before, num_tokens=30, sampling=SAMPLING)) == pieces
        continued = model.read(text[cut:60], memory=before)
        assert torch.equal(model.score(text[60:], memory=continued).nll, whole[60:])
        assert [read.num_tokens for read in continued.texts] == [cut, 60 - cut]


def test_a_saved_memory_is_the_file_of_the_command(model: Model, text: str, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("method", "again", "function")]
    model.read(text, name="book.txt").save(paths[0])
    dist_mem.Memory.load(paths[0]).save(paths[1])
    read_text(model.trained, text, name="book.txt").save(paths[2])
    assert paths[0].read_bytes() == paths[1].read_bytes() == paths[2].read_bytes()
    assert dist_mem.Memory.load(paths[0]).num_tokens == len(text)
    with refused(UnusableError, "a.mem"):
        model.read(text).save(tmp_path / "nope" / "a.mem")


def test_pieces_joined_are_the_text_that_is_generated_at_once(model: Model, text: str) -> None:
    pieces = list(model.generate(text[:50], num_tokens=60, sampling=SAMPLING))
    reading = read(model.trained, start(model.trained), [model.tokenizer.encode(text[:50])])
    tokens = generate(model.trained, reading, num_tokens=60, sampling=SAMPLING).tokens[0]
    assert "".join(pieces) == model.tokenizer.decode(tokens.numpy())
    assert len(pieces) > 20 and all(pieces)


def test_inspect_compares_the_scores_with_those_without_memory(model: Model, text: str) -> None:
    found = model.inspect(text)
    assert torch.equal(found.nll, model.score(text).nll)
    seg_len = model.trained.config.train.seg_len
    assert torch.equal(found.gain[:seg_len], torch.zeros(seg_len, dtype=torch.float64))
    assert (found.gain[seg_len:] != 0).any() and "memory" in found.layers[0]
    assert [word.word.text for word in found.words()] == text.split()


def test_a_wrong_argument_is_refused_before_anything_is_generated(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused(TypeError, "prompt is 3"):
        model.generate(3)  # type: ignore[arg-type]
    with refused(TypeError, "book.mem", "model.read"):
        model.score("a", memory="book.mem")  # type: ignore[call-overload]
    with refused(ValueError, "num_tokens"):
        model.generate("a", num_tokens=-1)
    with refused(UnusableError, "nope.mem"):
        dist_mem.Memory.load(tmp_path / "nope.mem")
    with refused(TypeError, "text is 3"):
        model.inspect(3)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mlflow", None)  # as Python reports a module that is not there
    with refused(UnusableError, "models:/a@b"):
        dist_mem.load("models:/a@b")


def test_a_memory_of_another_model_is_refused(model: Model, text: str, tmp_path: Path) -> None:
    earlier = dist_mem.load(model.trained.checkpoint.run_dir, step=5)
    memory = earlier.read(text)
    with refused(UnusableError, "demo at step 5", "dist-mem read TEXT"):
        model.score(text, memory=memory)
    same = dist_mem.load(model.trained.checkpoint.run_dir)
    assert torch.equal(same.score(text, memory=model.read(text)).nll, model.score(text, memory=model.read(text)).nll)
