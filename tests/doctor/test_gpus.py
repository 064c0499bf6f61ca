"""The doctor's checks of a rank with a GPU, on a machine that is pretended: each fault is named with its fix."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dist_mem.doctor.gpus import check_gpu
from dist_mem.runtime.distributed import World
from dist_mem.supervision.findings import FAIL, OK, WARNING, Remark
from tests.support.gpus import add_card, allow_cores, pretend_gpus
from tests.support.messages import said

WORLD = World(rank=1, size=16, local_rank=1, local_size=8, device=torch.device("cuda:1"))
SETTINGS = {"NVIDIA_TF32_OVERRIDE": "", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": ""}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A sound node with two GPUs and two cards of InfiniBand, its rank bound to its GPU."""
    pretend_gpus(monkeypatch, tmp_path)
    allow_cores(monkeypatch, set(range(8, 16)))
    for node in range(2):
        add_card(tmp_path, f"mlx5_{node}", node=node)
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def found(what: str, *, tf32: bool = False) -> Remark:
    (remark,) = (one for one in check_gpu(WORLD, tf32=tf32) if one.what == what)
    return remark


def test_sound_rank_passes_with_what_was_found(machine: pytest.MonkeyPatch) -> None:
    remarks = {remark.what: remark for remark in check_gpu(WORLD, tf32=False)}
    assert {remark.level for remark in remarks.values()} == {OK}
    assert remarks["cores"].found == "8 cores next to the GPU (NUMA node 1)"
    assert remarks["network card"].found == "mlx5_1 of 2 next to the GPU"
    assert set(remarks) == {"cores", "network card", "float32"}


def setting(name: str, value: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setenv(name, value)


def cores(*allowed: int) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: allow_cores(patch, set(allowed))


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str, str]] = {
    "one core": (cores(9), "cores", WARNING, "1 cores for"),
    "far cores": (cores(0, 1, 2, 3), "cores", WARNING, "none of them next to its GPU"),
    "not bound": (cores(*range(16)), "cores", WARNING, "16 cores, 8 of them"),
    "no interface": (setting("NCCL_SOCKET_IFNAME", "ib9"), "network card", FAIL, "ib9 is not there"),
    "TF32 forced": (setting("NVIDIA_TF32_OVERRIDE", "1"), "float32", FAIL, "NVIDIA_TF32_OVERRIDE=1"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named_with_its_fix(name: str, machine: pytest.MonkeyPatch) -> None:
    make, what, level, found = FAULTS[name]
    make(machine)
    remark = next(one for one in check_gpu(WORLD, tf32=False) if one.what == what)
    assert remark.level == level and remark.fix
    said(remark.found, found)


def test_card_without_a_link_is_named(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    add_card(tmp_path, "mlx5_2", node=1, state="1: DOWN")
    remark = found("network card")
    assert (remark.level, remark.found) == (WARNING, "mlx5_2 has no link, mlx5_0, mlx5_1 has")


def test_tf32_that_the_run_wants_is_no_fault(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert found("float32", tf32=True).level == OK
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "1"
