"""The evaluate command: which checkpoint, which settings, where the report goes, what is refused, on any ranks."""

import shutil
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.checkpoint import manifest
from dist_mem.checkpoint.manifest import read_manifest, step_dir
from dist_mem.config import DataConfig
from dist_mem.data.shard import Index, read_index, write_split
from dist_mem.data.tokenizers.registry import train_sentencepiece
from dist_mem.errors import UnusableError
from dist_mem.evaluation import job
from dist_mem.evaluation.evaluate import evaluate_checkpoint
from dist_mem.evaluation.scores import Report, read_report
from dist_mem.evaluation.trained_model import find_checkpoint, read_settings
from dist_mem.memory import memory_kinds
from dist_mem.runtime import files, progress
from dist_mem.runtime.distributed import World
from dist_mem.runtime.locks import hold_file
from tests.support.faults import assert_says, flip, small_disk
from tests.support.jobs import run_ranks, train_here, write_config
from tests.support.messages import said_line
from tests.support.ranks import Pools
from tests.support.saving import FACTS
from tests.support.scored_library import (
    ALONE,
    LENGTHS,
    assert_same,
    make_config,
    make_document,
    make_model,
    save_weights,
    score,
    write_other,
)


def save(folder: Path, data: Path, *steps: int, **blocks: Any) -> Path:
    config = make_config(data={"path": str(data)}, model={"init_std": 0.3}, **blocks)
    for step in steps:
        save_weights(folder / "run", make_model(), config, step=step)
    return folder / "run"


@pytest.fixture
def run_dir(library: Path, tmp_path: Path, single_process: None) -> Path:
    return save(tmp_path, library, 3, 12)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What MLflow is given, in place of giving it."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(job, "log_to_run", lambda config, **given: found.append(given))
    return found


def evaluate(run_dir: Path, *arguments: str) -> int:
    return main(["evaluate", str(run_dir), "--split", "test", *arguments])


def names_of(run_dir: Path) -> list[str]:
    """Of the reports."""
    return sorted(path.stem for path in (run_dir / "evaluations").glob("*.csv"))


def test_the_command_scores_the_newest_checkpoint_and_tells_everyone(
    run_dir: Path, index: Index, reported: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(run_dir, "eval.batch_size=3", "tracking.mlflow=true") == 0
    report = read_report(run_dir / "evaluations" / "test-step-00000012.json")
    assert_same(report, score(index, make_model()))
    assert [(given["step"], given["metrics"]) for given in reported] == [(12, report.metrics())]
    assert "9 documents" in capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["eval.layout=stream"]])
def test_progress_is_shown_and_never_in_the_table(
    run_dir: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    assert evaluate(run_dir, *options) == 0
    output = capsys.readouterr()
    assert "scoring test: 260 of 260 tokens  " in output.err
    assert "scoring" not in output.out


def test_one_checkpoint_can_be_named_by_step_or_by_path(run_dir: Path) -> None:
    assert evaluate(run_dir, "--checkpoint", "3", "eval.max_document_len=20") == 0
    assert evaluate(step_dir(run_dir, 12), "eval.max_document_len=20") == 0
    assert names_of(run_dir) == ["test-step-00000003-first20", "test-step-00000012-first20"]


def test_other_data_leave_files_and_figures_of_the_own_alone(
    run_dir: Path, tmp_path: Path, reported: list[dict[str, Any]]
) -> None:
    """And so do a quick look, another precision, another protocol: the own report, and its metrics in MLflow."""
    paths = [write_other(tmp_path / str(number) / "books", number) for number in range(2)]
    others = {tag: [f"data.path={path}"] for path, tag in paths}
    others |= {"-first20": ["eval.max_document_len=20"], "-bf16": ["eval.precision=bf16"]}
    others |= {"-M24-stream3": ["eval.mem_len=24", "eval.layout=stream", "eval.batch_size=3"]}
    assert evaluate(run_dir, "tracking.mlflow=true") == 0
    files = {path: path.read_bytes() for path in (run_dir / "evaluations").iterdir()}
    for overrides in others.values():
        assert evaluate(run_dir, "tracking.mlflow=true", *overrides) == 0
    assert all(path.read_bytes() == content for path, content in files.items())
    added = {path.stem for path in (run_dir / "evaluations").iterdir()} - {path.stem for path in files}
    assert added == {f"test-step-00000012{tag}" for tag in others}
    heads = [{figure.partition("/")[0] for figure in given["metrics"]} for given in reported]
    assert heads == [{"test"}, *({f"test{tag}"} for tag in others)]


@pytest.mark.usefixtures("single_process")
def test_the_own_data_may_move(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = Path(shutil.copytree(library, tmp_path / "moved"))
    shutil.copytree(moved / "test", moved / "train")
    monkeypatch.setitem(FACTS, "data_fingerprint", f"first-stage {read_index(moved / 'train').fingerprint}")
    run_dir = save(tmp_path, Path("data/before"), 12)
    assert evaluate(run_dir, f"data.path={moved}") == 0
    assert names_of(run_dir) == ["test-step-00000012"]


@pytest.mark.usefixtures("single_process")
def test_a_run_that_keeps_its_best_checkpoints_can_be_evaluated(library: Path, tmp_path: Path) -> None:
    """Which of them is best asks for evaluations amid training, which an evaluation does not have."""
    keeping = {"checkpoint": {"keep_last": 2, "keep_best": 1}, "eval": {"every": 3}}
    assert evaluate(save(tmp_path, library, 3, **keeping)) == 0


def damage(run_dir: Path, *steps: int) -> None:
    for step in steps:
        flip(step_dir(run_dir, step) / "ranks" / "rank-00000.safetensors", 9)


def other_tokenizer(run_dir: Path) -> list[str]:
    folder = run_dir.parent / "other"
    fingerprint = train_sentencepiece(["a b c d e f g h i j k l m n o"], folder, vocab_size=290).fingerprint
    write_split([make_document(0, 50)], folder / "test", name="a", split="test", tokenizer_fingerprint=fingerprint)
    return [f"data.path={folder}"]


UNUSABLE: dict[str, tuple[Callable[[Path], list[str] | None], str]] = {
    "no checkpoint": (
        lambda run_dir: shutil.rmtree(run_dir / "checkpoints"),
        "checkpoints: no checkpoint; give a run directory or one checkpoint in it",
    ),
    "all damaged": (lambda run_dir: damage(run_dir, 3, 12), "no checkpoint verifies:"),
    "other step": (lambda _: ["--checkpoint", "7"], "step-00000007: there is no such checkpoint; "),
    "other tokenizer": (other_tokenizer, "point data.path at data built with that tokenizer"),
    "no data": (lambda _: ["data.path=nowhere"], "nowhere/test/index.json is missing"),
    "no split": (lambda _: ["--split", "tset"], "has no split 'tset': it has test; did you mean test?"),
    "fixed key": (lambda _: ["model.d_model=8"], "model.d_model: is fixed by the checkpoint"),
}


@pytest.mark.parametrize("fault", UNUSABLE)
def test_what_cannot_be_evaluated_is_an_error_of_its_own(
    run_dir: Path, capfd: pytest.CaptureFixture[str], fault: str
) -> None:
    spoil, message = UNUSABLE[fault]
    assert evaluate(run_dir, *(spoil(run_dir) or [])) == 2
    error = capfd.readouterr().err
    assert_says(error, message)
    assert error.count("error: ") == 1
    if fault == "other step":
        assert error.endswith(f"{run_dir} has steps 3, 12\n")
    assert not (run_dir / "evaluations").exists()


def test_a_damaged_newest_checkpoint_is_passed_over_with_the_reason(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(run_dir, 12)
    assert evaluate(run_dir) == 0
    printed = capfd.readouterr()
    said_line(printed.err, "passed over: ", "rank-00000.safetensors", "SHA-256")
    assert str(step_dir(run_dir, 3)) in printed.out


def find_and_record(world: World, run_dir: Path) -> tuple[Path, list[str]]:
    """The checkpoint that all ranks find, and the files that this one has hashed."""
    hashed: list[str] = []

    def sha256_of(path: Path) -> str:
        hashed.append(path.relative_to(run_dir / "checkpoints").as_posix())
        return files.sha256_of(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "sha256_of", sha256_of)
        return job.find_checkpoint_together(run_dir, None, world).directory, hashed


def test_the_ranks_share_the_work_of_verifying_a_checkpoint(run_dir: Path, rank_pool: Pools) -> None:
    directory = step_dir(run_dir, 12)
    found = rank_pool(2).run(find_and_record, run_dir)
    assert [path for path, _ in found] == [directory] * 2
    shares = [hashed for _, hashed in found]
    assert all(shares)
    assert sorted(chain(*shares)) == [f"{directory.name}/{name}" for name in read_manifest(directory)["files"]]
    damage(run_dir, 12)
    assert {path for path, _ in rank_pool(2).run(find_and_record, run_dir)} == {step_dir(run_dir, 3)}


def test_a_report_that_cannot_be_written_is_shown_all_the_same(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "evaluations").write_text("a file in the way")
    assert evaluate(run_dir) == 2
    printed = capfd.readouterr()
    said_line(printed.err, "error: ", "[Errno 17]", f"'{run_dir / 'evaluations'}'")
    assert "9 documents" in printed.out
    (run_dir / "evaluations").unlink()
    with small_disk(run_dir / "evaluations", "size=4k"):
        assert evaluate(run_dir) == 1
        assert_says(capfd.readouterr().err, "[Errno 28] No space left on device: '")
        assert not list((run_dir / "evaluations").glob("*.partial"))


def test_files_that_another_command_makes_are_left_to_it(run_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A table of one evaluation lay beside the JSON of another."""
    folder, name = run_dir / "evaluations", "test-step-00000012"
    with hold_file(folder / name):
        assert evaluate(run_dir) == 2
        said_line(capfd.readouterr().err, "error: ", name, "another command")
        assert [path.name for path in folder.iterdir()] == [f".{name}.lock"]
        assert evaluate(run_dir, "eval.seg_len=4") == 0, "of another protocol"
    assert evaluate(run_dir) == 0
    assert not list(folder.glob(".*"))


@pytest.fixture(scope="module")
def trained_runs(books: Path, rank_pool: Pools, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the run of a memory: of two ranks with ZeRO-2, its memory at work."""

    @cache
    def run(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        config = write_config(folder / "run.yaml", books, folder / "run")
        rank_pool(2).run(train_here, config, [f"memory.kind={kind}", "optimizer.lr=0.02", "train.steps=40"])
        return folder / "run"

    return run


@pytest.fixture(params=memory_kinds())
def trained_run(request: pytest.FixtureRequest, trained_runs: Callable[[str], Path]) -> Path:
    return trained_runs(request.param)


def evaluate_here(world: World, run_dir: Path, data: Path, num_lanes: int, without_memory: bool = False) -> Report:
    """What `dist-mem evaluate` does, in ranks that are already there."""
    checkpoint = find_checkpoint(run_dir)
    config = read_settings(checkpoint.directory, [f"data.path={data}", f"eval.batch_size={num_lanes}"])
    return evaluate_checkpoint(checkpoint, config, split="test", world=world, without_memory=without_memory)


SIZES = (1, 2, 4)
LANES = (1, 5, 16)  # the last: more lanes than documents, and a rank without any
# A Latin square: every pair of a memory, a number of ranks and a number of lanes is met, not every triple.
PAIRS = [
    pytest.param(
        kind,
        size,
        LANES[(number + index) % len(LANES)],
        marks=pytest.mark.core if (kind, size) == ("transformer_xl", 2) else (),
    )
    for number, kind in enumerate(memory_kinds())
    for index, size in enumerate(SIZES)
]


@pytest.mark.parametrize(("trained_run", "size", "num_lanes"), PAIRS, indirect=["trained_run"])
def test_ranks_and_lanes_change_no_metric(
    trained_run: Path, library: Path, rank_pool: Pools, size: int, num_lanes: int
) -> None:
    expected = evaluate_here(ALONE, trained_run, library, num_lanes=3)
    assert expected.num_scored == read_index(library / "test").num_tokens == sum(LENGTHS)
    if size == 1:
        reports = [evaluate_here(ALONE, trained_run, library, num_lanes)]
    else:
        reports = rank_pool(size).run(evaluate_here, trained_run, library, num_lanes)
    assert all(report == reports[0] for report in reports)
    assert_same(reports[0], expected)


def test_ranks_change_no_figure_without_memory_either(trained_run: Path, library: Path, rank_pool: Pools) -> None:
    expected = evaluate_here(ALONE, trained_run, library, num_lanes=3, without_memory=True)
    reports = rank_pool(2).run(evaluate_here, trained_run, library, 5, True)
    assert reports[0] == reports[1]
    assert_same(reports[0], expected)
    with_memory = evaluate_here(ALONE, trained_run, library, num_lanes=3)
    assert (with_memory == expected) == trained_run.parent.name.startswith(("none", "causal"))


@pytest.mark.parametrize("trained_run", ["transformer_xl"], indirect=True)
def test_the_command_on_two_ranks_says_what_one_rank_says(trained_run: Path, library: Path, tmp_path: Path) -> None:
    arguments = ["evaluate", str(trained_run), "--split", "test", f"data.path={library}", "eval.batch_size=5"]
    codes, text = run_ranks(arguments, world_size=2, cwd=tmp_path)
    assert codes == [0, 0], text
    assert text.count("9 documents") == 1  # rank 0 alone speaks
    (path,) = (trained_run / "evaluations").glob("test-step-00000040-tiny_*.json")  # data of another training
    report = read_report(path)
    assert_same(report, evaluate_here(ALONE, trained_run, library, num_lanes=3))


def test_an_index_that_leads_nowhere_is_not_that_of_other_data(tmp_path: Path) -> None:
    """The report would be named after other data, and nobody would hear of the link."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "index.json").symlink_to("index.json")
    export: Any = SimpleNamespace(is_export=True, manifest={})
    with pytest.raises(UnusableError, match="a link that leads nowhere"):
        job.data_tag(export, DataConfig(path=str(tmp_path)), "test")
