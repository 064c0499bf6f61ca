"""The drill: it reports a job as survived only if it has survived."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

import pytest

from dist_mem.doctor import drill
from dist_mem.doctor.drill_job import DrillJob


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)  # where TMPDIR was looked at before
    monkeypatch.chdir(tmp_path)


def _at_another_rate(job: DrillJob) -> list[int]:
    """Survives like a job that was stopped by a signal, but has not made the steps it should have."""
    job.start("optimizer.lr=0.5")
    job.wait_for_step(25)
    job.signal(0, signal.SIGTERM)
    return drill.expect_codes(job, [85, 85])


def _killed_instead(job: DrillJob) -> list[int]:
    job.start()
    job.wait_for_step(5)
    for rank in (0, 1):
        job.signal(rank, signal.SIGKILL)
    return drill.expect_codes(job, [85, 85])


def test_drill_distinguishes_jobs_that_survived(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    faults = {"signal": drill.break_by_signal, "another rate": _at_another_rate, "killed": _killed_instead}
    monkeypatch.setattr(drill, "FAULTS", faults)
    assert drill.run() == 1
    printed = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert printed["signal"].split()[1:3] == ["85", "85"]
    assert printed["signal"].endswith("yes")
    assert "NO: its losses differ from step 2 on" in printed["another rate"]
    assert "NO: exit codes -9 -9, expected 85 85" in printed["killed"]
    assert any(line.startswith("1 of 3 survived") for line in printed)
    assert list(tmp_path.glob("dist_mem-drill-*/3-start1-rank0.txt"))  # to look at


@pytest.mark.nightly
def test_a_job_survives_the_whole_drill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drill.run() == 0, capsys.readouterr().out
    assert f"{len(drill.FAULTS)} of {len(drill.FAULTS)} survived" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_task_of_a_step_drills(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(drill, "FAULTS", {})
    monkeypatch.setattr(drill, "prepare", None)  # it would fail
    assert drill.run() == 0
    assert capsys.readouterr().out == ""
