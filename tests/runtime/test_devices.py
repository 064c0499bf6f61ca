"""What a rank runs on: the table of devices, its start with a GPU (on a machine that is pretended), and its heap."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dist_mem.block import model_spec
from dist_mem.errors import UnusableError
from dist_mem.model import MemoryLM
from dist_mem.runtime import distributed, gpu
from dist_mem.runtime.devices import GPUS, device_named, gpu_of
from dist_mem.runtime.gpu import bind_to_gpu, gpu_place, parse_cores
from tests.support.gpus import allow_cores, pretend_gpus
from tests.support.limits import limit
from tests.support.messages import refused
from tests.support.run_memories import small_memory
from tests.support.tiny import VOCAB, tiny_config

# As torch.cuda.get_device_name() prints them.
NAMES = {
    "NVIDIA H200": "h200-141gb",
    "NVIDIA H200 NVL": "h200-nvl-141gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H100 PCIe": "h100-pcie-80gb",
    "NVIDIA H100 NVL": "h100-nvl-94gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "Tesla V100-SXM2-32GB": "v100-32gb",
    "Tesla V100-SXM2-16GB": "v100-16gb",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
}


def test_every_entry_is_found_by_the_names_of_torch_and_no_other_device_has_one() -> None:
    for device_name, name in NAMES.items():
        found = gpu_of(device_name)
        assert found is not None and found.name == name and device_named(name) is found
    assert set(NAMES.values()) == {device.name for device in GPUS}
    assert gpu_of("AMD Instinct MI300X") is None
    assert gpu_of("NVIDIA GH200 480GB") is None
    with refused(UnusableError, "'mi300x'"):
        device_named("mi300x")


@pytest.mark.parametrize(
    ("card", "asked", "found"),
    [
        ("NVIDIA H100 PCIe", "h100", "h100-pcie-80gb"),
        ("NVIDIA H100 PCIe", "h100-80gb", "h100-80gb"),
        ("NVIDIA H200", "h100", "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", "a100-40gb"),
        (None, "h200", "h200-141gb"),
    ],
)
def test_a_name_means_the_card_that_is_there(
    card: str | None, asked: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own memory, and else the form that most clusters have."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=2**36))
    device = gpu.device_of(asked)
    is_here = card is not None and (entry := gpu_of(card)) is not None and entry.name == found
    assert (device.name, device.memory == 2**36) == (found, is_here)


def test_links_are_slower_than_memory_and_networks_than_links() -> None:
    """Units: bytes a second, of one direction."""
    for device in [*GPUS, device_named("cpu")]:
        assert device.network < device.link <= device.bandwidth
        assert 1e9 < device.memory < 2e12 and device.flops["fp16"] >= device.flops["fp32"] >= 1e10


ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
VARIABLES = (*ALLOCATOR, "TORCH_NCCL_ENABLE_TIMING", "DS_ACCELERATOR")


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """None of the variables is set; what a test sets is forgotten."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def flags() -> Iterator[None]:
    """torch's flags come back as they were."""
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark
    yield
    products.allow_tf32, cudnn.allow_tf32, cudnn.deterministic, cudnn.benchmark = before


def test_rank_runs_on_the_cores_next_to_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_cores("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11} and parse_cores("") == set()
    pretend_gpus(monkeypatch, tmp_path)
    place = gpu_place(1)
    assert (place.address, place.node, place.cores) == ("0000:11:00.0", 1, set(range(8, 16)))
    allow_cores(monkeypatch, {6, 7, 8, 9})
    assert bind_to_gpu(1)
    assert os.sched_getaffinity(0) == {8, 9}, "and on none that the launcher has not given it"


@pytest.mark.parametrize("known", [True, False])
def test_cores_stay_where_none_is_next_to_the_gpu_or_nobody_knows(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, tmp_path)
    allow_cores(monkeypatch, {0, 1})
    if not known:  # a virtual machine
        monkeypatch.setattr(gpu, "SYS", tmp_path / "absent")
    assert not bind_to_gpu(1)
    assert os.sched_getaffinity(0) == {0, 1}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_all_threads_of_the_process_are_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In earnest, on this machine's own cores, and back again."""
    before = os.sched_getaffinity(0)
    get, bind = os.sched_getaffinity, os.sched_setaffinity
    pretend_gpus(monkeypatch, tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", get)
    monkeypatch.setattr(os, "sched_setaffinity", bind)
    (tmp_path / "bus/pci/devices/0000:10:00.0/local_cpulist").write_text(f"{min(before)}\n")
    tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    try:
        assert bind_to_gpu(0)
        assert {frozenset(get(task)) for task in tasks} == {frozenset({min(before)})}
    finally:
        for task in tasks:
            bind(task, before)


def test_variables_of_gpus_are_set_unless_the_user_has(tmp_path: Path, variables: pytest.MonkeyPatch) -> None:
    pretend_gpus(variables, tmp_path)
    distributed.choose_accelerator()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["TORCH_NCCL_ENABLE_TIMING"] == "1"
    assert "DS_ACCELERATOR" not in os.environ
    for name in ALLOCATOR:
        variables.delenv(name, raising=False)
    variables.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512")
    variables.setenv("TORCH_NCCL_ENABLE_TIMING", "0")
    distributed.choose_accelerator()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ, "torch would read it first"
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:512"
    assert os.environ["TORCH_NCCL_ENABLE_TIMING"] == "0"


def test_no_variable_of_gpus_is_set_without_one(variables: pytest.MonkeyPatch) -> None:
    variables.setattr(torch.cuda, "is_available", lambda: False)
    distributed.choose_accelerator()
    assert [name for name in VARIABLES if name in os.environ] == ["DS_ACCELERATOR"]


@pytest.mark.parametrize("tf32", [False, True])
def test_process_group_belongs_to_the_gpu_of_the_rank(
    tf32: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: None
) -> None:
    """NCCL then connects at once and for that device; a barrier guesses none."""
    pretend_gpus(monkeypatch, tmp_path)
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    joined: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: joined.update(more, backend=backend))
    world = distributed.initialize(tf32=tf32)
    assert (world.rank, world.device) == (3, torch.device("cuda:1"))
    assert (joined["backend"], joined["device_id"]) == ("nccl", torch.device("cuda:1"))
    assert os.sched_getaffinity(0) == set(range(8, 16))
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    assert torch.backends.cudnn.allow_tf32 is tf32
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark  # a resumed run has equal bits
    allow_cores(monkeypatch, {0, 1, 8})
    distributed.initialize(binds=False)
    assert os.sched_getaffinity(0) == {0, 1, 8}


@pytest.mark.parametrize("tf32", [False, True])
def test_convolutions_of_a_model_are_as_exact_as_its_products_in_any_process(tf32: bool, flags: None) -> None:
    """torch allows TF32 for them by default, so on a GPU `load` and `generate` rounded them, and `evaluate` did not."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    cudnn: Any = torch.backends.cudnn
    before, seen = cudnn.conv.fp32_precision, set[str]()
    config = tiny_config({"memory": {**small_memory("compressive"), "mem_len": 8}})
    model = MemoryLM(model_spec(config, VOCAB)).eval()
    for module in model.modules():
        if isinstance(module, nn.Conv1d):
            module.register_forward_pre_hook(lambda *_: seen.add(cudnn.conv.fp32_precision))
    tokens, valid_len = torch.ones(1, 8, dtype=torch.int64), torch.full((1,), 8)
    state = model.init_state(torch.zeros(1, dtype=torch.int64), "cpu", torch.float32)
    for _ in range(2):
        state = model(tokens, tokens, valid_len, state=state).state
    assert seen == {"tf32" if tf32 else "ieee"}
    assert cudnn.conv.fp32_precision == before


STEPS = """
import resource
import torch
from dist_mem.runtime.machine_memory import keep_heap

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(5 * 2**20) for _ in range(8)]  # 160 MiB: more than glibc keeps by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
kept = keep_heap()
after = [faults() for _ in range(8)]  # the heap may grow more than once, as small blocks come between large ones
print(kept, min(after[4:]))
"""


@pytest.mark.skipif("CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="not glibc")
def test_freed_memory_is_reused_without_page_faults() -> None:
    command = [sys.executable, "-c", STEPS]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit(60)).stdout
    kept, faults = output.split()
    assert kept == "True"
    assert int(faults) < 40_960 / 10, "of 40,960 pages; without the setting, most runs take nearly all of them again"
