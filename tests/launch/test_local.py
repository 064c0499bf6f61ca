"""Ranks of one machine see the GPUs that the user chose, in launch/local.sh, in sweeps and in `dist_mem.train`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dist_mem.runtime.children import launcher
from dist_mem.runtime.ranks import gpus_are_hidden, names_of_gpus
from tests.support.limits import limit
from tests.support.paths import ROOT

# The first has an instance of MIG, which is no further GPU.
NVIDIA_SMI = "#!/bin/sh\nfor index in 0 1 2 3; do echo GPU $index:; [ $index -gt 0 ] || echo '  MIG 0:'; done\n"
# As DeepSpeed's: it numbers the GPUs from 0, whatever the user chose, and runs the program behind its options.
DEEPSPEED = """#!/bin/bash
while [ "$1" != --no_python ]; do [ "$1" != --num_gpus ] || ranks=$2; shift; done
shift
for rank in $(seq "$ranks"); do CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 "$@"; done
"""
# In place of Python, which would train.
RANK = '#!/bin/sh\necho "rank sees ${CUDA_VISIBLE_DEVICES-all}, ${DS_ACCELERATOR-cuda}"\n'
# CUDA_VISIBLE_DEVICES (None: not set), RANKS, and the ranks on a machine of four GPUs.
CHOICES = {
    "all": (None, "", 4),
    "all, fewer ranks": (None, "2", 2),
    "two": ("2,3", "", 2),
    "two, one rank": ("2,3", "1", 1),
    "blanks": ("1, 3", "", 2),
    "identifiers": ("GPU-5d1f,MIG-77aa,GPU-9", "", 3),
    "up to what is no GPU": ("3,-1,0", "", 1),
    "empty": ("", "", 1),
    "empty, two ranks": ("", "2", 2),
    "-1": ("-1", "", 1),
    "Slurm's word for none": ("NoDevFiles", "2", 2),
}


def chosen(devices: str | None, ranks: str, folder: Path) -> dict[str, str]:
    """The environment of a user on a machine on which the programs of `folder` come first."""
    kept = {name: value for name, value in os.environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR")}
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**kept, "PATH": path, "RANKS": ranks} | ({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})


def programs(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / name.replace("_", "-")).write_text(text, encoding="utf-8")
        (folder / name.replace("_", "-")).chmod(0o755)


def sees(folder: Path, devices: str | None, ranks: str) -> list[str]:
    """What each rank of local.sh sees."""
    programs(folder, deepspeed=DEEPSPEED, python=RANK)
    command, environment = ["bash", str(ROOT / "launch" / "local.sh"), "run.yaml"], chosen(devices, ranks, folder)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit(10), check=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has the driver's program")
@pytest.mark.parametrize(("ranks", "expected"), [("", 1), ("2", 2)])
def test_a_machine_without_the_driver_trains_on_cpus(ranks: str, expected: int, tmp_path: Path) -> None:
    assert sees(tmp_path, None, ranks) == ["rank sees all, cpu"] * expected


@pytest.mark.parametrize("name", CHOICES)
def test_the_ranks_of_local_sh_are_those_of_the_visible_gpus_and_see_no_others(name: str, tmp_path: Path) -> None:
    devices, ranks, expected = CHOICES[name]
    programs(tmp_path, nvidia_smi=NVIDIA_SMI)
    is_cpu = devices is not None and not devices[:1].isdigit() and not devices.startswith("GPU-")
    seen = f"rank sees {'all' if devices is None else devices}, {'cpu' if is_cpu else 'cuda'}"
    assert sees(tmp_path, devices, ranks) == [seen] * expected


@pytest.mark.parametrize(("gpus", "device"), [(1, "cpu"), (4, "cuda")])
def test_a_demo_whose_first_training_fails_ends_and_needs_no_second_gpu(gpus: int, device: str, tmp_path: Path) -> None:
    """It would wait for ever for half of the steps; one GPU cannot have two ranks."""
    (tmp_path / "tree" / "launch").mkdir(parents=True)
    (tmp_path / "tree" / "configs").mkdir()
    for name in ("launch/demo.sh", "launch/local.sh", "configs/demo.yaml"):
        shutil.copy(ROOT / name, tmp_path / "tree" / name)
    listed = NVIDIA_SMI.replace("0 1 2 3", " ".join(map(str, range(gpus))))
    programs(tmp_path, deepspeed=f"{DEEPSPEED}exit 1\n", python=RANK, dist_mem="#!/bin/sh\n", nvidia_smi=listed)
    command, environment = ["bash", "launch/demo.sh"], chosen(None, "", tmp_path)
    done = subprocess.run(
        command, cwd=tmp_path / "tree", env=environment, capture_output=True, text=True, timeout=limit(20)
    )
    assert done.returncode == 1 and "expected exit code 85" in done.stderr, done.stderr
    assert done.stdout.count(f"rank sees {'all' if gpus > 1 else ''}, {device}") == 2


@pytest.mark.parametrize("name", CHOICES)
def test_gpus_are_hidden_and_named_as_cuda_reads_the_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices, ranks, expected = CHOICES[name]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if devices is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    is_cpu = name in ("empty", "empty, two ranks", "-1", "Slurm's word for none")
    assert gpus_are_hidden() == is_cpu
    if not is_cpu and not ranks:
        own = [gpu.strip() for gpu in (devices or "0,1,2,3").split(",")]
        assert [gpu.strip() for gpu in names_of_gpus(expected)] == own[:expected]


def test_the_launcher_of_deepspeed_passes_on_what_the_user_chose(tmp_path: Path) -> None:
    """The real one, through local.sh and as sweeps and `dist_mem.train` start it."""
    devices = "GPU-5d1f,GPU-77aa"
    programs(tmp_path, nvidia_smi=NVIDIA_SMI, python=RANK)
    environment = chosen(devices, "2", tmp_path)
    given = launcher(2, devices)
    place = given.index("env")
    program = [*given[place : given.index(sys.executable, place)], "python"]  # in place of the one that trains
    for command in (["bash", str(ROOT / "launch" / "local.sh"), "run.yaml"], [*given[:place], *program]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit(60), check=True)
        assert done.stdout.count(f"rank sees {devices}, ") == 2, done.stdout
