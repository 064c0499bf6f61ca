"""Evaluation: every token once, the same for any number of lanes and ranks; reports, comparison, the command."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from ranks import RankPool, free_port, launcher_environment

from dist_mem import compare, evaluate, scoring
from dist_mem.config import Config, ConfigError, save_config
from dist_mem.data.batch import IGNORE
from dist_mem.data.shard import Index, TokenizedDocument, read_index, write_split
from dist_mem.data.tokenizer import BytesTokenizer, save_tokenizer
from dist_mem.distributed import World
from dist_mem.evaluate import evaluate_split, short_term_len
from dist_mem.manifest import describe_file, files_in, step_dir, write_manifest
from dist_mem.model import MemoryLM
from dist_mem.report import (
    Band,
    DocumentScore,
    RecallScore,
    Report,
    read_report,
    recall_bands,
    to_csv,
    to_table,
    write_report,
)
from dist_mem.scoring import EvaluationError, evaluate_documents

SEG_LEN, MEM_LEN = 8, 16
TOKENIZER = BytesTokenizer()
ALONE = World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu"))
LENGTHS = (100, 0, 7, 8, 1, 41, 64, 16, 23)  # among them none, one, exactly one segment, one token more than five


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The model is so small that a second thread only waits for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with a split `test` of nine small documents."""
    folder = tmp_path_factory.mktemp("library")
    save_tokenizer(TOKENIZER, folder)
    documents = [make_document(number, length) for number, length in enumerate(LENGTHS)]
    write_split(documents, folder / "test", name="tiny", split="test", tokenizer_fingerprint=TOKENIZER.fingerprint)
    return folder


@pytest.fixture
def index(library: Path) -> Index:
    return read_index(library / "test")


def make_config(**overrides: Any) -> Any:
    small = {
        "model": {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_inner": 32},
        "memory": {"kind": "transformer_xl", "mem_len": MEM_LEN},
        "train": {"seg_len": SEG_LEN, "micro_lanes": 2, "lanes": 4, "precision": "fp32", "steps": 10, "threads": 1},
        "tracking": {"mlflow": False},
        "deepspeed": {},
    }
    config = OmegaConf.structured(Config(memory={}, deepspeed={}))
    return OmegaConf.merge(config, small, overrides)


def make_model() -> MemoryLM:
    torch.manual_seed(0)
    model = MemoryLM(make_config(model={"init_std": 0.3}), TOKENIZER.vocab_size)
    return model.eval()


def score(index: Index, model: MemoryLM, *, num_lanes: int = 3, micro_lanes: int = 2, **overrides: Any) -> Report:
    given = {"seg_len": SEG_LEN, "mem_len": MEM_LEN, "world": ALONE, **overrides}
    return evaluate_documents(
        model,
        lambda lane_ids: model.init_state(lane_ids, "cpu", torch.float32),
        index=index,
        tokenizer=TOKENIZER,
        num_lanes=num_lanes,
        micro_lanes=micro_lanes,
        **given,
    )


@torch.no_grad()
def score_alone(model: MemoryLM, tokens: np.ndarray) -> list[float]:
    """NLL of every token of one document, one lane, segment after segment, written out plainly."""
    state = model.init_state(torch.zeros(1, dtype=torch.int64), "cpu", torch.float32)
    inputs = np.concatenate(([TOKENIZER.bos_id], tokens[:-1])).astype(np.int64)
    losses: list[float] = []
    for begin in range(0, len(tokens), SEG_LEN):
        length = len(tokens[begin : begin + SEG_LEN])
        segment, targets = torch.zeros(1, SEG_LEN, dtype=torch.int64), torch.full((1, SEG_LEN), IGNORE)
        segment[0, :length] = torch.from_numpy(inputs[begin : begin + length])
        targets[0, :length] = torch.from_numpy(tokens[begin : begin + length].astype(np.int64))
        output = model(segment, targets, torch.tensor([length]), state=state)
        state = output.state
        losses += output.nll[0, :length].tolist()
    return losses


def assert_same(found: Report, expected: Report) -> None:
    assert [document.num_scored for document in found.documents] == [
        document.num_scored for document in expected.documents
    ]
    assert [document.nll for document in found.documents] == pytest.approx(
        [d.nll for d in expected.documents], rel=1e-6
    )
    assert [score.distance for score in found.recall] == [score.distance for score in expected.recall]
    assert [score.nll for score in found.recall] == pytest.approx([score.nll for score in expected.recall], rel=1e-6)
    assert found.word_perplexity == pytest.approx(expected.word_perplexity, rel=1e-6)


# Scoring


def test_every_document_scores_as_if_it_were_alone(index: Index) -> None:
    model = make_model()
    report = score(index, model)
    by_distance: dict[int, float] = {}
    for number, length in enumerate(LENGTHS):
        document = make_document(number, length)
        losses = score_alone(model, document.tokens) if length else []
        assert report.documents[number].nll == pytest.approx(math.fsum(losses), rel=1e-6)
        assert report.documents[number].num_scored == length
        assert document.recall is not None
        for distance, loss in zip(document.recall.tolist(), losses, strict=True):
            if distance:
                by_distance[distance] = by_distance.get(distance, 0.0) + loss
    assert {score.distance: score.nll for score in report.recall} == pytest.approx(by_distance, rel=1e-6)
    assert report.num_scored == index.num_tokens == sum(LENGTHS)
    assert report.word_perplexity == pytest.approx(math.exp(report.nll / index.num_words))
    assert report.bits_per_byte == pytest.approx(report.nll / math.log(2) / sum(LENGTHS))


@pytest.mark.parametrize(("num_lanes", "micro_lanes"), [(1, 1), (2, 2), (5, 2), (9, 3), (16, 4)])
def test_the_number_of_lanes_changes_nothing(index: Index, num_lanes: int, micro_lanes: int) -> None:
    model = make_model()
    assert_same(score(index, model, num_lanes=num_lanes, micro_lanes=micro_lanes), score(index, model))


def score_on_rank(world: World, split_dir: Path) -> Report:
    return score(read_index(split_dir), make_model(), num_lanes=5, world=world)


@pytest.mark.parametrize("size", [2, 4])
def test_the_number_of_ranks_changes_nothing(index: Index, rank_pool: Callable[[int], RankPool], size: int) -> None:
    reports = rank_pool(size).run(score_on_rank, index.split_dir)
    assert all(report == reports[0] for report in reports)
    assert_same(reports[0], score(index, make_model()))


def forwards_on_rank(world: World, split_dir: Path) -> int:
    model, count = make_model(), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return model(*args, **kwargs)

    evaluate_documents(
        counted,
        lambda lane_ids: model.init_state(lane_ids, "cpu", torch.float32),
        index=read_index(split_dir),
        tokenizer=TOKENIZER,
        num_lanes=3,
        micro_lanes=1,
        seg_len=SEG_LEN,
        mem_len=0,
        world=world,
    )
    return count


def test_every_rank_makes_the_same_number_of_forwards(index: Index, rank_pool: Callable[[int], RankPool]) -> None:
    counts = rank_pool(2).run(forwards_on_rank, index.split_dir)
    assert counts[0] == counts[1] > 0


def test_evaluation_leaves_random_numbers_and_parameters_alone(index: Index) -> None:
    model = make_model()
    parameters = [parameter.clone() for parameter in model.parameters()]
    random_state = torch.get_rng_state()
    score(index, model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(before, after) for before, after in zip(parameters, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_cut_documents_count_the_words_and_bytes_that_were_scored(index: Index) -> None:
    model = make_model()
    report = score(index, model, max_document_len=20)
    for number, length in enumerate(LENGTHS):
        text = TOKENIZER.decode(make_document(number, length).tokens[:20])
        found = report.documents[number]
        assert (found.num_scored, found.words, found.bytes) == (min(length, 20), len(text.split()), len(text))
    assert report.documents[0].nll == pytest.approx(math.fsum(score_alone(model, make_document(0, 100).tokens[:20])))
    assert report.num_words == sum(document.words for document in report.documents)


def test_the_official_word_count_is_used_for_a_whole_split_only(tmp_path: Path) -> None:
    index = write_split(
        [make_document(0, 100)],
        tmp_path,
        name="tiny",
        split="test",
        tokenizer_fingerprint=TOKENIZER.fingerprint,
        official_words=7,
    )
    assert score(index, make_model()).num_words == 7
    assert score(index, make_model(), max_document_len=50).num_words < 7 + 50


def test_masked_tokens_are_read_but_not_scored(tmp_path: Path) -> None:
    tokens = TOKENIZER.encode("question one? answer two three. question? answer four.")
    mask = np.zeros(len(tokens), dtype=bool)
    mask[14:32] = mask[43:] = True
    document = TokenizedDocument("chat", "Chat", None, 9, len(tokens), tokens, mask=mask)
    index = write_split([document], tmp_path, name="chat", split="test", tokenizer_fingerprint=TOKENIZER.fingerprint)
    model = make_model()
    report = score(index, model)
    losses = score_alone(model, tokens)
    scored = report.documents[0]
    assert scored.nll == pytest.approx(
        math.fsum(loss for loss, counts in zip(losses, mask, strict=True) if counts), rel=1e-6
    )
    assert (scored.num_scored, scored.words, scored.bytes) == (29, 5, 29)
    assert report.recall == []


def test_a_token_that_is_not_scored_is_an_error(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = scoring.evaluation_steps
    monkeypatch.setattr(scoring, "evaluation_steps", lambda *args, **kwargs: steps(*args, **kwargs) - 1)
    with pytest.raises(EvaluationError, match=r"document doc0: 96 tokens scored, 100 expected"):
        score(index, make_model(), num_lanes=9)


def test_a_loss_that_is_not_finite_is_an_error(index: Index) -> None:
    model = make_model()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(EvaluationError, match=r"document doc0: its loss is nan"):
        score(index, model)


@pytest.fixture
def damaged(library: Path, tmp_path: Path) -> Index:
    """The split with one flipped bit in document 5."""
    for path in (library / "test").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    index = read_index(tmp_path)
    shard = tmp_path / index.shards[0].name
    content = bytearray(shard.read_bytes())
    content[index.documents[5].tokens_offset] ^= 1
    shard.write_bytes(content)
    return index


def test_a_damaged_document_is_named_before_any_forward(damaged: Index) -> None:
    with pytest.raises(ValueError, match=r"document doc5 in .* is damaged"):
        score(damaged, lambda *args, **kwargs: pytest.fail("forward"))  # type: ignore[arg-type]


def test_a_damaged_document_stops_every_rank(damaged: Index, rank_pool: Callable[[int], RankPool]) -> None:
    with pytest.raises(AssertionError) as caught:
        rank_pool(2).run(score_on_rank, damaged.split_dir)
    assert str(caught.value).count("EvaluationError: opening") == 2
    assert "failed on 1 of 2 ranks" in str(caught.value)


# Report


def make_report(*, split: str = "test", factor: float = 1.0, mem_len: int = 64) -> Report:
    documents = [DocumentScore(f"d{number}", "A title, " * 6, 100.0 * factor, 50, 20, 110) for number in range(25)]
    recall = [
        RecallScore(30, 10.0, 10),
        RecallScore(32, 10.0, 10),
        RecallScore(33, 40.0 * factor, 20),
        RecallScore(96, 2.0, 1),
    ]
    recall.append(RecallScore(97, 30.0, 10))
    return Report(split, "data", "tokens", None, 32, mem_len, 500, documents, recall)


def test_bands_take_each_distance_once() -> None:
    report = make_report()
    segment, memory, beyond = recall_bands(32, 64).values()
    assert (segment, memory, beyond) == (Band(0, 32), Band(32, 96), Band(96, None))
    assert [report.recall_in(band) for band in (segment, memory, beyond)] == [(20.0, 20), (42.0, 21), (30.0, 10)]
    assert report.recall_perplexity(beyond) == pytest.approx(math.exp(3.0))
    assert list(recall_bands(32, 0).values()) == [Band(0, 32), Band(32, None)]


def test_figures_are_those_of_the_definitions() -> None:
    figures = make_report().figures()
    assert figures["test/word_perplexity"] == pytest.approx(math.exp(2500 / 500))
    assert figures["test/token_perplexity"] == pytest.approx(math.exp(2500 / 1250))
    assert figures["test/bits_per_byte"] == pytest.approx(2500 / math.log(2) / 2750)
    assert figures["test/recall_perplexity_memory"] == pytest.approx(math.exp(2.0))


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    report = make_report()
    paths = write_report(report, tmp_path / "evaluations", "test-step-00000007", facts={"step": 7})
    assert [path.name for path in paths] == ["test-step-00000007.csv", "test-step-00000007.json"]
    assert read_report(paths[1]) == report
    body = json.loads(paths[1].read_text())
    assert body["step"] == 7
    paths[1].write_text(json.dumps({**body, "format_version": 99}))
    with pytest.raises(ValueError, match="format_version 99 is newer than 1"):
        read_report(paths[1])
    paths[1].write_text("[]")
    with pytest.raises(ValueError, match="not a report"):
        read_report(paths[1])


def test_table_and_csv_show_documents_and_totals() -> None:
    report = make_report()
    table = to_table(report, rows=20).splitlines()
    assert len({len(line) for line in table[:21]}) == 1  # columns stand under each other
    assert "... 5 more documents" in table[21]
    assert "25 documents" in table[22] and "148.41" in table[22]
    assert table[24] == "recall perplexity, referent (32, 96] tokens back (memory): 7.39 over 21 tokens"
    lines = to_csv(report.documents).splitlines()
    assert len(lines) == 26
    assert lines[1].startswith('d0,"A title, A title,')


def test_the_mem_len_of_a_composed_memory_is_that_of_the_short_term_part() -> None:
    assert short_term_len({"kind": "none"}) == 0
    assert short_term_len({"kind": "infinite", "over": {"kind": "transformer_xl", "mem_len": 96}}) == 96


# Compare


def save_evaluation(run_dir: Path, report: Report, *, step: int = 5) -> Path:
    write_report(report, run_dir / "evaluations", f"{report.split}-step-{step:08d}", facts={})
    return run_dir


def test_compare_shows_gains_over_common_bands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = save_evaluation(tmp_path / "none", make_report(factor=2.0, mem_len=0))
    save_evaluation(tmp_path / "xl", make_report(factor=9.0), step=4)
    memory = save_evaluation(tmp_path / "xl", make_report(factor=1.0), step=12)
    assert compare.run([plain, memory]) == 0
    heading, columns, first, second = capsys.readouterr().out.splitlines()
    assert heading.endswith("to the referent: (0, 32] 20, (32, 96] 21, > 96 10")
    assert columns.split("  ")[0] == "run" and "recall (32, 96]" in columns
    assert first.split() == ["none", "22,026.47", "2.72", "49.64", "20.09"]
    assert second.split() == ["xl", "148.41", "(148.41x", "lower)", "2.72", "7.39", "(6.72x", "lower)", "20.09"]


def test_figures_too_large_for_a_float_still_make_a_table(tmp_path: Path) -> None:
    huge, normal = make_report(factor=1e6), make_report()
    assert huge.word_perplexity == math.inf
    table = compare.to_table([compare.Entry("huge", huge)], compare.compare([compare.Entry("huge", huge)]))
    assert "inf" in table
    entries = [compare.Entry("normal", normal), compare.Entry("huge", huge)]
    assert "inf" in compare.to_table(entries, compare.compare(entries))
    assert "inf" in to_table(huge)


def test_compare_refuses_what_does_not_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = save_evaluation(tmp_path / "none", make_report())
    assert compare.run([plain, tmp_path / "unknown"]) == 1
    assert "no evaluation of validation; run: dist-mem evaluate" in capsys.readouterr().err
    report = make_report()
    other = save_evaluation(tmp_path / "other", Report(**{**vars(report), "documents": report.documents[1:]}))
    assert compare.run([plain, other]) == 1
    assert "do not score the same documents" in capsys.readouterr().err


def test_compare_takes_the_split_that_all_runs_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = save_evaluation(tmp_path / "one", make_report(split="validation"))
    two = save_evaluation(tmp_path / "two", make_report(split="validation"))
    save_evaluation(two, make_report(split="test"))
    assert compare.run([one, two]) == 0
    assert capsys.readouterr().out.startswith("split validation")


# The command


@pytest.fixture
def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a launcher for one rank, taken back afterwards."""
    for name, value in launcher_environment(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)


def save_weights(run_dir: Path, model: MemoryLM, config: Any, *, step: int) -> Path:
    """A checkpoint as far as evaluation reads it: fp32, ZeRO stage 0."""
    directory = step_dir(run_dir, step)
    (directory / "engine").mkdir(parents=True)
    torch.save({"module": model.state_dict(), "optimizer": {}}, directory / "engine" / "mp_rank_00_model_states.pt")
    save_config(config, directory / "config.yaml")
    files = {path.relative_to(directory).as_posix(): describe_file(path) for path in files_in(directory)}
    facts = {"step": step, "tokenizer_fingerprint": TOKENIZER.fingerprint, "files": files}
    write_manifest(directory, facts)
    return directory


@pytest.fixture
def run_dir(library: Path, tmp_path: Path) -> Path:
    config = make_config(data={"path": str(library)}, model={"init_std": 0.3}, tracking={"mlflow": True})
    for step in (3, 12):
        save_weights(tmp_path / "run", make_model(), config, step=step)
    return tmp_path / "run"


@pytest.mark.usefixtures("single_process")
def test_the_command_scores_the_newest_checkpoint_and_tells_everyone(
    run_dir: Path, index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(evaluate, "log_to_run", lambda config, **given: told.update(given))
    assert evaluate.run(run_dir, split="test", overrides=["eval.lanes=3"]) == 0
    report = read_report(run_dir / "evaluations" / "test-step-00000012.json")
    assert_same(report, score(index, make_model()))
    assert told["step"] == 12
    assert told["metrics"] == report.figures()
    assert "9 documents" in capsys.readouterr().out


@pytest.mark.usefixtures("single_process")
def test_one_checkpoint_can_be_named_by_step_or_by_path(run_dir: Path) -> None:
    quiet = ["tracking.mlflow=false", "eval.max_document_len=20"]
    assert evaluate.run(run_dir, split="test", checkpoint=3, overrides=quiet) == 0
    assert evaluate.run(step_dir(run_dir, 12), split="test", overrides=quiet) == 0
    assert sorted(path.name for path in (run_dir / "evaluations").glob("*.csv")) == [
        "test-step-00000003.csv",
        "test-step-00000012.csv",
    ]


@pytest.mark.usefixtures("single_process")
def test_the_command_names_what_is_wrong(run_dir: Path, tmp_path: Path) -> None:
    def complaint(*args: Any, **kwargs: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            evaluate.run(*args, **kwargs)
        return str(caught.value)

    assert "no checkpoint; give a run directory" in complaint(tmp_path / "empty", split="test")
    assert "index.json is missing" in complaint(run_dir, split="validation")
    with pytest.raises(
        ConfigError, match=r"model\.d_model: is fixed by the checkpoint; an evaluation may set eval\.\*"
    ):
        evaluate.run(run_dir, split="test", overrides=["model.d_model=8"])


def test_a_split_is_scored_as_the_configuration_says(library: Path) -> None:
    model = make_model()
    config = make_config(data={"path": str(library)}, eval={"lanes": 3, "seg_len": 4, "max_document_len": 30})
    seen: list[Sequence[int]] = []

    def forward(tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(tokens.shape))
        return model(tokens, *args, **kwargs)

    report = evaluate_split(
        forward,
        lambda lane_ids: model.init_state(lane_ids, "cpu", torch.float32),
        config=config,
        split="test",
        tokenizer=TOKENIZER,
        world=ALONE,
    )
    assert set(seen) == {(2, 4)}
    assert (report.seg_len, report.mem_len, report.max_document_len) == (4, MEM_LEN, 30)
