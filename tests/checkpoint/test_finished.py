"""A finished run: the same command ends at once, another configuration is refused as on resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dist_mem.__main__ import main
from dist_mem.errors import UnusableError
from dist_mem.runtime.distributed import World
from dist_mem.training import opening
from tests.support import jobs
from tests.support.faults import assert_quoted
from tests.support.jobs import build_books, logged_steps, train_here, write_config
from tests.support.ranks import RankPool

pytestmark = pytest.mark.ranks

STEPS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, books: Path, rank_pool: Callable[[int], RankPool]) -> Path:
    """A run that has made its last step, of a configuration whose run_dir goes by its name."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder / "run.yaml", books, folder / "run", {"train": {"steps": STEPS}})
    assert rank_pool(1).run(train_here, config) == [0]
    return folder


@pytest.fixture
def finished(
    tmp_path: Path, trained: Path, single_process: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """`dist-mem train CONFIG CHANGES` in a folder with a copy of that run; opening data or DeepSpeed fails."""
    shutil.copytree(trained / "run", tmp_path / "runs" / "mine")
    config = OmegaConf.load(trained / "run.yaml")
    OmegaConf.save({**config, "name": "mine", "run_dir": "runs/${name}"}, tmp_path / "run.yaml")
    monkeypatch.chdir(tmp_path)

    def refuse(*arguments: object) -> None:
        raise AssertionError("the job was opened")

    monkeypatch.setattr(opening, "_open_data", refuse)
    monkeypatch.setattr(opening, "open_communication", refuse)
    return lambda *changes: main(["train", "run.yaml", *changes])


def test_the_same_command_says_that_the_run_is_finished(
    finished: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert finished() == 0
    assert f"runs/mine is finished: step {STEPS} was the last one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        (
            "train.global_batch_size=4",
            ("train.global_batch_size: is 4, but the run began with 8, and must not change: a memory belongs to",),
        ),
        ("memory.kind=none", ("memory.kind: is 'none', but the run began with 'transformer_xl', and must not change",)),
        ("model.dropout=0.5", ("model.dropout: is 0.5, but the run began with 0.2", "--allow model.dropout")),
    ],
)
@pytest.mark.parametrize("steps", [STEPS, STEPS + 1, STEPS - 1])
def test_another_configuration_is_refused_before_anything_is_opened(
    finished: Callable[..., int], capsys: pytest.CaptureFixture[str], change: str, reported: tuple[str, ...], steps: int
) -> None:
    """Finished or not: with more steps to make, and with fewer than were made."""
    assert finished(change, f"train.steps={steps}") == 2
    output = capsys.readouterr()
    assert "finished" not in output.out
    assert_quoted(output.err, *reported, "start another run with name=NAME")
    assert output.err.count("error: ") == 1, (
        "a memory of another kind is reported once, not once for each of its options"
    )


def test_a_run_directory_that_is_given_is_the_one_to_change(
    finished: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """There `name=` would lead into the same directory again."""
    assert finished("train.global_batch_size=4", "run_dir=runs/mine") == 2
    assert "or start another run with run_dir=FOLDER" in capsys.readouterr().err


def test_what_may_change_on_resume_may_change_here(
    finished: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert finished("train.micro_batch_size=4", "optimizer.lr=1", "eval.batch_size=2") == 0
    assert finished("model.dropout=0.5", "--allow", "model.dropout") == 0
    assert capsys.readouterr().out.count("is finished") == 2


def exit_code_of(world: World, config: Path, changes: list[str]) -> int:
    try:
        return train_here(world, config, changes)
    except UnusableError:
        return 2


def test_other_data_at_another_path_are_refused(
    tmp_path: Path,
    trained: Path,
    books: Path,
    rank_pool: Callable[[int], RankPool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The path may change; what lies there is compared by its fingerprint."""
    monkeypatch.setattr(jobs, "SYLLABLES", jobs.SYLLABLES[::-1])
    shutil.copytree(trained / "run", tmp_path / "run")
    config = OmegaConf.merge(OmegaConf.load(trained / "run.yaml"), {"run_dir": str(tmp_path / "run")})
    OmegaConf.save(config, tmp_path / "run.yaml")
    shutil.copytree(books, tmp_path / "same")
    other = build_books(tmp_path / "other")
    for path, code in ((tmp_path / "same", 0), (other, 2)):
        assert rank_pool(1).run(exit_code_of, tmp_path / "run.yaml", [f"data.path={path}"]) == [code]
    assert logged_steps(tmp_path / "run") == list(range(1, STEPS + 1))


@pytest.mark.parametrize("command", [["train", "--check"], ["launch", "--dry-run"]])
def test_commands_that_start_nothing_refuse_it_too(
    finished: Callable[..., int], capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """Otherwise it is reported when the job starts, which on a cluster may be tomorrow."""
    assert main([*command, "run.yaml"]) == 0
    assert main([*command, "run.yaml", "train.steps=9"]) == 0
    assert main([*command, "run.yaml", "train.global_batch_size=4"]) == 2
    assert "train.global_batch_size: is 4, but the run began with 8" in capsys.readouterr().err
