"""The memory of a job is predicted before it is allocated: within a tenth of what is used."""

import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from dist_mem.block import model_spec
from dist_mem.checkpoint.snapshot import Snapshot, take_snapshot
from dist_mem.config import Config, load_config
from dist_mem.engine.optimizer import build_optimizer
from dist_mem.errors import UnusableError
from dist_mem.estimate import memory as room
from dist_mem.estimate.memory import (
    MemoryPart,
    fits_without_counting,
    refuse_what_cannot_fit,
    scoring_parts,
    training_parts,
    writing_parts,
)
from dist_mem.estimate.zero import Shares, job_of, shares, sizes_of
from dist_mem.memory import memory_kinds, memory_options
from dist_mem.memory.base import detach_state, named_tensors
from dist_mem.model import MemoryLM
from dist_mem.nn.kernel_shapes import plan_for
from dist_mem.runtime.distributed import World
from dist_mem.runtime.machine_memory import Limit, _of_folders, memory_limits
from dist_mem.training import saving
from tests.support.allocated import Allocated
from tests.support.jobs import train_here, write_config
from tests.support.ranks import Pools

ROOT = Path(__file__).parents[2] / "configs"
VOCAB_SIZE = 20_000  # small: a large one would hide the memories
SHIPPED = sorted([*ROOT.glob("*.yaml"), *ROOT.glob("papers/*.yaml"), *ROOT.glob("memory/*.yaml")])


def shipped(path: Path, *overrides: str) -> Config:
    settings: Any = OmegaConf.load(path)
    base = ROOT / "papers" / "wikitext103.yaml"
    files = [base, path] if path.stem.startswith("wikitext103_") else [path]
    steps = [] if len(files) > 1 or {"steps", "epochs"} & {*settings.get("train", {})} else ["train.steps=9"]
    # Which rows an adaptive softmax takes only values can tell.
    whole = ["train.precision=fp32", "deepspeed.zero_optimization.stage=0", "model.adaptive=null"]
    return load_config([*map(str, files), *steps, *whole, *overrides], memory_options=memory_options)


def of_two_blocks(path: Path, folder: Path) -> Path:
    """A copy of a configuration whose memory is a map, with the last block's own memory in block 1; else itself."""
    settings: Any = OmegaConf.to_container(OmegaConf.load(path))
    memory = settings.get("memory", {})
    own = [index for index in memory if str(index).isdigit()]
    if not own:
        return path
    settings["memory"] = {"default": memory["default"], 1: memory[max(own)]}
    copy = folder / path.name
    copy.write_text(OmegaConf.to_yaml(OmegaConf.create(settings)), encoding="utf-8")
    return copy


def allocated(config: Config) -> int:
    """Bytes in the second update of one rank without ZeRO, counted on tensors without values."""
    train = config.train
    lanes, num_segments = train.micro_batch_size, train.bptt_segments
    tokens = torch.zeros(lanes, num_segments * train.seg_len, dtype=torch.int64, device="meta")
    document = torch.zeros(lanes, dtype=torch.int64, device="meta")
    length = document if num_segments == 1 else document[:, None].expand(-1, num_segments)
    later = [None] * (num_segments - 1)
    with torch.device("meta"), plan_for("cpu"), Allocated() as counted:
        model = MemoryLM(model_spec(config, VOCAB_SIZE))
        optimizer = build_optimizer(model, config.optimizer)
        num_groups = train.global_batch_size // train.micro_batch_size
        states = [model.init_state(document, "meta", torch.float32) for _ in range(num_groups)]
        for _ in range(2):
            before, states = states, []
            for state in before:
                output = model(tokens, tokens, length, state=state, later=later)
                states.append(detach_state(output.state))
                loss = sum([output.nll.sum(), *(part.sum() for part in output.aux.values())])
                del output
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return counted.live.peak


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_configurations_need_what_is_predicted(path: Path, tmp_path: Path) -> None:
    path = of_two_blocks(path, tmp_path)
    smaller = ["train.global_batch_size=2", "train.micro_batch_size=1", "model.num_layers=2"]
    has_chunks = path.stem in ("titans_340m", "gated_deltanet_1.3b")  # many small products; windows: memory/titans
    most = 1 if has_chunks else 2
    if shipped(path, *smaller).train.bptt_segments > most:
        smaller += [f"train.segments_per_update={most}", f"train.bptt_segments={most}"]
    if has_chunks:
        smaller += ["train.seg_len=128"]
    check(shipped(path, *smaller))


@pytest.mark.parametrize("micro_lanes", [1, 8])
@pytest.mark.parametrize("name", ["demo", "papers/enwik8", "papers/sorting_lamemo"])
def test_an_update_of_one_micro_batch_needs_what_is_predicted(name: str, micro_lanes: int) -> None:
    """Its gradients take the place of its activations."""
    lanes = [f"train.{size}_batch_size={micro_lanes}" for size in ("global", "micro")]
    check(shipped(ROOT / f"{name}.yaml", *lanes, "train.segments_per_update=1", "model.num_layers=2"))


def check(config: Config) -> None:
    """The prediction is within a tenth, and what `fits_without_counting` allows is more than is used."""
    job = job_of(config, VOCAB_SIZE, world_size=1, on_gpu=False)
    predicted = sum(part.num_bytes for part in training_parts(job, config.eval))
    used = allocated(config)
    print(f"{predicted / used:.3f} of {used / 2**20:,.0f} MiB")
    assert 0.9 * used <= predicted <= 1.1 * used
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(room, "memory_limits", lambda device: [Limit("all", "all", used)])
        alone = World(0, 1, 0, 1, torch.device("cpu"))
        assert not fits_without_counting(job, alone, num_lanes=2 * config.train.global_batch_size)
    assert fits_without_counting(job, alone, num_lanes=2 * config.train.global_batch_size) or used > 2**29


def trained(world: World, config_file: Path, changes: list[str]) -> tuple[int, int]:
    """Bytes that are counted for a rank, and those that its tensors take in a real training before it is saved."""
    config = load_config([str(config_file), *changes], memory_options=memory_options)
    parts = training_parts(job_of(config, 257, world_size=world.size, on_gpu=False), config.eval)
    most: list[int] = []
    with Allocated() as used, pytest.MonkeyPatch.context() as patched:

        def note(**arguments: Any) -> Snapshot:
            if not arguments["is_rehearsal"]:  # before the first step
                most.append(used.live.peak)
            return take_snapshot(**arguments)

        patched.setattr(saving, "take_snapshot", note)
        assert train_here(world, config_file, changes) == 0
    return sum(part.num_bytes for part in parts), most[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_training_needs_what_is_predicted(
    books: Path, tmp_path: Path, rank_pool: Pools, stage: int, precision: str
) -> None:
    large = {"model": {"d_model": 128, "d_inner": 512}, "train": {"steps": 2, "segments_per_update": 2}}
    buckets = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000, "stage3_prefetch_bucket_size": 0}
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", large)
    zero = {**buckets, "stage": stage} if stage else {"stage": 0}
    changes = [f"train.precision={precision}", *(f"deepspeed.zero_optimization.{key}={zero[key]}" for key in zero)]
    for counted, used in rank_pool(2).run(trained, config, changes):
        print(f"stage {stage}, {precision}: {counted / used:.2f} of {used / 2**20:,.1f} MiB")
        assert 0.75 * used <= counted <= 1.15 * used  # a model of 9 MiB; stage 2 in fp32 is 0.80


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_only_what_deepspeed_takes_from_the_gpu_at_a_stage_is_not_counted(stage: int) -> None:
    """`estimate` let a job fit whose weights at stages 0 to 2, and optimizer at stage 0, DeepSpeed leaves there."""

    def held(*offloaded: str) -> Shares:
        zero = [f"deepspeed.zero_optimization.{key}.device=cpu" for key in offloaded]
        config = shipped(ROOT / "demo.yaml", f"deepspeed.zero_optimization.stage={stage}", *zero)
        job = job_of(config, VOCAB_SIZE, world_size=2, on_gpu=True)
        return shares(job, sizes_of(job.spec, torch.float32, job.optimizer))

    usual, moved = held(), held("offload_optimizer", "offload_param")
    assert (moved.weights < usual.weights) == (stage == 3) and moved.weights > 0
    assert moved.optimizer == (0 if stage else usual.optimizer) < 2 * usual.optimizer


def scored(config: Config, num_lanes: int) -> int:
    """Bytes of scoring one segment in so many lanes, on tensors without values."""
    length = torch.zeros(num_lanes, dtype=torch.int64, device="meta")
    tokens = torch.zeros(num_lanes, config.train.seg_len, dtype=torch.int64, device="meta")
    with torch.device("meta"), torch.no_grad(), Allocated() as counted:
        model = MemoryLM(model_spec(config, VOCAB_SIZE)).eval()
        state = model.init_state(length, "meta", torch.float32)
        model(tokens, tokens, length, state=state)
    return counted.live.peak


@pytest.mark.parametrize("kind", memory_kinds())
def test_scoring_needs_what_is_predicted_and_writing_less(kind: str) -> None:
    config = shipped(
        ROOT / "demo.yaml", f"memory={{kind: {kind}}}", "train.global_batch_size=50", "train.micro_batch_size=50"
    )
    used, spec = scored(config, 50), model_spec(config, VOCAB_SIZE)
    counted = sum(part.num_bytes for part in scoring_parts(spec, config.eval, num_lanes=50, on_gpu=False))
    assert 0.9 * used <= counted <= 1.1 * used
    writing = sum(part.num_bytes for part in writing_parts(spec, "fp32", num_samples=50))
    assert writing <= counted


def test_scoring_on_cpus_needs_no_copies_of_the_logits() -> None:
    """They were counted as on GPUs: 6 GiB for 1,024 tokens of 100,000 in 8 lanes."""
    lanes = ["train.seg_len=1024", "train.global_batch_size=8", "train.micro_batch_size=8"]
    config = shipped(ROOT / "demo.yaml", *lanes)
    spec = model_spec(config, 100_000)
    *_, forward = scoring_parts(spec, config.eval, num_lanes=8, on_gpu=False)
    assert forward.num_bytes < 300 * 2**20


def test_what_writing_keeps_of_open_segments_is_counted() -> None:
    """Keys and values of M + T rows in every block, of a memory that reads them row by row."""
    memory = "memory={default: {kind: transformer_xl, mem_len: 96}, 0: {kind: linear}}"
    config = shipped(ROOT / "demo.yaml", memory, "model.num_layers=2")
    spec = model_spec(config, VOCAB_SIZE)
    opened = [part for part in writing_parts(spec, "fp32", num_samples=5) if "open segments" in part.what]
    model = MemoryLM(spec)
    zeros = torch.zeros(5, dtype=torch.int64)
    opened_segment = model.open(model.init_state(zeros, "cpu", torch.float32), zeros)
    kept = [named_tensors(block.lanes).values() for block in opened_segment.blocks]
    assert [part.num_bytes for part in opened] == [sum(t.numel() * t.element_size() for each in kept for t in each)]
    assert max(t.numel() for t in kept[1]) == 5 * (96 + config.train.seg_len) * 2 * config.model.d_model


def test_ranks_that_share_a_limit_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the machine each is too much for three ranks of a node, and not for two, or three on three nodes."""
    half = MemoryPart("all", 50, {"train.global_batch_size": 8})

    def refused(nodes: list[str]) -> bool:
        limits = {node: [Limit(node, node, 100)] for node in nodes}
        monkeypatch.setattr(room, "memory_limits", lambda device: limits[nodes[0]])
        try:
            refuse_what_cannot_fit([half], torch.device("cpu"), gather=lambda _: [(50, limits[node]) for node in nodes])
        except UnusableError as error:
            assert "for 3 ranks" in str(error) and "train.global_batch_size = 8" in str(error)
            return True
        return False

    assert refused(["a", "a", "a"])
    assert not refused(["a", "a"])
    assert not refused(["a", "b", "c"])


def test_the_limits_of_this_process_are_found() -> None:
    limits = memory_limits(torch.device("cpu"))
    machine = next(limit for limit in limits if "swap included" in limit.text)
    with Path("/proc/meminfo").open(encoding="ascii") as lines:
        assert machine.num_bytes >= 1024 * int(next(lines).split()[1])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**45, hard))
    try:
        assert 2**45 in [limit.num_bytes for limit in memory_limits(torch.device("cpu"))]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def limits_of_group(folder: Path, file: str, swap: int, **files: str) -> list[int]:
    """Return the limits of a control group on a machine with this swap; `__` in a keyword stands for a dot."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")
    return [limit.num_bytes for limit in _of_folders(folder, "/", file, swap)]


def test_a_control_group_s_limit_is_found(tmp_path: Path) -> None:
    """With its swap; that of a group around it too."""
    inner = tmp_path / "job" / "step"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.swap.max").write_text("max\n")
    (tmp_path / "job" / "memory.max").write_text("1000\n")
    (tmp_path / "job" / "memory.swap.max").write_text("24\n")
    found = list(_of_folders(tmp_path, "/job/step", "memory.max", 2**40))
    assert [limit.num_bytes for limit in found] == [1024]
    assert str(tmp_path / "job") in found[0].text


def test_a_control_group_has_at_most_the_swap_of_its_machine(tmp_path: Path) -> None:
    new = partial(limits_of_group, file="memory.max", memory__max="1000")
    assert new(tmp_path / "a", swap=0, memory__swap__max="max") == [1000]
    assert new(tmp_path / "b", swap=5, memory__swap__max="24") == [1005]
    assert new(tmp_path / "c", swap=5) == [1005], "a kernel that does not count swap has no such file"
    no_limit = str(2**63 - 4096)
    old = partial(limits_of_group, file="memory.limit_in_bytes", swap=5)
    assert old(tmp_path / "d", memory__limit_in_bytes="1000") == [1005]
    assert old(tmp_path / "e", memory__limit_in_bytes="1000", memory__memsw__limit_in_bytes="1002") == [1002]
    assert old(tmp_path / "f", memory__limit_in_bytes="1000", memory__memsw__limit_in_bytes=no_limit) == [1005]
    assert old(tmp_path / "g", memory__limit_in_bytes=no_limit, memory__memsw__limit_in_bytes=no_limit) == []
