"""`dist_mem.train` is `dist-mem train` in processes of its own."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from omegaconf import OmegaConf

import dist_mem
from dist_mem.api import training
from dist_mem.checkpoint.manifest import read_manifest, step_dir
from dist_mem.config import Config, load_config
from dist_mem.errors import DivergedError, UnusableError
from tests.support.jobs import checkpoint_content, difference
from tests.support.messages import refused


@pytest.fixture
def config(api_folder: Path) -> Any:
    return OmegaConf.to_container(OmegaConf.load(api_folder / "run.yaml"))


def test_it_trains_what_the_command_trains(config: Any, api_folder: Path, tmp_path: Path) -> None:
    run_dir = dist_mem.train(config, f"run_dir={tmp_path / 'run'}")
    assert run_dir == tmp_path / "run"
    mine, theirs = (checkpoint_content(step_dir(run, 8)) for run in (run_dir, api_folder / "runs" / "demo"))
    assert mine and difference(mine, theirs) is None


def test_every_form_of_a_configuration_trains_the_same(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(command: list[str]) -> None:
        read_by_ranks.append(load_config(command[command.index("train") + 1 :]))

    read_by_ranks: list[Config] = []
    monkeypatch.setattr(training, "_run", read)
    config["run_dir"] = str(tmp_path / "run")
    for form in (config, load_config([f"{key}={value}" for key, value in config.items()])):
        assert dist_mem.train(form) == tmp_path / "run"
    for form in ({**config, "run_dir": tmp_path / "run"}, OmegaConf.create(config), MappingProxyType(config)):
        assert dist_mem.train(form) == tmp_path / "run"
    assert read_by_ranks == [read_by_ranks[0]] * 5


def test_several_ranks_train_and_the_same_call_resumes(
    api_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = (api_folder / "run.yaml", f"run_dir={tmp_path / 'run'}", "train.micro_batch_size=2")
    dist_mem.train(*given, "train.steps=6", ranks=2)
    assert read_manifest(step_dir(tmp_path / "run", 6))["world_size"] == 2
    capfd.readouterr()
    dist_mem.train(*given, ranks=2)
    assert "resum" in capfd.readouterr().out
    assert read_manifest(step_dir(tmp_path / "run", 8))["step"] == 8


def test_a_failed_training_raises_the_error_of_its_exit_code(config: Any, tmp_path: Path) -> None:
    with refused(UnusableError, "tokenizer.json", "data.path"):
        dist_mem.train(config, f"data.path={tmp_path / 'nowhere'}", f"run_dir={tmp_path / 'run'}")
    with refused(DivergedError, "step 2", "loss nan"):
        dist_mem.train(config, "optimizer={lr: 1.0e+18}", "divergence.action=stop", f"run_dir={tmp_path / 'other'}")


def test_a_wrong_configuration_starts_no_process(config: Any, tmp_path: Path) -> None:
    with refused(UnusableError, "train.stepz"):
        dist_mem.train(config, "train.stepz=3", f"run_dir={tmp_path / 'run'}")
    with refused(TypeError, "an override is 3"):
        dist_mem.train(config, 3)  # type: ignore[arg-type]
    with refused(ValueError, "ranks is 0"):
        dist_mem.train(config, ranks=0)
    assert not list(tmp_path.iterdir())
