"""The doctor and the preflight: each fault is made for real where that can be done here, and must be named."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_mem.cli.configuration import load_checked
from dist_mem.config import DataConfig, EvalConfig
from dist_mem.doctor import consistency, disks, machine, network
from dist_mem.doctor.examine import examine
from dist_mem.doctor.preflight import preflight
from dist_mem.errors import EXIT_FAILED, UnfitError, UnusableError
from dist_mem.runtime.distributed import World, gather_objects
from dist_mem.runtime.network_interface import free_port
from dist_mem.supervision.findings import (
    FAIL,
    OK,
    WARNING,
    Finding,
    Place,
    Remark,
    fail,
    failed_nodes,
    lines,
    may_pass,
    ok,
)
from dist_mem.supervision.hang_report import FAILED_NODES
from dist_mem.supervision.rendezvous import RankDevice, check_accelerators, wait_for_ranks
from tests.support.jobs import train_here, write_config
from tests.support.lane_corpus import make_split
from tests.support.limits import limit
from tests.support.messages import said, said_line
from tests.support.ranks import Pools, launcher_environment
from tests.support.wrong_ports import naming_a_wrong_port

PYTHON = [sys.executable, "-m", "dist_mem"]


def can_mount() -> bool:
    done = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
    return done.returncode == 0


needs_mount = pytest.mark.skipif(
    not (shutil.which("unshare") and can_mount()), reason="needs to be root and to be allowed to mount (unshare -m)"
)


@pytest.fixture
def config(tmp_path: Path, books: Path) -> Path:
    """Of a job in the folder `run`."""
    return write_config(tmp_path / "config.yaml", books, tmp_path / "run")


def levels(found: Sequence[Remark]) -> list[str]:
    return [remark.level for remark in found]


def doctor(*arguments: str, cwd: Path, before: str = "", shell: Sequence[str] = ("sh",)) -> tuple[int, str]:
    """`dist-mem doctor` of one rank, after the lines `before` of a shell."""
    command = [*shell, "-c", f'{before}\nexec "$@"', "sh", *PYTHON, "doctor", *arguments]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    done = subprocess.run(command, cwd=cwd, env=kept, capture_output=True, text=True, timeout=limit(120))
    assert "all-reduce" not in done.stderr, "findings are output"
    return done.returncode, done.stdout + done.stderr


def on_two_nodes(arguments: Sequence[str], *, cwd: Path, second: Sequence[str], **more: str) -> tuple[int, int, str]:
    """`dist-mem doctor` on node1 and node2, one rank each; `second` goes before node2's command, `more` into its
    environment. Returns the exit codes, and what was printed."""
    port = free_port()
    started = []
    for rank, prefix in ((0, []), (1, list(second))):
        node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "SLURMD_NODENAME": f"node{rank + 1}"}
        environment = {**os.environ, **launcher_environment(rank, 2, port), **node, **(more if rank else {})}
        command = [*prefix, *PYTHON, "doctor", *arguments]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True))
    texts = ["".join(process.communicate(timeout=limit(180))) for process in started]
    return started[0].returncode, started[1].returncode, "".join(texts)


def test_a_sound_machine_passes_without_a_configuration(tmp_path: Path) -> None:
    code, text = doctor(cwd=tmp_path)
    assert code == 0, text
    for what in ("accelerator", "open files", "umask", "/dev/shm", "C++ compiler", "caches", "code", "all-reduce"):
        assert any(line.split(maxsplit=1)[1].startswith(what) for line in text.splitlines()[:-1]), what
    assert "0 FAIL" in text
    assert list(tmp_path.iterdir()) == []


def test_a_sound_job_passes_on_two_ranks_and_leaves_nothing_behind(tmp_path: Path, config: Path) -> None:
    run_dir = "run_dir=runs/new"
    first, second, text = on_two_nodes([str(config), run_dir], cwd=tmp_path, second=[])
    assert (first, second) == (0, 0), text
    for what in ("rendezvous", "configuration", "data", "run directory", "disk room", "inodes", "bandwidth"):
        assert f"ok       {what} " in text
    assert "0 FAIL" in text
    warnings = [line for line in text.splitlines() if line.startswith(WARNING)]
    assert all("/dev/shm" in line for line in warnings), text  # where it is small
    assert not (tmp_path / "runs").exists()


@needs_mount
def test_each_fault_of_one_node_is_named_with_its_node(tmp_path: Path, books: Path, config: Path) -> None:
    """All at once, for a start takes seconds: another version, other configuration and data, few open files, a run
    directory of its own."""
    (tmp_path / "run").mkdir()
    cut = tmp_path / "cut"
    shutil.copytree(books, cut)
    tar = next((cut / "train").glob("*.tar"))
    os.truncate(tar, tar.stat().st_size - 512)
    shim = tmp_path / "shim" / "deepspeed-0.0.1.dist-info"
    shim.mkdir(parents=True)
    (shim / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.0.1\n")
    script = f'mount -t tmpfs tmpfs "{tmp_path}/run"; ulimit -n 64; exec "$@" optimizer.lr=0.5 data.path="{cut}"'
    prefix = ["unshare", "-m", "sh", "-c", script, "sh"]
    path = os.pathsep.join([str(shim.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    first, second, text = on_two_nodes([str(config)], cwd=tmp_path, second=prefix, PYTHONPATH=path)
    assert (first, second) == (1, 1), text
    failures = [line for line in text.splitlines() if line.startswith(FAIL)]
    expected = {
        "open files": "64 may be open, a rank needs 208 -> ulimit -n 4096",
        "code": "deepspeed: 0.0.1, but",
        "configuration": "optimizer.lr: 0.5, but 0.003 on 1 of 2 ranks",
        "data": f"{tar} has",
        "run directory": f"{tmp_path}/run (on tmpfs here) is not the folder that rank 0 has -> set run_dir",
    }
    for what, text_of in expected.items():
        assert any(what in line and "node2" in line and text_of in line for line in failures), f"{what} in\n{text}"
    assert not any("node1" in line.split(" -> ")[0].replace("node1 rank 0", "") for line in failures), text
    assert all(" -> " in line for line in failures)


@pytest.mark.parametrize(
    ("requested", "level"),
    [("ccache program", OK), ("program -pipe", OK), ("absent -pipe", FAIL), ("absent", FAIL), ("'program", FAIL)],
)
def test_first_word_of_cxx_is_the_compiler_that_is_looked_for(
    requested: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("program", "ccache", "ninja"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", requested)
    world = World(0, 1, 0, 1, torch.device("cpu"))
    (found,) = (remark for remark in machine.check_machine(world) if remark.what == "C++ compiler")
    assert found.level == level
    if level == FAIL:
        said(found.found, repr(requested), "CXX")


@needs_mount
@pytest.mark.parametrize(("options", "what"), [("size=1m", "disk room"), ("size=64m,nr_inodes=20", "inodes")])
def test_a_disk_without_room_for_two_checkpoints_fails(tmp_path: Path, books: Path, options: str, what: str) -> None:
    changes = {"model": {"d_model": 64, "d_inner": 256, "num_layers": 2, "num_heads": 2}}
    config = write_config(tmp_path / "config.yaml", books, tmp_path / "run", changes)
    (tmp_path / "run").mkdir()
    mount = f'mount -t tmpfs -o {options} tmpfs "{tmp_path}/run"'
    code, text = doctor(str(config), cwd=tmp_path, before=mount, shell=["unshare", "-m", "sh"])
    assert code == 1
    assert f"{FAIL}     {what} " in text, text
    assert "keep fewer (checkpoint.keep_last)" in text


def test_low_limits_are_raised_or_a_warning(tmp_path: Path) -> None:
    code, text = doctor(cwd=tmp_path, before="ulimit -S -n 512")
    assert code == 0
    assert "ok       open files" in text
    code, text = doctor(cwd=tmp_path, before="ulimit -n 512; umask 000")
    assert code == 0, text
    assert "512 may be open, 4096 are usual -> ulimit -n 4096" in text
    assert "umask" in next(line for line in text.splitlines() if "everybody may change" in line)


# What the ranks find out together, in ranks that are already there.


def _preflight(world: World, config_file: Path, changes: Sequence[Sequence[str]]) -> str | list[str]:
    """Every rank a node; the refusal, or the warnings."""
    machine.SHM = config_file.parent  # the real one may be small
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURMD_NODENAME", f"node{world.rank + 1}")
        patch.setenv("DOCTOR_SECRET", f"hunter2-{world.rank}")
        config = load_checked([str(config_file), *changes[world.rank]])
        try:
            return preflight(config, replace(world, local_rank=0, local_size=1))
        except (UnfitError, UnusableError) as error:
            return f"{type(error).__name__}: {error}"


def test_preflight_refuses_on_all_ranks_with_one_message_and_notes_a_node_that_is_at_fault(
    tmp_path: Path, books: Path, config: Path, rank_pool: Pools
) -> None:
    failed = tmp_path / "run" / FAILED_NODES
    message = rank_pool(2).run(_preflight, config, [[], ["train.seed=7"]])[0]
    assert "train.seed: 7, but 0 on 1 of 2 ranks -> give every rank the same files and overrides" in message
    assert not failed.exists(), "the configuration is at fault"
    other = Path(shutil.copytree(books, tmp_path / "other"))
    tar = next((other / "train").glob("*.tar"))
    tar.unlink()
    messages = rank_pool(3).run(_preflight, config, [[], [], [f"data.path={other}"]])
    assert messages[0] == messages[1] == messages[2]
    said_line(messages[0], f"{tar} is missing", "node3")
    said_line(messages[0], "train/*.tar: 0 tars, 0 bytes, but 1 tar, ", "on 2 of 3 ranks", "node3")
    assert failed.read_text() == "node3\n"
    assert rank_pool(3).run(_preflight, config, [[], [], []]) == [[], [], []]


def test_what_the_nodes_compare_of_their_data_does_not_grow_with_the_number_of_tars(tmp_path: Path) -> None:
    """Rank 0 would get the names of 30,000 tars from each node, in as many lines if a disk is not there."""
    sizes = []
    for number in (4, 40):
        index = make_split(tmp_path / str(number) / "train", [3] * number, max_shard_bytes=1)
        data = DataConfig(path=str(tmp_path / str(number)))
        for is_there in (True, False):
            compared = consistency.fingerprint_data(data, EvalConfig())
            found = list(consistency.check_tars(data, EvalConfig(), compared))
            sizes.append((len(compared), len(found)))
            assert compared["train/*.tar"].startswith(f"{number if is_there else 0} tars, ")
            for shard in index.shards:
                (index.split_dir / shard.name).unlink(missing_ok=True)
        said(found[-1].found, number - 3, "of", index.split_dir)
    assert sizes == [(sizes[0][0], 0), (sizes[0][0], 4)] * 2


def _preflight_at_a_wrong_port(world: World, config_file: Path) -> str | list[str]:
    with naming_a_wrong_port():
        return _preflight(world, config_file, [[], []])


def test_a_connection_that_saves_need_is_tried_before_the_first_step(config: Path, rank_pool: Pools) -> None:
    first, second = rank_pool(2).run(_preflight_at_a_wrong_port, config)
    assert first == second
    said(first, "rank 1", "refuses the connection", "MASTER_ADDR")


def test_paths_may_differ_between_nodes_and_secrets_are_not_printed(
    tmp_path: Path, books: Path, config: Path, rank_pool: Pools
) -> None:
    same = shutil.copytree(books, tmp_path / "same")
    assert rank_pool(2).run(_preflight, config, [[], [f"data.path={same}"]]) == [[], []]
    secret = ["tracking.run_name=${oc.env:DOCTOR_SECRET}"]
    message = rank_pool(2).run(_preflight, config, [secret, secret])[0]
    assert "tracking.run_name: " in message
    assert "hunter2" not in message


# Of one rank: MLflow's store, and the exit code of what the preflight finds.


def _find_mlflow(world: World, config_file: Path, uri: str) -> Finding:
    """Return the finding of `dist-mem doctor` about MLflow."""
    config = load_checked([str(config_file), "tracking.mlflow=true", f"tracking.uri={uri}"])
    with closing(examine(config, world, is_thorough=True)) as rounds:
        (found,) = (finding for finding in next(rounds) if finding.what == "MLflow")
        return found


def test_an_mlflow_server_that_is_down_is_a_warning(config: Path, rank_pool: Pools) -> None:
    (found,) = rank_pool(1).run(_find_mlflow, config, f"http://127.0.0.1:{free_port()}")
    assert found.level == WARNING
    assert "does not answer" in found.found and "tracking.uri" in found.fix


def test_a_file_of_another_program_is_a_failure_also_of_a_run_that_mlflow_has_accepted(
    tmp_path: Path, config: Path, rank_pool: Pools
) -> None:
    """Of other refusals such a run is warned: its data are kept. This one would write into somebody else's file."""
    (tmp_path / "app.db").write_text("# notes")
    run_dir = tmp_path / "accepted"
    run_dir.mkdir()
    (run_dir / "mlflow_run_id").write_text("0" * 32)
    changes = ["tracking.mlflow=true", f"tracking.uri=sqlite:///{tmp_path}/app.db", f"run_dir={run_dir}"]
    (error,) = rank_pool(1).run(_preflight, config, [changes])
    assert error.startswith("UnusableError") and "app.db is no MLflow database" in error


def _fail_to_read(world: World, config_file: Path, code: int) -> str | list[str]:
    def fail(*settings: object) -> None:
        raise OSError(code, "reading failed", "books/train/index.json")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consistency, "check_tars", fail)
        return _preflight(world, config_file, [[]])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *(("UnfitError", code) for code in (errno.EIO, errno.ESTALE, errno.ENOSPC)),
        *(("UnusableError", code) for code in (errno.ENOENT, errno.EACCES)),
    ],
)
def test_fault_of_a_disk_may_pass_and_a_wrong_path_does_not(
    config: Path, rank_pool: Pools, code: int, error: str
) -> None:
    (found,) = rank_pool(1).run(_fail_to_read, config, code)
    assert found.startswith(error) and "books/train/index.json" in found and FAIL in found


# What the ranks measure together.


def _sums_with_fault(world: World, faulty: int, is_sender: bool) -> list[str]:
    """What is found where one rank's network alters a number that it sends, or gets."""
    right = dist.all_reduce

    def all_reduce(tensor: Any, *arguments: Any, **more: Any) -> None:
        if world.rank == faulty and is_sender and len(tensor) > faulty:
            tensor[faulty] += 1
        right(tensor, *arguments, **more)
        if world.rank == faulty and not is_sender:
            tensor[-1] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        wrong = network.wrong_sums(world)
    return lines(list(network.check_sums([Place("n", rank) for rank in range(world.size)], gather_objects(wrong))))


def test_a_wrong_sum_names_the_rank_that_sent_it_or_got_it(rank_pool: Pools) -> None:
    for is_sender, fault in ((True, "the numbers of this rank"), (False, "got wrong sums")):
        found = rank_pool(3).run(_sums_with_fault, 1, is_sender)
        assert len(found[0]) == 1 and (found[0] == found[1] == found[2] or not is_sender)
        assert found[0][0].startswith(FAIL) and "n rank 1 " in found[0][0] and fault in found[0][0]


# Accelerators: the reports of the ranks are data.


def device(
    rank: int, gpu: str | None, *, node: str = "n1", model: str = "H200", visible: int = 4, missing: str | None = None
) -> RankDevice:
    of_gpu = (model, 10**11, visible) if gpu else ("", 0, 0)
    return RankDevice(node, rank, rank % 4, gpu, *of_gpu, missing)


def test_a_node_without_its_gpu_in_a_gpu_job_fails() -> None:
    missing = device(2, None, node="n2", missing="this node has a GPU; torch: no driver")
    devices = [device(0, "a"), device(1, "b"), missing]
    (found,) = (one for one in check_accelerators(devices) if one.level == FAIL)
    assert found.place == Place("n2", 2)
    assert found.blames_node
    assert "no driver" in found.found
    assert failed_nodes([found], ["n1", "n2"]) == ["n2"]
    assert failed_nodes([found], ["n2"]) == []  # no node would be left


def test_gpus_that_slurm_gave_and_torch_does_not_see_fail() -> None:
    """Another node, or a requeue, would not help: exit code 2."""
    (lost,) = check_accelerators([device(0, None, missing="Slurm has given this job GPUs; torch: built without CUDA")])
    assert lost.level == FAIL and not may_pass([lost], ["n1", "n2"])
    said(lines([lost])[0], "CUDA_VISIBLE_DEVICES")
    idle = [device(0, None, missing="this node has a GPU; torch: built without CUDA")]
    assert [found.level for found in check_accelerators(idle)] == [WARNING]
    assert [found.level for found in check_accelerators([device(0, None)])] == [OK]


@pytest.mark.parametrize("missing", ["tokenizer.json", "train/index.json"])
def test_doctor_fails_without_data(tmp_path: Path, books: Path, missing: str) -> None:
    shutil.copytree(books, tmp_path / "data")
    (tmp_path / "data" / missing).unlink()
    config = write_config(tmp_path / "run.yaml", tmp_path / "data", tmp_path / "run")
    code, text = doctor(str(config), cwd=tmp_path)
    assert code == EXIT_FAILED
    said_line(text, f"{tmp_path / 'data' / missing} is missing")
    assert "ok       data " not in text


def test_ranks_have_a_gpu_each_of_one_kind() -> None:
    (found,) = check_accelerators([device(0, "a", visible=1), device(1, "a", visible=1)])
    assert (found.level, found.what) == (FAIL, "GPU binding")
    assert "ranks 0, 1 have the same GPU, of 1 that they see" in found.found
    assert [found.level for found in check_accelerators([device(0, "a", visible=1), device(1, "b", visible=1)])] == [OK]
    kinds = check_accelerators([device(0, "a"), device(1, "b"), device(2, "c", model="A100")])
    assert [(one.level, one.place) for one in kinds if one.level != OK] == [(WARNING, Place("n1", 2))]


def test_late_ranks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience is for the next rank, not for the last: 512 of them load torch from one disk."""
    port = free_port()
    for name, value in launcher_environment(0, 4, port).items():
        monkeypatch.setenv(name, value)

    def come_late() -> None:
        store = dist.PrefixStore("start-0", dist.TCPStore("127.0.0.1", port, is_master=False))
        for rank in (1, 2, 3):
            time.sleep(2.0)
            store.set(f"doctor/device/{rank}", json.dumps(device(rank, None)))
            store.add("doctor/devices", 1)
        store.add("doctor/readers", 3)

    others = threading.Thread(target=come_late)
    others.start()
    try:
        assert [one.level for one in wait_for_ranks(seconds=4.0).findings] == [OK, OK]
    finally:
        others.join()


# Alone.


def test_caches_on_a_network_file_system_are_reported_with_the_variable_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "home"))
    monkeypatch.setattr(disks, "file_system_of", lambda path: "nfs4" if path == tmp_path / "home" else "ext4")
    (found,) = disks.check_caches()
    assert found.level == WARNING
    assert f"Triton: {tmp_path / 'home'} is on nfs4" in found.found
    assert found.fix.startswith("unset TRITON_CACHE_DIR, DIST_MEM_CACHES=/tmp")


def test_time_that_is_over_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIST_MEM_JOB_END", "1000")
    assert levels(list(machine.check_time_left())) == [FAIL]


FROZEN = {"kind": "adamw", "groups": [{"param_regex": "embed", "trainable": False}]}


@pytest.mark.parametrize("optimizer", [{"kind": "adamw"}, {"kind": "sgd"}, {"kind": "sgd", "momentum": 0.9}, FROZEN])
def test_the_size_of_a_checkpoint_is_known_before_there_is_one(
    tmp_path: Path, books: Path, rank_pool: Pools, optimizer: dict[str, Any]
) -> None:
    model = {"num_layers": 4, "d_model": 64, "d_inner": 256, "num_heads": 4}
    changes = {"train": {"steps": 1}, "model": model, "optimizer": {"groups": [], **optimizer}}
    config_file = write_config(tmp_path / "config.yaml", books, tmp_path / "run", changes)
    assert rank_pool(2).run(train_here, config_file) == [0, 0]
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-00000001" / "manifest.json").read_text())
    real = sum(entry["bytes"] for entry in manifest["files"].values())
    expected = disks.checkpoint_size(load_checked([str(config_file)]), 2)
    assert expected.num_bytes == pytest.approx(real, rel=0.02)
    assert len(manifest["files"]) <= expected.num_files <= len(manifest["files"]) + 12, "files of other saves"


def test_alike_findings_make_one_line() -> None:
    found = [ok("umask", "0022").at(Place("a")), ok("umask", "0027").at(Place("b"))]
    found += [fail("disk", "full", "make room").at(Place(node)) for node in "abcdef"]
    assert lines(found) == [
        f"ok       {'umask':<16} {'a, b':<20} 0022; others alike",
        f"FAIL     {'disk':<16} {'a, b, c, d and 2 more':<20} full -> make room",
    ]
