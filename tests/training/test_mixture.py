"""A run over a mixture, with Muon and WSD: resumed with other weights, moved, shown, computed again, all exactly."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.checkpoint.manifest import step_dir
from dist_mem.errors import EXIT_DONE, EXIT_USAGE
from dist_mem.tracking.log import METRICS_FILE, read_points
from tests.support.curricula import make_data
from tests.support.jobs import checkpoint_content, difference, losses, train_here, write_config
from tests.support.paths import ROOT
from tests.support.ranks import Pools
from tests.support.recording import assert_as_delivered, found_by, train_recording
from tests.support.restoring import open_two, refusal

CHANGE, LAST = 4, 10
RECIPE: dict[str, Any] = {
    "optimizer": {"kind": "muon", "groups": []},
    "schedule": {"kind": "wsd", "warmup_steps": 2, "decay_steps": 3},
}
HOLD = ["schedule.decay_steps=null", "schedule.decay_share=0"]  # the decay is added at a resume


def mixed(books: Path, chat: Path, *weights: float, epochs: str = "null") -> str:
    first, second = weights
    return f"data.mixture=[{{path: {books}, weight: {first}}}, {{path: {chat}, weight: {second}, epochs: {epochs}}}]"


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    return make_data(tmp_path / "chat", [24 + 5 * number for number in range(12)])


def config_of(tmp_path: Path, books: Path, name: str, *changes: dict[str, Any]) -> Path:
    base = {"train": {"steps": LAST, "segments_per_update": 2}, "checkpoint": {"every": 1}}
    return write_config(tmp_path / f"{name}.yaml", books, tmp_path / name, base, RECIPE, *changes)


def test_a_run_resumes_bitwise_after_new_weights_and_is_shown_and_computed_again(
    tmp_path: Path, books: Path, chat: Path, rank_pool: Pools, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run_dir = config_of(tmp_path, books, "run"), tmp_path / "run"
    at_first, later = mixed(books, chat, 3, 1), mixed(books, chat, 1, 9)
    begun = rank_pool(2).run(train_recording, config, [at_first, f"train.steps={CHANGE}", *HOLD])
    rest = rank_pool(2).run(train_recording, config, [later])
    parts = json.loads((step_dir(run_dir, LAST) / "manifest.json").read_text())["mixture"]
    assert [(part["step"], part["weights"]) for part in parts] == [(0, [3.0, 1.0]), (CHANGE, [1.0, 9.0])]
    for step in range(1, LAST + 1):  # from the checkpoints of the run, also over the change
        assert_as_delivered(run_dir, step, begun if step <= CHANGE else rest)
    before = tmp_path / "before"
    assert rank_pool(2).run(train_here, config, [at_first, f"run_dir={before}"]) == [EXIT_DONE] * 2
    assert losses(before)[:CHANGE] == losses(run_dir)[:CHANGE] and losses(before) != losses(run_dir)

    for step in (CHANGE, CHANGE + 3):
        again = tmp_path / f"from-{step}"
        changes = [later, f"run_dir={again}", f"resume={step_dir(run_dir, step)}"]
        assert rank_pool(2).run(train_here, config, changes) == [EXIT_DONE] * 2
        assert losses(again) == losses(run_dir)[step:]
        assert difference(*(checkpoint_content(step_dir(each, LAST)) for each in (run_dir, again))) is None

    code, _, lines = rank_pool(2).run(found_by, run_dir, CHANGE + 2)[0]
    assert code == EXIT_DONE, lines
    assert main(["batch", str(run_dir), "--step", str(LAST)]) == EXIT_DONE
    shown = capsys.readouterr().out
    assert re.search(r"train of \S+, \S+chat$", shown, re.M), shown
    assert "chat document" in shown

    names = {name for point in read_points(run_dir / METRICS_FILE) for name in point.metrics if "mixture/" in name}
    assert {name.rpartition("/")[2] for name in names} == {"share", "epochs"} and len(names) == 4


@pytest.mark.parametrize(("ranks", "stage"), [(1, 3), pytest.param(3, 1, marks=pytest.mark.nightly)])
def test_other_ranks_and_stages_read_the_same_and_train_alike(
    tmp_path: Path, books: Path, chat: Path, rank_pool: Pools, ranks: int, stage: int
) -> None:
    config = config_of(tmp_path, books, "run", {"model": {"dropout": 0.0}})
    changes = [mixed(books, chat, 1, 2), f"train.steps={CHANGE}", *HOLD]
    assert rank_pool(2).run(train_here, config, changes) == [EXIT_DONE] * 2
    rest = [mixed(books, chat, 2, 1), f"resume={step_dir(tmp_path / 'run', CHANGE)}"]
    runs = {"here": (2, 2), "moved": (ranks, stage)}
    delivered = {}
    for name, (size, zero) in runs.items():
        moved = [*rest, f"run_dir={tmp_path / name}", f"deepspeed.zero_optimization.stage={zero}"]
        delivered[name] = rank_pool(size).run(train_recording, config, moved)
    for step in range(CHANGE + 1, LAST + 1):
        if step > CHANGE + 1:  # from checkpoints of its own
            assert_as_delivered(tmp_path / "moved", step, delivered["moved"])
        documents = [
            sorted(int(number) for rank in found for batch in rank[step] for number in batch.document if number >= 0)
            for found in delivered.values()
        ]
        assert documents[0] == documents[1]
    here, moved_losses = (losses(tmp_path / name) for name in runs)
    assert here == pytest.approx(moved_losses, rel=1e-6)


def test_what_cannot_be_resumed_is_refused_by_name_and_by_check_too(
    tmp_path: Path, books: Path, chat: Path, rank_pool: Pools, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run_dir = config_of(tmp_path, books, "run"), tmp_path / "run"

    def check(named: str, config: Path, *changes: str) -> None:
        """A training and `--check`, which begins its plan where the checkpoint does, name the same."""
        found = re.search(named, refusal(rank_pool, config, *changes))
        assert found
        assert main(["train", str(config), *changes, "--check"]) == EXIT_USAGE
        assert found[0] in capsys.readouterr().err

    both = mixed(books, chat, 1, 1)
    assert rank_pool(2).run(train_here, config, [both, "train.steps=2", *HOLD]) == [EXIT_DONE] * 2
    check("with data.mixture", config)
    plain = config_of(tmp_path, books, "plain")
    assert rank_pool(2).run(train_here, plain, ["train.steps=2", *HOLD]) == [EXIT_DONE] * 2
    check("without data.mixture", plain, both)
    check("data.mixture now 1", config, f"data.mixture=[{{path: {books}}}]")
    other = make_data(tmp_path / "other", [50] * 9)
    check(r"data.mixture\[1\].path", config, mixed(books, other, 1, 1))
    first = f"{{path: {books}, epochs: 1}}"
    check(r"after \d+ steps", config, f"data.mixture=[{first}, {{path: {chat}, epochs: 1}}]", "train.steps=900")
    check(r"after \d+ steps", config, f"data.mixture=[{first}, {{path: {chat}, weight: 0}}]", "train.steps=900")
    more = f"data.mixture=[{{path: {books}}}, {{path: {chat}, epochs: 1}}, {{path: {other}, weight: 2}}]"
    step, messages = open_two(rank_pool, config, more)
    assert step == 2
    assert "other: weight 50.00%" in messages
    assert "data.mixture[1].epochs None -> 1" in messages
    assert json.loads((step_dir(run_dir, 2) / "manifest.json").read_text())["mixture"][0]["weights"] == [1.0, 1.0]


def test_every_source_is_evaluated_with_a_name_of_its_own(
    tmp_path: Path, books: Path, rank_pool: Pools, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = make_data(tmp_path / "answers", [30 + number for number in range(10)], answers=True)
    config, run_dir = config_of(tmp_path, books, "run"), tmp_path / "run"
    assert (
        rank_pool(2).run(train_here, config, [mixed(books, answers, 1, 1), "train.steps=2", *HOLD]) == [EXIT_DONE] * 2
    )
    assert main(["evaluate", str(run_dir), "--sources"]) == EXIT_DONE
    names = sorted(path.stem for path in (run_dir / "evaluations").glob("*.json"))
    assert [name.rpartition("-")[2][:-6] for name in names] == ["00", "answers_"], names
    capsys.readouterr()
    assert main(["inspect", str(run_dir), "--book", "d3", "--split", "train"]) == EXIT_DONE
    assert "answers)" in capsys.readouterr().out
    assert main(["inspect", str(run_dir), "--book", "nowhere"]) == EXIT_USAGE


def test_the_page_and_the_export_of_a_run_name_what_it_has_read(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    """The sources with their shares so far, and not `data.path`, of which this run reads nothing."""
    first, second = (make_data(tmp_path / name, [30 + number for number in range(10)]) for name in ("first", "second"))
    config, run_dir = config_of(tmp_path, books, "run"), tmp_path / "run"
    for steps, shares in ((2, (3, 1)), (4, (1, 3))):
        changes = [mixed(first, second, *shares), f"train.steps={steps}", *HOLD]
        assert rank_pool(2).run(train_here, config, changes) == [EXIT_DONE] * 2
        arguments = ["report", str(run_dir), "--book", "d3", "--split", "train", f"data.path={first}"]
        assert main([*arguments, "tracking.mlflow=false"]) == EXIT_DONE
        out = tmp_path / f"exported-{steps}"
        assert main(["export", str(run_dir), "--out", str(out)]) == EXIT_DONE
        read = "first 75%, second 25%" if steps == 2 else "first 50%, second 50%"
        assert f"{steps} steps, data {read}<" in (run_dir / "report.html").read_text(encoding="utf-8")
        assert f"Its data, {read}, have the fingerprints `" in (out / "README.md").read_text(encoding="utf-8")


@pytest.mark.nightly
def test_the_page_shows_what_its_commands_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "howto" / "mixtures.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    commands, shown = re.findall(r"^\$ dist-mem (.*)$", block, re.MULTILINE), block.partition("...\n")[2]
    for command in commands:
        capsys.readouterr()
        assert main(shlex.split(command)) == EXIT_DONE
    assert len(commands) == 3 and capsys.readouterr().out.endswith(shown) and "weight 70.00%" in shown
