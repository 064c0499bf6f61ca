"""The same training through every launcher: the deepspeed launcher, with a hostfile too, torchrun, and none."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dist_mem.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USAGE
from dist_mem.runtime.network_interface import free_port
from tests.support.jobs import logged_steps, losses, run_ranks, write_config
from tests.support.limits import limit, wait_until
from tests.support.paths import ROOT

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


# `deepspeed --hostfile`: two nodes over a real ssh, which here are two addresses of this machine.
NODES = ("127.0.0.2", "127.0.0.3")
SSHD = "/usr/sbin/sshd"

SSHD_CONFIG = """\
Port {port}
ListenAddress {nodes[0]}
ListenAddress {nodes[1]}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
PidFile none
"""
SSH_CONFIG = """\
Host *
  Port {port}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the program `ssh` that reaches both nodes: an sshd of our own with a key of its own."""
    missing = [name for name in ("pdsh", "ssh", "ssh-keygen", SSHD) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} missing: the deepspeed launcher reaches other nodes by pdsh over ssh")
    if os.geteuid() != 0:
        pytest.skip("a private sshd needs root")
    folder = tmp_path_factory.mktemp("ssh")
    for key in ("key", "host_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    facts = {"port": free_port(), "folder": folder, "nodes": NODES}
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(**facts))
    (folder / "ssh_config").write_text(SSH_CONFIG.format(**facts))
    wrapper = folder / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    wrapper.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd will not start without it
    daemon = subprocess.Popen([SSHD, "-D", "-f", str(folder / "sshd_config"), "-E", str(folder / "log")])
    try:
        answers = [str(wrapper), NODES[1], "true"]
        wait_until(
            lambda: subprocess.run(answers, capture_output=True, check=False).returncode == 0, "sshd", seconds=30
        )
        yield wrapper.parent
    finally:
        daemon.terminate()
        daemon.wait(limit(30))


def start(ssh: Path, config: Path, *overrides: str) -> subprocess.Popen[str]:
    """The command of docs/howto/cluster.md, by a user with an empty home; nothing of our environment but that."""
    home = config.parent / "home"
    home.mkdir(exist_ok=True)
    (home / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=lo\nOMP_NUM_THREADS=1\nDIST_MEM_TEST=handed on\n")
    (config.parent / "hosts").write_text("".join(f"{node} slots=1\n" for node in NODES))
    options = ["--hostfile", "hosts", "--master_port", str(free_port()), "--no_local_rank"]
    return subprocess.Popen(
        ["deepspeed", *options, "--module", "dist_mem", "train", config.name, *overrides],
        cwd=config.parent,
        env={"HOME": str(home), "PATH": f"{ssh}:{BIN}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks_of(run: Path) -> dict[int, int]:
    """Rank -> process, of the processes that train in the folder of the configuration."""
    found = {}
    for process in psutil.process_iter(["cmdline", "cwd", "environ"]):
        command, variables = process.info["cmdline"] or [], process.info["environ"] or {}
        if command[2:5] == ["-m", "dist_mem", "train"] and process.info["cwd"] == str(run):
            found[int(variables["RANK"])] = process.pid
            assert variables["DIST_MEM_TEST"] == "handed on"
    return found


def finish(launcher: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        text = launcher.communicate(timeout=limit(200))[0]
    finally:
        launcher.kill()
    return launcher.returncode, text


@pytest.mark.nightly
def test_hostfile_trains_over_ssh_and_passes_on_every_exit_code(tmp_path: Path, books: Path, ssh: Path) -> None:
    changes = {"train": {"steps": 4}, "model": {"dropout": 0.0}}
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", changes)
    code, text = finish(start(ssh, config))
    assert code == EXIT_DONE, text
    alone = write_config(tmp_path / "alone.yaml", books, tmp_path / "alone", changes)
    assert run_ranks(["train", str(alone)], world_size=2, cwd=tmp_path)[0] == [0, 0]
    assert losses(tmp_path / "run") == losses(tmp_path / "alone")

    code, text = finish(start(ssh, config, "train.step=3"))
    assert code == EXIT_USAGE, text
    assert "train.step: unknown key; did you mean train.steps?" in text

    launcher = start(ssh, config, "train.steps=100000")
    try:
        wait_until(lambda: len(logged_steps(tmp_path / "run")) > 6, "steps of the longer run")
        os.kill(ranks_of(tmp_path)[1], signal.SIGUSR2)
        code, text = finish(launcher)
        assert code == EXIT_REQUEUE, text
        assert (tmp_path / "run" / "checkpoints" / f"step-{logged_steps(tmp_path / 'run')[-1]:08d}").exists()
        assert not ranks_of(tmp_path)

        launcher = start(ssh, config, "train.steps=100000")
        begun = len(logged_steps(tmp_path / "run"))
        wait_until(lambda: len(logged_steps(tmp_path / "run")) > begun + 3, "steps after the restart")
        os.kill(ranks_of(tmp_path)[1], signal.SIGKILL)
        code, text = finish(launcher)
        assert code == 256 - signal.SIGKILL, text
        assert not ranks_of(tmp_path)
    finally:
        launcher.kill()
        launcher.communicate()
        for process in ranks_of(tmp_path).values():
            os.kill(process, signal.SIGKILL)
