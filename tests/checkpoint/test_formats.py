"""Checkpoints of every released format, and run and data folders of every release, go on; newer formats are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from dist_mem.__main__ import main
from dist_mem.checkpoint.manifest import FORMAT_VERSION, read_manifest, step_dir
from dist_mem.config import ConfigError, change_config, load_config, save_config, to_yaml
from dist_mem.evaluation.trained_model import load_model
from dist_mem.generation.text_scores import score
from tests.support import paths
from tests.support.jobs import figures, losses, train_here
from tests.support.messages import refused, said
from tests.support.ranks import Pools
from tests.support.restoring import open_two, refusal
from tests.support.saving import rewrite_manifest

GOLDEN = paths.GOLDEN / "formats"
FORMATS = sorted(int(path.name.removeprefix("format-")) for path in GOLDEN.glob("format-*"))
STEP, LAST = 3, 6
MAX_BYTES = 200_000


@pytest.fixture(params=FORMATS)
def version(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def config(tmp_path: Path, version: int) -> Path:
    """The configuration of a run whose only checkpoint is of this format."""
    run_dir = tmp_path / "run"
    shutil.copytree(GOLDEN / f"format-{version}" / f"step-{STEP:08d}", step_dir(run_dir, STEP))
    written = load_config([str(step_dir(run_dir, STEP) / "config.yaml")])
    places = {"data.path": str(GOLDEN / "data"), "run_dir": str(run_dir)}
    save_config(change_config(written, places), tmp_path / "run.yaml")
    return tmp_path / "run.yaml"


def test_every_format_has_a_sample() -> None:
    assert FORMATS[-1] == FORMAT_VERSION
    for version in FORMATS:
        assert read_manifest(GOLDEN / f"format-{version}" / f"step-{STEP:08d}")["format_version"] == version
        files = (GOLDEN / f"format-{version}").rglob("*")
        assert sum(path.stat().st_size for path in files if path.is_file()) < MAX_BYTES


def test_resumed_run_has_the_recorded_losses(config: Path, version: int, rank_pool: Pools) -> None:
    assert rank_pool(2).run(train_here, config) == [0, 0]
    then = json.loads((GOLDEN / f"format-{version}" / "losses.json").read_text())
    now = losses(config.with_suffix(""))
    assert len(now) == LAST - STEP
    torch.testing.assert_close(torch.tensor(now), torch.tensor(then[STEP:]), rtol=1e-5, atol=0)  # on other processors
    assert read_manifest(step_dir(config.with_suffix(""), LAST))["format_version"] == FORMAT_VERSION


def test_any_zero_stage_reads_any_format(config: Path, rank_pool: Pools) -> None:
    stage = read_manifest(step_dir(config.with_suffix(""), STEP))["zero_stage"]
    step, messages = open_two(rank_pool, config, f"deepspeed.zero_optimization.stage={stage - 1}")
    assert step == STEP
    assert f"moved: ZeRO stage {stage} -> {stage - 1}" in messages


def test_weights_of_every_format_can_be_scored(config: Path) -> None:
    trained = load_model(config.with_suffix(""), f"data.path={GOLDEN / 'data'}")
    scores = score(trained, "bako miru " * 8)
    assert trained.checkpoint.manifest["step"] == STEP
    assert 4.0 < scores.nll.mean() < 5.54, "less than the loss at step 0"


def test_newer_formats_are_refused_by_name(config: Path, rank_pool: Pools) -> None:
    """Resuming from an older checkpoint would undo the steps of the newer one."""
    newer = step_dir(config.with_suffix(""), STEP + 1)
    shutil.copytree(step_dir(config.with_suffix(""), STEP), newer)
    rewrite_manifest(newer, format_version=FORMAT_VERSION + 1, step=STEP + 1)
    said(refusal(rank_pool, config), "format_version", newer)


REDEFINED = ("memory/state_norm", "memory/effective_rank")  # since 0.1.0: of each head's rows


@pytest.fixture(params=sorted(GOLDEN.glob("release-*")), ids=lambda folder: folder.name)
def released(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder of a release, beside its data."""
    shutil.copytree(request.param, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def test_a_run_of_every_release_ends_as_its_own_code_ended_it(released: Path, rank_pool: Pools) -> None:
    """Its log has what the last step and its evaluation gave then; the checkpoint of that step was never finished."""
    then = figures(released)
    written = load_config([str(released / "config.yaml")])
    places = {"data.path": str(released.parent / "data"), "run_dir": str(released)}
    save_config(change_config(written, places), released.parent / "run.yaml")
    assert rank_pool(2).run(train_here, released.parent / "run.yaml") == [0, 0]
    assert step_dir(released, LAST).is_dir(), "it was trained again"
    now = figures(released)
    assert [step for step, _ in now] == [step for step, _ in then] and then[-1][0] == LAST
    for (_, old), (_, new) in zip(then, now, strict=True):
        alike = {name: metric for name, metric in old.items() if name not in REDEFINED}
        assert alike and old.keys() <= new.keys()
        assert {name: new[name] for name in alike} == pytest.approx(alike, rel=1e-4, abs=1e-6)  # on other processors


@pytest.mark.parametrize(
    "command",
    [
        "data verify data",
        "evaluate run --split validation",
        "compare run run",
        "checkpoints verify run",
        "status run",
        "track sync run",
        "export run --out exported",
        "recompute run --step 3",
    ],
)
def test_commands_read_the_folders_of_every_release(released: Path, command: str) -> None:
    assert main(command.split()) in (0, None)


def test_a_run_goes_on_whose_configuration_has_a_key_that_is_gone(
    released: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files have checksums, so nobody could take the key out. In a file of the user it is refused."""
    saved = (released / "config.yaml").read_text(encoding="utf-8")
    assert "  prometheus: null\n" in saved
    given = saved.replace("  prometheus: null\n", "  prometheus: run.prom\n")
    for name in ("config.yaml", "mine.yaml"):
        (released / name).write_text(given, encoding="utf-8")
    written = load_config([str(released / "config.yaml")])
    assert "prometheus" not in to_yaml(written)
    said(capsys.readouterr().err, released / "config.yaml", "tracking.prometheus is gone")
    with refused(ConfigError, "tracking.prometheus", released / "mine.yaml"):
        load_config([str(released / "mine.yaml")])
