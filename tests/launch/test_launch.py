"""The same training through every launcher of the README: the deepspeed launcher, torchrun, and none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dist_mem.runtime.network_interface import free_port
from tests.support.jobs import losses, write_config
from tests.support.limits import limit
from tests.support.paths import ROOT

pytestmark = pytest.mark.ranks

BIN = Path(sys.executable).parent

LAUNCHERS = {
    "deepspeed": (2, ["bash", str(ROOT / "launch" / "local.sh")]),
    "torchrun": (2, ["torchrun", "--nproc_per_node", "2", "--master_port", "PORT", "-m", "dist_mem", "train"]),
    "none": (1, [sys.executable, "-m", "dist_mem", "train"]),
}


def launch(name: str, config: Path, *overrides: str, python_path: str = "") -> subprocess.CompletedProcess[str]:
    world_size, command = LAUNCHERS[name]
    port = str(free_port())
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("SLURM_")},
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RANKS": str(world_size),
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [python_path, os.environ.get("PYTHONPATH")])),
    }
    arguments = [port if part == "PORT" else part for part in command]
    return subprocess.run(
        [*arguments, str(config), *overrides],
        cwd=config.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit(200),
    )


def shared_buffers() -> set[str]:
    """Names of DeepSpeed's shared memory on this machine."""
    return {path.name for path in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*")}


def test_all_launchers_train_to_the_same_losses(tmp_path: Path, books: Path) -> None:
    found = {}
    before = shared_buffers()
    for name in LAUNCHERS:
        changes = {"train": {"steps": 3}, "model": {"dropout": 0.0}}
        done = launch(name, write_config(tmp_path / f"{name}.yaml", books, tmp_path / name, changes))
        assert done.returncode == 0, done.stdout + done.stderr
        found[name] = losses(tmp_path / name)
    assert found["deepspeed"] == found["torchrun"]
    assert found["none"] == pytest.approx(found["torchrun"], abs=1e-5)
    assert len(found["none"]) == 3
    assert shared_buffers() <= before, "66 MiB of memory a rank would stay behind"


@pytest.mark.parametrize("name", sorted(LAUNCHERS))
def test_launcher_passes_the_exit_code_of_a_refused_configuration(tmp_path: Path, books: Path, name: str) -> None:
    """Said once: torchrun ends all ranks as soon as one has ended, and rank 0, which alone prints, is slow here."""
    slow = tmp_path / "slow" / "sitecustomize.py"
    slow.parent.mkdir()
    slow.write_text("import os, time\nif os.environ.get('RANK') == '0':\n    time.sleep(1.0)\n", encoding="utf-8")
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run")
    done = launch(name, config, "train.step=4", python_path=str(slow.parent))
    # torchrun has no exit code but 1 for a failed rank
    assert done.returncode == (1 if name == "torchrun" else 2), done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("train.step: unknown key; did you mean train.steps?") == 1
