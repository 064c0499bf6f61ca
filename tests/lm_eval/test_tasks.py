"""What tasks of the harness ask of a model is read with defaults and types, before anything is computed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.errors import UnusableError
from dist_mem.generation.generate import Sampling
from dist_mem.lm_eval import model as lm_eval_model
from dist_mem.lm_eval import run_tasks
from dist_mem.lm_eval.answers import AnswerLog
from dist_mem.lm_eval.model import DistMemLM, read_generation
from dist_mem.lm_eval.run_tasks import LmEvalRequest
from tests.support.messages import refused, said

TASK = (
    "task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {cache}}}\n"
    'test_split: test\ndoc_to_text: "{{{{question}}}}"\ndoc_to_target: b\n{more}'
)
CHOICE = 'output_type: multiple_choice\ndoc_to_choice: ["a", "b"]\n'
# A task of RULER's kind: it makes its texts with a tokenizer that it opens by name, to lengths that it is given.
MADE = """task: made
dataset_path: ""
custom_dataset: !function made.documents
output_type: generate_until
test_split: test
doc_to_text: "{{text}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: [], max_gen_toks: 2}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
MAKER = """
import datasets


def documents(tokenizer=None, max_seq_lengths=(32,), **_):
    if tokenizer is None:
        raise ValueError("no tokenizer was given")
    from transformers import AutoTokenizer

    opened, texts = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=True), []
    for length in max_seq_lengths:
        text = "a "
        while len(opened(text + "a ").input_ids) <= length:
            text += "a "
        texts.append({"text": text, "target": str(len(opened(text).input_ids))})
    return {"test": datasets.Dataset.from_list(texts)}
"""


def add_task(folder: Path, name: str, more: str) -> None:
    (folder / "data.jsonl").write_text(json.dumps({"question": "It was"}) + "\n", encoding="utf-8")
    text = TASK.format(name=name, data=folder / "data.jsonl", cache=folder / "cache", more=more)
    (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


# Of every entry that is read: what is accepted, and what is not.
GENERATION: dict[str, tuple[list[Any], list[Any]]] = {
    "until": (["a", ["a", "b"], [], None], [[1], 1, True]),
    **dict.fromkeys(
        ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"), ([1, 9], [0, -1, 1.5, "9", True])
    ),
    "do_sample": ([True, False, None], ["false", "False", 0, 1]),
    "temperature": ([0, 0.5, 1, None], ["0.5", True, float("nan"), -1.0]),
    "top_p": ([0.5, 1, None], ["0.5", True, 0.0, 2.0]),
    "top_k": ([5, 0, -1, None], ["5", True, 1.5, -2]),
}


def test_every_entry_of_generation_kwargs_that_is_read_has_a_type_and_a_default() -> None:
    assert GENERATION.keys() == lm_eval_model._TYPES.keys()
    for name, (right, wrong) in GENERATION.items():
        for value in right:
            read_generation({"do_sample": True, name: value})
        for value in wrong:
            with refused(UnusableError, "generation_kwargs", name):
                read_generation({"do_sample": True, name: value})
    assert read_generation({}).sampling == Sampling(0.0)
    assert read_generation({"do_sample": True}).sampling == Sampling(1.0)
    assert read_generation({"do_sample": True, "temperature": None}).sampling == Sampling(1.0)
    assert read_generation({"do_sample": False, "temperature": 0.7}).sampling == Sampling(0.0)


def test_a_wrong_generation_is_refused_before_the_first_answer_of_any_task(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_task(tmp_path, "choose", CHOICE)
    add_task(tmp_path, "write", 'output_type: generate_until\ngeneration_kwargs: {until: [a], do_sample: "false"}\n')
    answered: list[Any] = []
    monkeypatch.setattr(DistMemLM, "loglikelihood", answered.append)
    assert main(["lm-eval", str(model), "--tasks", "choose,write", "--include-path", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    said(error, "error: ", "write", "do_sample")
    assert not answered


def test_a_task_that_makes_its_data_gets_the_tokenizer_of_the_model_and_the_lengths_of_the_command(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "made.yaml").write_text(MADE, encoding="utf-8")
    (tmp_path / "made.py").write_text(MAKER, encoding="utf-8")
    asked = ["lm-eval", str(model), "--tasks", "made", "--include-path", str(tmp_path)]
    out = tmp_path / "found.json"
    assert main([*asked, "--output", str(out), "--metadata", '{"max_seq_lengths": [21, 41]}']) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["n-samples"]["made"]["original"] == 2
    metadata = found["configs"]["made"]["metadata"]
    assert metadata["max_seq_lengths"] == [21, 41] and "tokenizer" not in metadata
    assert main([*asked, "--metadata", '{"max_seq_lengths": [21]}']) == 0
    reports = list((model / "evaluations" / "lm_eval").glob("made-step-*-metadata_??????.json"))
    assert len(reports) == 2, "none has replaced the other"


def test_tasks_and_data_of_the_same_names_from_another_folder_have_reports_of_their_own(tmp_path: Path) -> None:
    folders = [None, tmp_path, tmp_path / "other"]
    asked = [LmEvalRequest(tmp_path, [], ["same"], tasks, datasets=data) for tasks in folders for data in folders]
    assert len({tuple(run_tasks._parts(request, None)) for request in asked}) == len(asked)


def test_kept_answers_end_at_a_line_that_is_none(tmp_path: Path) -> None:
    for line in ("[", "{}", '["a"]', "[" * 10**5):
        path, settings = tmp_path / "answers.jsonl", {"step": 1}
        path.write_text(f'{{"step": 1}}\n["a", 1]\n{line}\n["b", 2]\n', encoding="utf-8")
        with AnswerLog(path, settings) as log:
            assert log.found == {"a": 1}


def test_a_second_command_of_the_same_tasks_is_refused_while_the_first_answers(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of one were lost, and the other removed the file of both."""
    add_task(tmp_path, "choose", CHOICE)
    command, codes = ["lm-eval", str(model), "--tasks", "choose", "--include-path", str(tmp_path)], list[int]()
    answer = DistMemLM.loglikelihood

    def answer_beside(lm: DistMemLM, requests: list[Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(DistMemLM, "loglikelihood", answer)
            codes.append(main(command))
        return answer(lm, requests)

    monkeypatch.setattr(DistMemLM, "loglikelihood", answer_beside)
    assert main(command) == 0
    assert codes == [2]
    said(capsys.readouterr().err, "choose-step-", "another command is writing there")


def test_a_run_that_cannot_be_written_is_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(model, run, ignore=shutil.ignore_patterns("evaluations"))
    (run / "evaluations").touch()
    add_task(tmp_path, "choose", CHOICE)
    assert main(["lm-eval", str(run), "--tasks", "choose", "--include-path", str(tmp_path)]) == 2
    said(capsys.readouterr().err, run / "evaluations")


def test_lengths_without_a_number_are_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("", ","):
        with pytest.raises(SystemExit) as ended:
            main(["lm-eval", str(model), "--tasks", "made", "--lengths", text])
        assert ended.value.code == 2
        said(capsys.readouterr().err, "--lengths")


def test_metadata_that_are_no_object_are_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("max_seq_lengths", "[4096]", "[" * 10**5):
        with pytest.raises(SystemExit) as ended:
            main(["lm-eval", str(model), "--tasks", "made", "--metadata", text])
        assert ended.value.code == 2
        said(capsys.readouterr().err, "--metadata")


def test_a_task_without_a_tokenizer_says_why_the_model_has_none(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dist_mem.data.tokenizers import fast

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("a SentencePiece model that is not BPE gives other ids as a fast tokenizer")

    monkeypatch.setattr(fast, "fast_tokenizer", refuse)
    (tmp_path / "made.yaml").write_text(MADE, encoding="utf-8")
    (tmp_path / "made.py").write_text(MAKER, encoding="utf-8")
    assert main(["lm-eval", str(model), "--tasks", "made", "--include-path", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    said(error, "error: ", "made", "--metadata")
