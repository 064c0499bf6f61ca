"""Positive controls, long form: what must be remembered or looked up, is. Run by `make nightly`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dist_mem.evaluation.compare import find_reports
from dist_mem.evaluation.scores import read_report, recall_bands
from tests.support.paths import ROOT

BIN = Path(sys.executable).parent
STEPS = 3000  # of each model; minutes on two cores
LEAST_GAIN = 2.0


def run(folder: Path, *command: str) -> None:
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "RANKS": "2", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=folder, env=environment, check=True)


@pytest.mark.nightly
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("seed", [1])
def test_memory_halves_recall_perplexity_within_its_reach(tmp_path: Path, seed: int) -> None:
    """Distances in (T, T + M]: `transformer_xl` beside `none`, the same steps and everything."""
    run(tmp_path, "dist-mem", "data", "build", "sample", "--out", "data/sample")
    for name, memory in (("forgets", ["memory.kind=none"]), ("remembers", [])):
        changes = [f"name={name}", f"train.steps={STEPS}", f"train.seed={seed}", "tracking.mlflow=false", *memory]
        run(tmp_path, "bash", str(ROOT / "launch" / "local.sh"), str(ROOT / "configs" / "demo.yaml"), *changes)
        run(tmp_path, "dist-mem", "evaluate", f"runs/{name}", "--split", "test")
    run(tmp_path, "dist-mem", "compare", "runs/forgets", "runs/remembers")
    entries = find_reports([tmp_path / "runs" / "forgets", tmp_path / "runs" / "remembers"], "test")
    forgets, remembers = (entry.report for entry in entries)
    band = recall_bands(remembers.seg_len, remembers.mem_len)["memory"]
    assert remembers.recall_in(band)[1] > 1000
    assert forgets.recall_perplexity(band) >= LEAST_GAIN * remembers.recall_perplexity(band)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_associative_recall_within_a_segment_is_solved(tmp_path: Path) -> None:
    """Without a memory: if this fails, so does every comparison of memories on tasks that ask for one."""
    counts = ("--train=8000", "--validation=1", "--test=200")
    sizes = ("--lengths=16", "--pairs=4", "--vocab=16", *counts)
    run(tmp_path, "dist-mem", "data", "build", "mqar", "--out", "data/mqar", *sizes)
    changes = [str(ROOT / "configs" / "mqar_small.yaml"), "tracking.mlflow=false"]
    run(tmp_path, "python", "-m", "dist_mem", "train", *changes)
    run(tmp_path, "python", "-m", "dist_mem", "evaluate", "runs/mqar_small", "--split", "test")
    (found,) = (tmp_path / "runs" / "mqar_small" / "evaluations").glob("test-step-*.json")
    assert read_report(found).accuracy > 0.95
