"""`dist-mem checkpoints`: what it says of a run's checkpoints is true, and so is its exit code."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.checkpoint import listing
from dist_mem.checkpoint.manifest import read_manifest, step_dir, verify, write_manifest
from tests.support.faults import flip
from tests.support.jobs import build_books, train_here, write_config
from tests.support.messages import said
from tests.support.ranks import Pools


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, rank_pool: Pools) -> Path:
    """Two ranks, ZeRO stage 2; of steps 2, 4, 6, 8 the last two are kept, and every fourth."""
    folder = tmp_path_factory.mktemp("run")
    checkpoint = {"every": 2, "keep_last": 2, "keep_every": 4}
    changes = {"train": {"steps": 8}, "checkpoint": checkpoint}
    config = write_config(folder / "run.yaml", build_books(folder), folder / "run", changes)
    assert rank_pool(2).run(train_here, config) == [0, 0]
    return folder / "run"


@pytest.fixture
def run_dir(tmp_path: Path, trained: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def reported(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    """Exit code and what was printed."""
    code = main(["checkpoints", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def row(text: str, name: str) -> str:
    (found,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return found


def test_list_tells_steps_sizes_ranks_stage_and_which_rule_keeps_each(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = reported(capsys, "list", run_dir)
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == [
        "checkpoint", "step-00000004", "step-00000006", "step-00000008"
    ]  # fmt: skip
    assert re.search(r" 2 +2  keep_every +complete$", row(text, "step-00000004"))
    assert re.search(r" 2 +2  keep_last +complete$", row(text, "step-00000006"))
    assert re.search(r" 2 +2  keep_last, keep_every +complete$", row(text, "step-00000008"))
    files = [path for path in step_dir(run_dir, 8).rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert f"{sum(path.stat().st_size for path in files):,}" in row(text, "step-00000008")


def test_verify_reads_what_list_only_weighs(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step_dir(run_dir, 6).rename(step_dir(run_dir, 6).with_suffix(".broken"))
    code, text = reported(capsys, "verify", run_dir)
    assert code == 0 and "set aside, for you to inspect and delete: step-00000006.broken" in text
    flip(step_dir(run_dir, 8) / "ranks" / "rank-00001.safetensors", -1)
    assert reported(capsys, "list", run_dir)[0] == 0
    code, text = reported(capsys, "verify", run_dir)
    assert code == 1
    assert "BROKEN: ranks/rank-00001.safetensors: SHA-256 differs" in row(text, "step-00000008")
    assert row(text, "step-00000004").endswith("verified")
    assert "a run would resume from step-00000004" in text


def test_verify_names_no_checkpoint_to_resume_from_where_a_newer_dist_mem_has_saved(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A start refuses them all: the steps of the newer one would be undone."""
    write_manifest(step_dir(run_dir, 8), {**read_manifest(step_dir(run_dir, 8)), "format_version": 99})
    code, text = reported(capsys, "verify", run_dir)
    assert code == 1 and row(text, "step-00000006").endswith("verified")
    assert "99 is newer" in row(text, "step-00000008") and "would resume" not in text


def test_a_checkpoint_that_the_running_job_deletes_meanwhile_is_not_broken(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read every byte takes minutes; a monitor then took what checkpoint.keep_last had deleted for damage."""

    def delete_first(directory: Path, check: Any) -> dict[str, Any]:
        shutil.rmtree(step_dir(run_dir, 4), ignore_errors=True)
        return verify(directory, check)

    monkeypatch.setattr(listing, "verify", delete_first)
    code, text = reported(capsys, "verify", run_dir)
    assert code == 0 and "step-00000004" not in text and row(text, "step-00000006").endswith("verified")


@pytest.mark.parametrize("action", ["list", "verify", "show"])
def test_a_file_cut_short_is_found_by_every_command_and_nothing_there_is_exit_code_2(
    run_dir: Path, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    path = step_dir(run_dir, 8) / "engine.json"
    path.write_bytes(path.read_bytes()[:-1])
    code, text = reported(capsys, action, run_dir)
    assert code == 1
    assert re.search(r"BROKEN: engine\.json: [\d,]+ bytes, [\d,]+ expected", text)
    path.with_name("manifest.json").unlink()
    code, text = reported(capsys, "list", run_dir)
    assert code == 1
    assert "BROKEN: no manifest.json, so this save never finished" in row(text, "step-00000008")
    code, text = reported(capsys, action, run_dir.parent)
    assert code == 2
    said(text, run_dir.parent)


def test_show_tells_all_of_one(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = reported(capsys, "show", step_dir(run_dir, 4))
    assert code == 0
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines())
    assert facts["step"] == "4"
    assert facts["ranks"] == "2, ZeRO stage 2"
    assert facts["lanes"] == "8 places"
    assert facts["run"] == str(run_dir)
    assert "deepspeed 0.19" in facts["code"]
    assert read_manifest(step_dir(run_dir, 4))["commit"][:12] in text
    assert reported(capsys, "show", run_dir)[1].splitlines()[0].endswith("step-00000008"), "of a run the newest"


def test_the_command_does_without_torch(run_dir: Path) -> None:
    code = f"import sys; from dist_mem.__main__ import main; main(['checkpoints', 'list', {str(run_dir)!r}]); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
