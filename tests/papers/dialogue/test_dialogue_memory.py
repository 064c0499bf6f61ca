"""`dist-mem dialogue --memory`: perplexity and replies of conversations that continue a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.datasets.builder import build_dataset
from dist_mem.errors import EXIT_DONE
from dist_mem.evaluation.memory_file import read_memory_file
from dist_mem.evaluation.trained_model import load_model
from dist_mem.generation.text_memory import read_text, save_memory
from tests.papers.dialogue.test_dialogue import TURNS, source_document
from tests.support.scored_library import TOKENIZER, make_config, make_model, save_weights


@pytest.mark.usefixtures("single_process")
def test_the_command_continues_the_memory_and_writes_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [source_document(number, turns) for number, turns in enumerate(TURNS)]
    build_dataset({"test": documents}, tmp_path / "talks", name="talks", tokenizer=TOKENIZER)
    run_dir = tmp_path / "run"
    config = make_config(data={"path": str(tmp_path / "talks")}, model={"init_std": 0.3})
    save_weights(run_dir, make_model(), config, step=3)
    trained = load_model(run_dir)
    memory = read_text(trained, "A shark eats a swimmer.", name="film.txt")
    save_memory(trained, memory, tmp_path / "film.mem")
    command = ["dialogue", str(run_dir), "--split", "test", "--limit", "1", "--turns", "1", "--tokens", "3"]
    assert main(command) == EXIT_DONE
    assert main([*command, "--memory", str(tmp_path / "film.mem")]) == EXIT_DONE
    assert ", documents, after film.txt (23 tokens), top-p" in capsys.readouterr().out
    name = "dialogue-test-step-00000003-limit1-turns1-tokens3"
    tag = read_memory_file(tmp_path / "film.mem").tag
    before, after = (json.loads((run_dir / "evaluations" / f"{name}{end}.json").read_text()) for end in ("", f"-{tag}"))
    assert before["groups"][0]["perplexity"] != after["groups"][0]["perplexity"]
    assert "memory_file" not in before
    assert after["memory_file"]["texts"][0]["name"] == "film.txt"
    assert after["settings"]["memory"] == str(tmp_path / "film.mem")
