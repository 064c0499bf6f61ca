"""A finished run: the same command ends at once, another configuration is refused as on resume."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from dist_mem.__main__ import main
from dist_mem.checkpoint.finished_file import read_finished
from dist_mem.errors import EXIT_REQUEUE
from dist_mem.launch.status import read_state
from dist_mem.training import opening
from tests.support import jobs
from tests.support.faults import assert_quoted
from tests.support.jobs import build_books, logged_steps, run_ranks, stop_after_one_step, train_here, write_config
from tests.support.messages import said
from tests.support.rank_errors import error_of
from tests.support.ranks import Pools

STEPS = 3
Command = Callable[..., tuple[int, str]]  # arguments -> exit code and what was printed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, books: Path, rank_pool: Pools) -> Path:
    """A run that has made its last step, of a configuration whose run_dir goes by its name."""
    folder = tmp_path_factory.mktemp("trained")
    config = write_config(folder / "run.yaml", books, folder / "run", {"train": {"steps": STEPS}})
    assert rank_pool(1).run(train_here, config) == [0]
    return folder


@pytest.fixture
def finished(
    tmp_path: Path,
    trained: Path,
    single_process: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """`dist-mem COMMAND` in a folder with a copy of that run and run.yaml; opening data or DeepSpeed fails."""
    shutil.copytree(trained / "run", tmp_path / "runs" / "mine")
    config = OmegaConf.load(trained / "run.yaml")
    OmegaConf.save({**config, "name": "mine", "run_dir": "runs/${name}"}, tmp_path / "run.yaml")
    monkeypatch.chdir(tmp_path)

    def refuse(*arguments: object) -> None:
        raise AssertionError("the job was opened")

    def command(*arguments: str) -> tuple[int, str]:
        code, captured = main([*arguments]), capsys.readouterr()
        return code, captured.out + captured.err

    monkeypatch.setattr(opening, "_open_data", refuse)
    monkeypatch.setattr(opening, "open_communication", refuse)
    return command


def test_the_same_command_says_that_the_run_is_finished_and_so_with_what_may_change_on_resume(
    finished: Command,
) -> None:
    may_change = ["train.micro_batch_size=4", "optimizer.lr=1", "eval.batch_size=2"]
    for changes in ([], may_change, ["model.dropout=0.5", "--allow", "model.dropout"]):
        code, text = finished("train", "run.yaml", *changes)
        assert code == 0
        assert f"runs/mine is finished: step {STEPS} was the last one" in text


def files_of_runs() -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path("runs").rglob("*") if path.is_file()}


LANES = "train.global_batch_size: is 4, but the run began with 8, and must not change: a memory belongs to"
KIND = "memory.kind: is 'none', but the run began with 'transformer_xl', and must not change"  # and not each option
DROPOUT = "model.dropout: is 0.5, but the run began with 0.2"
OTHER_NAME = "start another run with name=NAME"


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        (["train.global_batch_size=4"], [LANES, OTHER_NAME]),
        (["memory.kind=none"], [KIND, OTHER_NAME]),
        (["model.dropout=0.5"], [DROPOUT, "--allow model.dropout", OTHER_NAME]),
        (["train.global_batch_size=4", "run_dir=runs/mine"], [LANES]),
    ],
)
@pytest.mark.parametrize("steps", [STEPS, STEPS + 1, STEPS - 1])
def test_another_configuration_is_refused_before_anything_is_opened(
    finished: Command, changes: list[str], reported: list[str], steps: int
) -> None:
    """Finished or not. Where a run directory is given, `name=` would lead into the same directory again."""
    before = files_of_runs()
    code, text = finished("train", "run.yaml", *changes, f"train.steps={steps}")
    assert code == 2
    assert files_of_runs() == before
    assert_quoted(text, *reported)
    assert ("or start another run with run_dir=FOLDER" in text) == ("run_dir=runs/mine" in changes)
    assert "finished" not in text and "train.steps" not in text and text.count("error: ") == 1


@pytest.mark.parametrize("command", [["train", "--check"], ["launch", "--dry-run"]])
def test_commands_that_start_nothing_refuse_it_too(finished: Command, command: list[str]) -> None:
    """Otherwise it is reported when the job starts, which on a cluster may be tomorrow."""
    assert finished(*command, "run.yaml")[0] == 0
    assert finished(*command, "run.yaml", "train.steps=9")[0] == 0
    code, text = finished(*command, "run.yaml", "train.global_batch_size=4")
    assert code == 2 and LANES.partition(",")[0] in text
    code, text = finished(*command, "run.yaml", "model.dropout=0.5")
    assert code == 2 and "add --allow model.dropout" in text
    assert finished(*command, "run.yaml", "model.dropout=0.5", "--allow", "model.dropout")[0] == 0


def test_a_finished_run_that_trains_on_is_not_finished(tmp_path: Path, trained: Path, rank_pool: Pools) -> None:
    shutil.copytree(trained / "run", tmp_path / "run")
    longer = {"run_dir": str(tmp_path / "run"), "train": {"steps": 9}}
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(trained / "run.yaml"), longer), tmp_path / "run.yaml")
    assert read_finished(tmp_path / "run")
    assert rank_pool(1).run(stop_after_one_step, tmp_path / "run.yaml") == [EXIT_REQUEUE]
    assert read_finished(tmp_path / "run") is None and read_state(tmp_path / "run")["state"] == "stopped"


def test_other_data_at_another_path_are_refused_and_fewer_steps_leave_nothing_to_train(
    tmp_path: Path, trained: Path, books: Path, rank_pool: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path may change; what lies there is compared by its fingerprint."""
    monkeypatch.setattr(jobs, "SYLLABLES", jobs.SYLLABLES[::-1])
    shutil.copytree(trained / "run", tmp_path / "run")
    config = OmegaConf.merge(OmegaConf.load(trained / "run.yaml"), {"run_dir": str(tmp_path / "run")})
    OmegaConf.save(config, tmp_path / "run.yaml")
    same, other = Path(shutil.copytree(books, tmp_path / "same")), build_books(tmp_path / "other")

    def ended(*changes: str) -> str:
        (text,) = rank_pool(1).run(error_of, train_here, tmp_path / "run.yaml", changes)
        return str(text)

    assert ended(f"data.path={same}") == "ended with 0"
    said(ended(f"data.path={other}"), other / "train", "data.path")
    assert "train.global_batch_size: is 4" in ended(f"data.path={other}", "train.global_batch_size=4")
    codes, text = run_ranks(["train", "run.yaml", "train.steps=2"], world_size=1, cwd=tmp_path)
    assert codes == [0] and f"step {STEPS} of 2: nothing is left to train" in text
    assert logged_steps(tmp_path / "run") == list(range(1, STEPS + 1))
