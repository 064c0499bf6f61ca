"""A real Slurm cluster of two nodes on this machine: a private munge, a controller and two daemons, in one folder.

It needs Debian's slurm-wlm and munge, and root, but neither systemd nor cgroups. It changes nothing outside the
folder. Each node has two GPUs, by name only.
"""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dist_mem.runtime.network_interface import free_port
from tests.support.limits import limit, wait_until

PROGRAMS = ("sbatch", "srun", "scontrol", "slurmctld", "slurmd", "munged")
NODES = ("node1", "node2")
CONFIG = """\
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job may start again when its credential has expired: two minutes by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
MaxArraySize=100
KillWait=30
SlurmdTimeout=10
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=node[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports} CPUs=4 RealMemory=4000 Gres=gpu:2
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=node[1-2] Default=YES State=UP PriorityTier=1
PartitionName=urgent Nodes=node[1-2] State=UP PriorityTier=9
"""


def why_not() -> str | None:
    """Return why no cluster can be started on this machine; None if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"no Slurm here ({', '.join(missing)} missing): apt-get install slurm-wlm munge"
    if os.geteuid() != 0:
        return "a private Slurm must be started as root"
    if all(name == "lo" for _, name in socket.if_nameindex()):
        return "Slurm's daemons do not start where loopback is the only network interface"
    return None


def _path() -> str:
    return f"{os.environ['PATH']}{os.pathsep}/usr/sbin{os.pathsep}/sbin"


class Cluster:
    """The running cluster, and its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the daemons; return when both nodes are idle."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        first = free_port()
        second = next(port for port in iter(free_port, None) if port != first)
        # The ports of a node range must be consecutive; each node has its own line instead.
        text = CONFIG.format(folder=self.folder, controller_port=free_port(), ports="{ports}")
        template = next(line for line in text.splitlines() if line.startswith("NodeName="))
        nodes = [
            template.replace("node[1-2]", node).replace("{ports}", str(port))
            for node, port in zip(NODES, (first, second), strict=True)
        ]
        (self.folder / "slurm.conf").write_text(text.replace(template, "\n".join(nodes)), encoding="utf-8")
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null,/dev/zero\n", encoding="utf-8")
        munge = [f"--{name}={self.folder}/munge.{name.split('-')[0]}" for name in ("pid-file", "seed-file", "log-file")]
        self._spawn(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket", *munge
        )
        self.wait(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._spawn("slurmctld", "-D")
        for node in NODES:
            self._spawn("slurmd", "-D", "-N", node)
        self.wait(lambda: self.node_states() == ["idle"] * len(NODES), "both nodes to be idle")

    def _spawn(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as log:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def cancel_all(self) -> None:
        """Cancel all jobs, also those that would not end."""
        self.call("scancel", "--user=root", "--state=PENDING", check=False)
        self.call("scancel", "--user=root", "--full", "--signal=KILL", check=False)
        self.call("scancel", "--user=root", check=False)

    def stop(self) -> None:
        """Cancel all jobs and end the daemons."""
        self.cancel_all()
        with suppress(AssertionError):  # the daemons end with jobs that do not
            wait_until(lambda: not self.call("squeue", "--noheader", check=False), "jobs to end", seconds=20, poll=0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(timeout=limit(15))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def call(self, *command: str, check: bool = True, **environment: str) -> str:
        """Run a command and return its output."""
        done = subprocess.run(
            command,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=limit(60),
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def node_states(self) -> list[str]:
        """Return the state of every node, as sinfo reports it."""
        return self.call("sinfo", "--noheader", "--partition=debug", "--Node", "--format=%T", check=False).split()

    def submit(self, *arguments: str, **environment: str) -> str:
        """Submit a job; return its number."""
        return self.call("sbatch", "--parsable", *arguments, check=True, **environment)

    def state(self, job: str) -> str:
        """Return the JobState of a job, such as PENDING."""
        return self.facts(job).get("JobState", "gone")

    def facts(self, job: str) -> dict[str, str]:
        """Return the fields that scontrol shows for a job."""
        text = self.call("scontrol", "show", "job", job, "--oneliner", check=False)
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    def wait(self, condition: Callable[[], bool], what: str, *, seconds: float = 60) -> None:
        """Poll until the condition holds."""
        try:
            wait_until(condition, what, seconds=seconds, poll=0.1)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.describe()}") from None

    def wait_for_all(self, *, seconds: float = 240) -> None:
        """Wait until no job is left."""
        self.wait(lambda: not self.call("squeue", "--noheader"), "all jobs to end", seconds=seconds)

    def wait_for_state(self, job: str, *states: str, seconds: float = 180) -> str:
        """Wait until the job is in one of the states; return its state."""
        self.wait(lambda: self.state(job) in states, f"job {job} to be {' or '.join(states)}", seconds=seconds)
        return self.state(job)

    def describe(self) -> str:
        """Return the last lines of the daemons' logs."""
        logs = sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*.out"))
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Run a cluster within the context."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a short path: the path of a socket is limited to 107 characters
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
