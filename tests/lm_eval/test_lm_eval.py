"""`dist-mem lm-eval` on local tasks: figures are those of `evaluate` and `generate`; passages score as read alone."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lm_eval
import numpy as np
import pytest
import torch
from lm_eval.tasks import TaskManager

import dist_mem
from dist_mem.__main__ import main
from dist_mem.data.tokenizers.registry import find_tokenizer
from dist_mem.datasets.builder import build_dataset
from dist_mem.datasets.source import SourceDocument
from dist_mem.errors import UnusableError
from dist_mem.evaluation.scoring import EvaluationError
from dist_mem.evaluation.trained_model import load_model
from dist_mem.generation.generate import Sampling, generate
from dist_mem.generation.reading import read, start
from dist_mem.generation.text_scores import score
from dist_mem.lm_eval import model as lm_eval_model
from dist_mem.lm_eval.model import DistMemLM, encode_pair
from dist_mem.lm_eval.passages import ScoredText, score_passages
from dist_mem.memory import memory_kinds
from tests.support.contract_cases import SEG_LEN as SHORT
from tests.support.contract_cases import case_params
from tests.support.generating import BOS, float32_model
from tests.support.jobs import build_books, train_here, write_config
from tests.support.messages import refused, said
from tests.support.published_tokenizers import save_published
from tests.support.ranks import Pools
from tests.support.run_memories import small_memory
from tests.support.scored_library import Request

SEG_LEN = 16  # of jobs.write_config
QUESTIONS: list[dict[str, Any]] = [
    {"question": "bako miru solqua tensol verba", "choices": ["tensol", "verba", "bako miru"], "gold": 0},
    {"question": "solqua tenmi ", "choices": ["verba", "komi", "ruru"], "gold": 2},
]
METRICS = "metric_list: [{{metric: {}, aggregation: {}, higher_is_better: {}}}]\n"
TASKS = {
    "questions": 'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\n'
    "doc_to_target: gold\n" + METRICS.format("acc", "mean", "true"),
    "next": 'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{choices[gold]}}"\n'
    'generation_kwargs: {until: ["a"], max_gen_toks: 24}\n' + METRICS.format("exact_match", "mean", "true"),
    "books": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\nmetric_list:\n'
    + "".join(
        f"  - {{metric: {name}, aggregation: {how}, higher_is_better: false}}\n"
        for name, how in [
            ("word_perplexity", "weighted_perplexity"),
            ("byte_perplexity", "weighted_perplexity"),
            ("bits_per_byte", "bits_per_byte"),
        ]
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data whose documents do not end with white space, which the harness counts as a word, and local tasks on them."""
    folder = tmp_path_factory.mktemp("lm_eval")
    build_books(folder / "with_line_ends")
    sources: dict[str, list[SourceDocument]] = {"train": [], "validation": [], "test": []}
    for path in sorted((folder / "with_line_ends" / "texts").glob("*/*.txt")):
        text_file = folder / f"{path.parent.name}-{path.name}"
        text_file.write_text(path.read_text(encoding="utf-8").strip(), encoding="utf-8")
        sources[path.parent.name].append(SourceDocument(id=path.stem, title=path.stem, source=text_file, year=1900))
    build_dataset(sources, folder / "shards", name="tiny", tokenizer_kind="bytes")
    texts: list[dict[str, Any]] = [{"text": path.read_text("utf-8")} for path in sorted(folder.glob("test-*.txt"))]
    (folder / "tasks").mkdir()
    for name, content in TASKS.items():
        lines = texts if name == "books" else QUESTIONS
        data = folder / f"{name}.jsonl"
        data.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        source = (
            f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}, cache_dir: {folder / 'cache'}}}\n"
        )
        task = f"task: {name}\n{source}test_split: test\n{content}"
        (folder / "tasks" / f"{name}.yaml").write_text(task, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained_run(folder: Path, rank_pool: Pools) -> Callable[..., Path]:
    """Train a run of two steps, once for every memory and change."""

    def train(kind: str, name: str = "", **changes: Any) -> Path:
        run = folder / (name or kind)
        if not run.exists():
            small = {"train": {"steps": 2, "global_batch_size": 2, "micro_batch_size": 2}, "model": {"dropout": 0.0}}
            given = folder / f"{run.name}.yaml", folder / "shards", run
            config = write_config(*given, small, changes, memory=small_memory(kind))
            assert rank_pool(1).run(train_here, config) == [0]
        return run

    return train


def ask(run: Path, folder: Path, *arguments: str, tasks: str = "questions,next,books") -> int:
    return main(["lm-eval", str(run), "--tasks", tasks, "--include-path", str(folder / "tasks"), *arguments])


def results(run: Path) -> dict[str, Any]:
    (path,) = (run / "evaluations" / "lm_eval").glob("*.json")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize(
    "options", [{"checkpoint": 999}, {"device": "cuda"}, {"batch_size": 2}, {"eval.precision": "bf16"}], ids=repr
)
def test_a_loaded_model_takes_no_argument_of_loading(options: dict[str, Any]) -> None:
    """They were passed over."""
    with refused(UnusableError, next(iter(options))):
        DistMemLM(float32_model(), **options)


def test_a_loaded_model_in_blocks_is_refused() -> None:
    with refused(UnusableError, "data.blocks", "eval.blocks=false"):
        DistMemLM(float32_model(blocks=True))


def test_a_search_for_a_batch_size_is_refused(tmp_path: Path) -> None:
    for batch_size in (None, 2):
        with refused(UnusableError, "max_batch_size"):
            DistMemLM(str(tmp_path), max_batch_size=4, batch_size=batch_size)


def choice_log_prob(trained: Any, question: str, choice: str) -> float:
    context, continuation = encode_pair(trained.tokenizer, question, f" {choice}")
    return -float(score(trained, continuation, after=read(trained, start(trained), [context])).nll.sum())


@pytest.mark.parametrize(
    ("kind", "changes"), [*((kind, {}) for kind in memory_kinds()), ("none", {"data": {"cut": "end"}})]
)
def test_figures_are_those_of_the_other_commands(
    kind: str, changes: dict[str, Any], folder: Path, trained_run: Callable[..., Path], single_process: None
) -> None:
    run = trained_run(kind, "cut" if changes else "", **changes)
    assert ask(run, folder) == 0
    found = results(run)["results"]
    assert main(["evaluate", str(run), "--split", "test"]) == 0
    report = json.loads((run / "evaluations" / "test-step-00000002.json").read_text(encoding="utf-8"))["metrics"]
    for name in ("word_perplexity", "bits_per_byte"):
        assert found["books"][f"{name},none"] == pytest.approx(report[f"test/{name}"], rel=1e-6)
    bits = report["test/bits_per_byte"]
    assert found["books"]["byte_perplexity,none"] == pytest.approx(2**bits, rel=1e-6)
    trained = load_model(run)
    right = 0
    for question in QUESTIONS:
        log_probs = [choice_log_prob(trained, question["question"], choice) for choice in question["choices"]]
        right += max(range(3), key=log_probs.__getitem__) == question["gold"]
    assert found["questions"]["acc,none"] == right / len(QUESTIONS)
    assert 0.0 <= found["next"]["exact_match,none"] <= 1.0


def test_a_text_ends_before_its_first_stop_string(folder: Path, trained_run: Callable[..., Path]) -> None:
    trained = load_model(trained_run("transformer_xl"))
    model = DistMemLM(trained)

    def written(*requests: tuple[str, dict[str, Any]]) -> list[str]:
        return model.generate_until([Request(arguments) for arguments in requests])

    contexts = ["bako miru", "", "tensol verba" * 4, "bako miru"]
    free = written(*[(context, {"max_gen_toks": 40}) for context in contexts])
    for context, text in zip(contexts, free, strict=True):
        reading = read(trained, start(trained), [trained.tokenizer.encode(context)])
        greedy = generate(trained, reading, num_tokens=40, sampling=Sampling(temperature=0.0))
        assert text == trained.tokenizer.decode(greedy.tokens[0])
        stop = text[len(text) // 2 :][:2]
        assert written((context, {"max_gen_toks": 40, "until": [stop, "no such text"]})) == [text[: text.find(stop)]]
    nothing = {"num_beams": 1, "repetition_penalty": 1.0, "top_k": 0, "temperature": None, "use_cache": True}
    assert written(("bako miru", {"max_gen_toks": 40, **nothing})) == free[:1]
    for asked in ({"num_beams": 2}, {"top_k": "many"}, {"tmp": 1}):
        with refused(dist_mem.errors.UnusableError, "generation_kwargs", *asked):
            written(("a", {"do_sample": True, "temperature": 1.0, **asked}))


def test_white_space_at_the_end_of_a_context_belongs_to_the_continuation(
    folder: Path, trained_run: Callable[..., Path]
) -> None:
    trained = load_model(trained_run("transformer_xl"))
    before, after = encode_pair(trained.tokenizer, "bako \n", "miru")
    assert (trained.tokenizer.decode(before), trained.tokenizer.decode(after)) == ("bako", " \nmiru")
    model = DistMemLM(trained)
    one, other = model.loglikelihood([Request(("bako ", "miru")), Request(("bako", " miru"))])
    assert one == other and one[0] < 0
    with refused(dist_mem.errors.UnusableError, "the continuation ''"):
        model.loglikelihood([Request(("bako", ""))])


def test_a_continuation_that_joins_the_last_token_is_scored_once_it_begins_with_white_space(tmp_path: Path) -> None:
    tokenizer = find_tokenizer(save_published("gpt2", tmp_path))
    word = max((tokenizer.decode([token]) for token in range(tokenizer.vocab_size)), key=len).strip()
    with refused(dist_mem.errors.UnusableError, repr(word[-1]), "white space"):
        lm_eval_model._passage(tokenizer, word[:-1], word[-1])
    passage = lm_eval_model._passage(tokenizer, word[:-1], f" {word[-1]}")
    assert 0 < passage.first_scored < len(passage.tokens)


def test_the_harness_itself_opens_a_run_by_name(
    folder: Path, trained_run: Callable[..., Path], single_process: None
) -> None:
    run = trained_run("transformer_xl", "by_name")
    assert ask(run, folder) == 0
    manager = TaskManager(include_path=folder / "tasks", include_defaults=False)
    given = {"tasks": list(TASKS), "task_manager": manager, "batch_size": 8, "log_samples": False}
    found = lm_eval.simple_evaluate("dist_mem", f"run={run},eval.precision=fp32", **given)
    assert found is not None
    ours = results(run)["results"]
    for task, values in found["results"].items():
        for key, value in values.items():
            if key.endswith(",none") and not (isinstance(value, float) and math.isnan(value)):
                assert ours[task][key] == value


def test_what_cannot_be_run_is_one_line_and_code_2(
    folder: Path, trained_run: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained_run("transformer_xl")

    def check(code: int, *named: str) -> None:
        assert code == 2
        said(capsys.readouterr().err, "error: ", *named)

    check(ask(run, folder, "eval.blocks=true", tasks="next"), "data.blocks", "eval.blocks=false")
    assert ask(run, folder, "eval.blocks=true", "eval.blocks=false", tasks="next") == 0
    check(ask(run, folder, tasks="question"), "did you mean questions?")
    assert ask(run, folder, tasks="questions") == 0
    capsys.readouterr()
    (folder / "tasks" / "lost.yaml").write_text(
        "task: lost\ndataset_path: json\ndataset_kwargs: {data_files: {test: absent.jsonl}}\ntest_split: test\n"
        "output_type: generate_until\ndoc_to_text: a\ndoc_to_target: b\n",
        encoding="utf-8",
    )
    assert ask(run, folder, tasks="lost") == 2
    assert "error: --tasks lost cannot be loaded: FileNotFoundError: " in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    check(ask(run, folder), "dist-mem[harness]")


CONTEXT_LENS = [0, 1, SHORT - 1, SHORT, SHORT + 1, 3 * SHORT + 2]
LENS = [1, 2, SHORT, 2 * SHORT + 1]
LANES = 3


def passages() -> list[ScoredText]:
    """Four continuations of each of several contexts, of which some begin as others."""
    draw = np.random.default_rng(3)
    longest = draw.integers(0, BOS, max(CONTEXT_LENS))
    return [
        ScoredText(np.concatenate([longest[:length], draw.integers(0, BOS, more)]), first_scored=length)
        for length in CONTEXT_LENS
        for more in LENS
    ]


# A loss in float32 is the difference of numbers of about 5: that of each token rounds by up to 5e-7, even a small one.
ROUNDED = 5e-7 * max(LENS)
# Products of theirs round by the place of a lane in the batch.
ROUNDING = ("infini", "linear", "titans", "block_recurrent", "per block", "armt", "rmt_rows")


@pytest.mark.parametrize("case", case_params())
def test_a_score_is_that_of_the_text_read_alone_and_the_same_bits_whatever_else_is_scored(case: str) -> None:
    """But for products with a matrix or states of the memory, which round by the lane's place among the others."""
    trained, near = float32_model(case), 1e-5 if "armt" in case else 1e-6  # it divides by sums of a few features
    together = score_passages(trained, passages(), num_lanes=LANES)
    read_alone = [-score(trained, tokens).nll[first:].double().sum().item() for tokens, first in passages()]
    assert [result.log_prob for result in together] == pytest.approx(read_alone, rel=near, abs=ROUNDED)
    alone = [score_passages(trained, [passage], num_lanes=LANES)[0] for passage in passages()]
    backwards = score_passages(trained, passages()[::-1], num_lanes=LANES)[::-1]
    for found in (alone, backwards):
        if any(part in case for part in ROUNDING):
            log_probs = [result.log_prob for result in together]
            assert [result.log_prob for result in found] == pytest.approx(log_probs, rel=near, abs=ROUNDED)
        else:
            assert found == together


def test_a_context_is_read_once_for_all_its_continuations() -> None:
    trained, context = float32_model("transformer_xl"), np.arange(5 * SHORT) % BOS
    choices = [ScoredText(np.concatenate([context, [choice, 1]]), first_scored=len(context)) for choice in range(BOS)]
    calls: list[int] = []
    trained.model.embedding.register_forward_hook(lambda *_: calls.append(1))
    score_passages(trained, choices, num_lanes=BOS)
    assert len(calls) == 5 + 1, "the segments of the context, and all continuations in one batch"


def test_what_greedy_generation_writes_is_greedy_and_nothing_else() -> None:
    trained, context = float32_model("lamemo"), np.arange(SHORT + 2)
    reading = read(trained, start(trained), [context])
    written = generate(trained, reading, num_tokens=2 * SHORT, sampling=Sampling(temperature=0.0)).tokens[0].numpy()
    other = written.copy()
    other[-1] = (other[-1] + 1) % BOS
    texts = [np.concatenate([context, end]) for end in (written, other)]
    found = score_passages(trained, [ScoredText(text, len(context)) for text in texts], num_lanes=LANES)
    assert [result.is_greedy for result in found] == [True, False]


def test_an_empty_text_is_certain() -> None:
    assert score_passages(float32_model("none"), [ScoredText(np.zeros(0), 0)], num_lanes=1) == [(0.0, True)]


def test_a_diverged_model_has_no_scores() -> None:
    trained = float32_model("none")
    with torch.no_grad():
        next(trained.model.head.parameters()).fill_(math.nan)
    with refused(EvaluationError, "the log-likelihood of request", "is nan"):
        score_passages(trained, passages(), num_lanes=LANES)
