"""The Python API equals the functions and commands below it, bit for bit, without loading DeepSpeed or MLflow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dist_mem
from dist_mem.__main__ import main
from dist_mem.api.model import Model
from dist_mem.errors import UnusableError
from dist_mem.generation.generate import generate
from dist_mem.generation.reading import read, start
from dist_mem.generation.text_memory import load_memory, read_text, save_memory
from dist_mem.generation.text_scores import score
from tests.generation.test_memory_files import model as trained_model
from tests.generation.test_memory_files import words
from tests.support.contract_cases import SEG_LEN, case_params
from tests.support.messages import refused

pytestmark = pytest.mark.ranks

SAMPLING = dist_mem.Sampling(temperature=0.9, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def model(api_folder: Path) -> Model:
    return dist_mem.load(api_folder / "runs" / "demo")


@pytest.fixture(scope="module")
def text(api_folder: Path) -> str:
    return (api_folder / "book.txt").read_text(encoding="utf-8")


def test_scores_are_those_of_the_function_below(model: Model, text: str) -> None:
    scores, expected = model.score(text), score(model.trained, text)
    assert torch.equal(scores.nll, expected.nll) and (scores.tokens == expected.tokens).all()
    assert "".join(scores.pieces) == text and scores.memory.num_tokens == len(text)
    assert scores.mean == float(expected.nll.double().mean())
    several = model.score([text, text[:5]])
    assert torch.equal(several[0].nll, expected.nll) and len(several) == 2 and model.score([]) == []
    assert torch.equal(model.score(scores.tokens).nll, expected.nll), "token ids"


def test_scores_are_those_of_an_evaluation(model: Model, text: str) -> None:
    from dist_mem.evaluation.evaluate import evaluate_checkpoint
    from tests.support.scored_library import ALONE

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
    save_memory(model.trained, read_text(model.trained, text, name="book.txt"), paths[2])
    assert paths[0].read_bytes() == paths[1].read_bytes() == paths[2].read_bytes()
    assert load_memory(model.trained, paths[0]).num_tokens == len(text)
    with refused(UnusableError, "a.mem"):
        model.read(text).save(tmp_path / "nope" / "a.mem")


def test_pieces_joined_are_the_text_that_is_generated_at_once(model: Model, text: str) -> None:
    pieces = list(model.generate(text[:50], num_tokens=60, sampling=SAMPLING))
    reading = read(model.trained, start(model.trained), [model.tokenizer.encode(text[:50])])
    tokens = generate(model.trained, reading, num_tokens=60, sampling=SAMPLING).tokens[0]
    assert "".join(pieces) == model.tokenizer.decode(tokens.numpy())
    assert len(pieces) > 20 and all(pieces)


def test_text_is_that_of_the_command(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = str(model.trained.checkpoint.run_dir)
    assert main(["generate", run_dir, "--prompt", "koko ", "--tokens", "20", "--seed", "5"]) == 0
    from dist_mem.runtime.terminal import printable

    sampling = dist_mem.Sampling(top_p=0.95, seed=5)
    assert (
        capsys.readouterr().out == printable("".join(model.generate("koko ", num_tokens=20, sampling=sampling))) + "\n"
    )


def test_inspect_compares_the_scores_with_those_without_memory(model: Model, text: str) -> None:
    found = model.inspect(text)
    assert torch.equal(found.nll, model.score(text).nll)
    seg_len = model.trained.config.train.seg_len
    assert torch.equal(found.gain[:seg_len], torch.zeros(seg_len, dtype=torch.float64))
    assert (found.gain[seg_len:] != 0).any() and "memory" in found.layers[0]
    assert [word.word.text for word in found.words()] == text.split()


def test_a_wrong_argument_is_refused_before_anything_is_generated(model: Model, tmp_path: Path) -> None:
    with refused(TypeError):
        model.generate(3)  # type: ignore[arg-type]
    with refused(TypeError, "book.mem", "model.read"):
        model.score("a", memory="book.mem")  # type: ignore[call-overload]
    with refused(ValueError, "num_tokens"):
        model.generate("a", num_tokens=-1)
    with refused(UnusableError, "nope.mem"):
        dist_mem.Memory.load(tmp_path / "nope.mem")
    with refused(TypeError):
        model.inspect(3)  # type: ignore[arg-type]


def test_a_memory_of_another_model_is_refused(model: Model, text: str, tmp_path: Path) -> None:
    earlier = dist_mem.load(model.trained.checkpoint.run_dir, step=5)
    memory = earlier.read(text)
    with refused(UnusableError):
        model.score(text, memory=memory)
    same = dist_mem.load(model.trained.checkpoint.run_dir)
    assert torch.equal(same.score(text, memory=model.read(text)).nll, model.score(text, memory=model.read(text)).nll)


PROGRAM = """\
import sys, dist_mem
assert "torch" not in sys.modules
model = dist_mem.load("runs/demo")
memory = model.read("ba ko mi ru ten sol qua ver")
model.score("ba ko", memory=memory)
list(model.generate("ba", memory=memory, num_tokens=3))
print(sorted({"deepspeed", "mlflow"} & sys.modules.keys()))
"""


def test_scoring_and_generating_load_neither_deepspeed_nor_mlflow(api_folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=api_folder, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("case", case_params())
def test_every_memory_stands_for_the_text_before(case: str) -> None:
    model = Model(trained_model(case))
    before, after = words(2 * SEG_LEN + 3), words(SEG_LEN, seed=4)
    memory = model.read(before)
    joined = model.tokenizer.encode(before).tolist() + model.tokenizer.encode(after).tolist()
    assert torch.equal(model.score(after, memory=memory).nll, model.score(joined).nll[-SEG_LEN:])
    both = list(model.generate(f"{before} {after}", num_tokens=5, sampling=SAMPLING))
    assert list(model.generate(after, memory=memory, num_tokens=5, sampling=SAMPLING)) == both
