"""`dist-mem lm-eval --lengths`: the harness's prompts, one table, one reading; a command that was stopped goes on."""

import csv
import json
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pytest
from lm_eval.tasks import TaskManager

from dist_mem.__main__ import main
from dist_mem.generation.generate import Sampling, generate
from dist_mem.generation.reading import read, start
from dist_mem.lm_eval import model as lm_eval_model
from dist_mem.lm_eval import segment_tree, writing
from dist_mem.lm_eval.model import DistMemLM
from dist_mem.lm_eval.segment_tree import join_lanes
from dist_mem.lm_eval.tasks import load_tasks
from dist_mem.lm_eval.writing import Prompt, write_until
from tests.support.contract_cases import SEG_LEN, case_params
from tests.support.generating import BOS, float32_model
from tests.support.messages import said

METRIC = "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
TASK = (
    'task: {name}\ndataset_path: ""\ncustom_dataset: !function made.{function}\noutput_type: generate_until\n'
    'test_split: test\ndoc_to_text: "{{{{text}}}}"\ndoc_to_target: "{{{{target}}}}"\n'
    "generation_kwargs: {{until: [], max_gen_toks: 3, do_sample: {sampled}}}\n{more}"
)
# As tasks of RULER and BABILong: texts drawn at random to lengths; texts whose lengths have names.
MADE = """
import random

import datasets


def drawn(max_seq_lengths=(4096,), **_):
    texts = [
        {"text": "".join(random.choice("abcd ") for _ in range(length)), "target": "a", "length": length}
        for length in max_seq_lengths
        for _ in range(5)
    ]
    return {"test": datasets.Dataset.from_list(texts)}


def by_length(doc, results):
    return {str(doc["length"]): 1.0, "4096": 0.5 if doc["length"] == 4096 else -1}


def known_mean(values):
    known = [value for value in values if value != -1]
    return sum(known) / len(known) if known else -1


def named(max_seq_lengths="0k", **_):
    return {"test": datasets.load_dataset("owner/named", name=max_seq_lengths, split="test")}


GENERATOR = random.Random(42)


def continued(max_seq_lengths=(4096,), **_):
    texts = [{"text": str(GENERATOR.random()), "target": "a"} for _ in max_seq_lengths]
    return {"test": datasets.Dataset.from_list(texts)}
"""
GROUP = "group: pair\ntask: [one, two]\naggregate_metric_list: [{metric: '4096', weight_by_size: false}]\n"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "made.py").write_text(MADE, encoding="utf-8")
    scored = (
        "process_results: !function made.by_length\nmetric_list:\n- metric: '4096'\n"
        "  aggregation: !function made.known_mean\n  higher_is_better: true\n"
    )
    for name, function, sampled, more in (
        ("one", "drawn", "false", scored),
        ("two", "drawn", "true", scored),
        ("babilong_here", "named", "false", METRIC),
    ):
        text = TASK.format(name=name, function=function, sampled=sampled, more=more)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    (folder / "pair.yaml").write_text(GROUP, encoding="utf-8")
    return folder


def copy_of_a_dataset(folder: Path) -> Path:
    """Write a folder as `--datasets` takes it, with a dataset of texts of 1k and 2k."""
    named, configs = folder / "owner" / "named", []
    for length in ("1k", "2k"):
        path = named / "data" / f"{length}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": f"a text of {length}", "target": "a"}) + "\n", encoding="utf-8")
        configs.append(f"- config_name: '{length}'\n  data_files: [{{split: test, path: data/{length}.jsonl}}]\n")
    (named / "README.md").write_text(f"---\nconfigs:\n{''.join(configs)}---\n", encoding="utf-8")
    return folder


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The contexts that models of this process are asked to continue."""
    seen: list[str] = []
    inner = DistMemLM.generate_until

    def record(self: DistMemLM, requests: Any) -> list[str]:
        seen.extend(request.args[0] for request in requests)
        return inner(self, requests)

    monkeypatch.setattr(DistMemLM, "generate_until", record)
    return seen


def ask(model: Path, tasks: Path, *arguments: str) -> int:
    return main(["lm-eval", str(model), "--include-path", str(tasks), *arguments])


def test_every_length_has_the_prompts_of_the_harness_and_its_place_in_the_table(
    model: Path, tasks: Path, prompts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    random.seed()  # whatever was drawn before
    copies = copy_of_a_dataset(tmp_path / "copies")
    given = ["--tasks", "pair,babilong_here", "--lengths", "2k,1k", "--datasets", str(copies)]
    assert ask(model, tasks, *given) == 0
    ours = list(prompts)
    expected: list[str] = []
    for length, name in ((1024, "1k"), (2048, "2k")):
        prompts.clear()
        manager = TaskManager(include_path=tasks, include_defaults=False, metadata={"max_seq_lengths": [length]})
        lm_eval.simple_evaluate("dist_mem", f"run={model}", tasks=["pair"], task_manager=manager, log_samples=False)
        expected += [*prompts, f"a text of {name}"]
    assert sorted(ours) == sorted(expected) and len(set(ours)) == 2 * (5 + 5 + 1)
    (table,) = (model / "evaluations" / "lm_eval").glob("*.csv")
    header, *rows = csv.reader(table.read_text(encoding="utf-8").splitlines())
    assert header == ["task", "metric", "1024", "2048"]
    assert {tuple(row[:2]): row[2:] for row in rows if row[0] in ("one", "two", "pair")} == {
        (name, "score"): ["1.0000", "1.0000"] for name in ("one", "two", "pair")
    }
    assert ["babilong_here", "exact_match"] in [row[:2] for row in rows]
    assert not list((model / "evaluations" / "lm_eval").glob("*.answers.jsonl"))


def test_texts_of_a_length_do_not_depend_on_what_was_loaded_before(tasks: Path) -> None:
    """Also where a generator of the task's module goes on from load to load, as that of RULER's ruler_cwe does."""
    text = TASK.format(name="continued", function="continued", sampled="false", more=METRIC)
    (tasks / "continued.yaml").write_text(text, encoding="utf-8")
    found = [load_tasks(["continued"], tasks, length=length)["tasks"]["continued"] for length in (64, 32, 64)]
    alone, _, again = (list(task.dataset["test"]["text"]) for task in found)
    assert again == alone


def test_what_has_no_texts_of_a_length_is_refused_before_the_first_answer_and_what_is_said_works(
    model: Path,
    tasks: Path,
    prompts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(*arguments: str, named: tuple[str, ...], fixes: Sequence[Sequence[str]] = ()) -> None:
        assert ask(model, tasks, *arguments) == 2
        said(capsys.readouterr().err, "error: ", *named)
        assert not prompts
        for fix in fixes:
            assert ask(model, tasks, *fix) == 0
            assert prompts
            prompts.clear()
        capsys.readouterr()

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    copies = ["--datasets", str(copy_of_a_dataset(tmp_path / "copies"))]
    named_length = ["--tasks", "babilong_here", "--lengths", "1k", *copies]
    check("--tasks", "babilong_here", "--lengths", "1000", named=("--lengths 1000", "1k"), fixes=[named_length])
    missing = ("babilong_here", "4k", "--lengths 4096", "'1k', '2k'", "leave")
    without = [["--tasks", "one,babilong_here", "--lengths", "1k"], ["--tasks", "one", "--lengths", "1k,4k"]]
    fixes = [[*words, *copies] for words in without]
    check("--tasks", "one,babilong_here", "--lengths", "1k,4k", *copies, named=missing, fixes=fixes)
    (tasks / "data.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    (tasks / "fixed.yaml").write_text(
        f"task: fixed\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tasks / 'data.jsonl'}}}, cache_dir: "
        f"{tmp_path / 'cache'}}}\ntest_split: test\noutput_type: generate_until\ndoc_to_text: a\ndoc_to_target: b\n",
        encoding="utf-8",
    )
    check("--tasks", "fixed", "--lengths", "1k", named=("--lengths", "fixed"), fixes=[["--tasks", "fixed"]])
    one, metadata = ["--tasks", "one"], ["--metadata", '{"max_seq_lengths": [1]}']
    fixes = [[*one, "--lengths", "1k"], [*one, *metadata]]
    check(*one, "--lengths", "1k", *metadata, named=("--lengths", "--metadata"), fixes=fixes)
    check(*one, "--lengths", "1k", "--datasets", str(tmp_path / "none"), named=("--datasets", "none"))
    to_file = ["--output", str(tmp_path / "out.json")]
    fixes = [[*one, "--lengths", "1k", *to_file], [*one, "--lengths", "1k,2k"]]
    check(*one, "--lengths", "1k,2k", *to_file, named=("--output",), fixes=fixes)
    for wrong in ("1.5k", "k", "0", "1k,1024"):
        with pytest.raises(SystemExit):
            ask(model, tasks, "--tasks", "one", "--lengths", wrong)


def test_a_command_that_was_stopped_goes_on_with_the_same_answers(
    model: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "whole.json"
    given = ["--tasks", "pair", "--lengths", "64", "eval.batch_size=2"]
    assert ask(model, tasks, *given, "--output", str(out)) == 0
    written, inner, limit = [0], write_until, [4]

    def write(trained: Any, chosen: Any, *, finished: Callable[[int, str], None], **options: Any) -> Any:
        def keep(number: int, text: str) -> None:
            finished(number, text)
            written[0] += 1
            if written[0] == limit[0]:
                raise KeyboardInterrupt

        return inner(trained, chosen, finished=keep, **options)

    monkeypatch.setattr(lm_eval_model, "write_until", write)
    assert ask(model, tasks, *given) == 128 + signal.SIGINT
    (log,) = (model / "evaluations" / "lm_eval").glob("*.answers.jsonl")
    kept = log.read_bytes()
    assert kept.count(b"\n") == 1 + 4
    log.write_bytes(kept[:-5])  # the last line was cut off
    written[0], limit[0] = 0, -1
    again = tmp_path / "again.json"
    assert ask(model, tasks, *given, "--output", str(again)) == 0
    assert written[0] == 10 - 3 and not log.exists()
    assert json.loads(again.read_text("utf-8")) == json.loads(out.read_text("utf-8"))
    written[0], limit[0] = 0, 14
    two = ["--tasks", "pair", "--lengths", "32,64", "eval.batch_size=2"]
    assert ask(model, tasks, *two) == 128 + signal.SIGINT
    written[0], limit[0] = 0, -1
    assert ask(model, tasks, *two) == 0 and written[0] == 20 - 14, "also those of the first length are kept"
    assert not list(log.parent.glob("*.answers.jsonl"))
    log.write_bytes(kept.replace(b'"step"', b'"Step"', 1))  # of another model
    written[0] = 0
    assert ask(model, tasks, *given) == 0
    assert written[0] == 10


@pytest.mark.parametrize("case", case_params())
def test_prompts_that_begin_alike_are_read_once_and_written_as_alone(case: str) -> None:
    trained, draw = float32_model(case), np.random.default_rng(5)
    book = draw.integers(0, BOS, 3 * SEG_LEN + 1)
    rows = [*(np.concatenate([book, draw.integers(0, BOS, more)]) for more in (1, 2, SEG_LEN)), book[:2], book[:0]]
    prompts = {number: Prompt(row, (), SEG_LEN, Sampling(0.0)) for number, row in enumerate([*rows, rows[0]])}
    passes: list[int] = []
    trained.model.register_forward_hook(lambda *_: passes.append(1))  # of complete segments; what follows takes steps
    texts = write_until(trained, prompts, num_lanes=len(prompts))
    assert len(passes) == 3 + 1, "the segments of the book, and one more of the longest prompt"
    for number, prompt in prompts.items():
        reading = read(trained, start(trained), [prompt.tokens])
        alone = generate(trained, reading, num_tokens=SEG_LEN, sampling=Sampling(0.0)).tokens[0]
        assert texts[number] == trained.tokenizer.decode(alone)


def test_a_memory_is_kept_once_for_all_prompts_that_begin_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the empty memory, of prompts within their first segment."""
    trained, draw = float32_model("transformer_xl"), np.random.default_rng(7)
    book, questions = draw.integers(0, BOS, SEG_LEN), draw.integers(0, BOS, (BOS, SEG_LEN))
    rows = [*(np.concatenate([book, question]) for question in questions), *questions[:, :1]]
    kept = dict[int, Any]()

    def join(states: Sequence[Any]) -> Any:
        kept.update((id(state), state) for state in states)
        return join_lanes(states)

    for module in (segment_tree, writing):
        monkeypatch.setattr(module, "join_lanes", join)
    prompts = {number: Prompt(row, (), 1, Sampling(0.0)) for number, row in enumerate(rows)}
    write_until(trained, prompts, num_lanes=len(prompts))
    assert len(kept) == 1 + 1 + len(questions) + 1, "the empty one of each module, the book's, and each question's"


def test_prompts_of_several_lengths_and_samplings_are_read_once_together() -> None:
    trained, draw = float32_model("transformer_xl"), np.random.default_rng(6)
    book = draw.integers(0, BOS, 4 * SEG_LEN)
    rows = [*(np.concatenate([book, [question]]) for question in range(BOS)), book[:2], book[:0]]
    asked = [(length, sampling) for length in (1, 2) for sampling in (Sampling(0.0), Sampling(1.0))]
    prompts = {number: Prompt(row, (), *asked[number % len(asked)]) for number, row in enumerate(rows)}
    passes: list[int] = []
    hook = trained.model.register_forward_hook(lambda *_: passes.append(1))
    finished = dict[int, str]()
    texts = write_until(trained, prompts, num_lanes=2, finished=finished.__setitem__)
    num_reading = len(passes)
    hook.remove()
    assert texts == finished and texts.keys() == prompts.keys()
    alone: dict[int, str] = {}
    for number, prompt in prompts.items():
        alone |= write_until(trained, {number: prompt}, num_lanes=2)
    assert texts == alone
    assert num_reading == 4, "the segments of the book, whatever is asked about it"
