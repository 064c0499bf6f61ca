"""A job over two hosts with addresses of their own: the network between them fails, and the job goes on from there.

They are network namespaces of this machine, share all file systems, and only a cable (a veth pair) connects them, so
every pair can have the same addresses. The watchdog ends what the network has stopped: TCP alone would wait for
minutes, collectives for half an hour.
"""

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dist_mem.errors import EXIT_DONE, EXIT_HUNG
from dist_mem.runtime.network_interface import free_port
from tests.support.jobs import checkpoint_content, difference, finish, logged_steps, losses, write_config
from tests.support.limits import limit, wait_until
from tests.support.ranks import launcher_environment

pytestmark = pytest.mark.netns

STEPS = 30
SECONDS = 12.0  # watchdog.seconds; three times as long may opening take, on a busy machine too
INTERFACE = "cable"
FAMILIES = {"IPv4": ("10.77.0.1/24", "10.77.0.2/24"), "IPv6": ("fd77::1/64", "fd77::2/64")}
NOBODY = "02:00:00:00:00:99"  # a hardware address that neither host has
# Set the host name; `exec` replaces the shell, so that a signal to the process reaches the command.
AS_HOST = 'hostname "$0" && exec "$@"'


class Host(NamedTuple):
    """One of the two hosts."""

    name: str  # of the namespace and of the host
    address: str
    peer: str  # address of the other host

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs `arguments` on this host, without a child process."""
        shell = ["unshare", "--uts", "sh", "-c", AS_HOST, self.name]
        return ["ip", "netns", "exec", self.name, *shell, *arguments]

    def start(self, arguments: Sequence[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[str]:
        """Start a process on this host, with standard output and error in one pipe."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "GLOO_"))}
        return subprocess.Popen(
            self.command(arguments),
            env={**kept, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )


@contextmanager
def two_hosts(family: str = "IPv4") -> Iterator[tuple[Host, Host]]:
    """Create two hosts that reach each other, and remove them at the end; skip the test where this is impossible.

    Args:
        family: of their addresses, one of FAMILIES.
    """
    _skip_if_impossible()
    pair = f"dm{uuid.uuid4().hex[:8]}"
    networks = FAMILIES[family]
    first, second = (network.partition("/")[0] for network in networks)
    hosts = (Host(f"{pair}a", first, second), Host(f"{pair}b", second, first))
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        names = [("netns", host.name) for host in hosts]
        _ip("link", "add", INTERFACE, *names[0], "type", "veth", "peer", "name", INTERFACE, *names[1])
        for host, network in zip(hosts, networks, strict=True):
            at_once = ["nodad"] if family == "IPv6" else []
            _ip("-n", host.name, "addr", "add", network, "dev", INTERFACE, *at_once)
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip("-n", host.name, "link", "set", INTERFACE, "up")
        yield hosts
    finally:
        for host in hosts:
            if Path(f"/run/netns/{host.name}").exists():
                _ip("netns", "del", host.name)  # this also deletes the cable


def pull_the_cable(host: Host) -> None:
    """Set the link down, which both hosts can see; their connections stay open."""
    _ip("-n", host.name, "link", "set", INTERFACE, "down")


def plug_the_cable_in(host: Host) -> None:
    """Undo `pull_the_cable`."""
    _ip("-n", host.name, "link", "set", INTERFACE, "up")


def lose_packets(host: Host) -> None:
    """Lose all packets of this host without an error: they are addressed to hardware that does not exist."""
    _ip("-n", host.name, "neigh", "replace", host.peer, "lladdr", NOBODY, "nud", "permanent", "dev", INTERFACE)


def stop_losing_packets(host: Host) -> None:
    """Undo `lose_packets`."""
    _ip("-n", host.name, "neigh", "del", host.peer, "dev", INTERFACE)


def ranks_on(hosts: Sequence[Host], arguments: Sequence[str], *, port: int, cwd: Path) -> list[subprocess.Popen[str]]:
    """Start `dist-mem ARGUMENTS` as one rank on each host, with the first as master; gloo gets the interface."""
    command, gloo = [sys.executable, "-m", "dist_mem", *arguments], {"GLOO_SOCKET_IFNAME": INTERFACE}
    return [
        host.start(command, env={**rank_environment(rank, hosts, port), **gloo}, cwd=cwd)
        for rank, host in enumerate(hosts)
    ]


def rank_environment(rank: int, hosts: Sequence[Host], port: int) -> dict[str, str]:
    """Return the variables that a launcher sets for the only rank of a host."""
    own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": hosts[0].address, "OMP_NUM_THREADS": "1"}
    return launcher_environment(rank, len(hosts), port) | own


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr.strip()}"


def _skip_if_impossible() -> None:
    if os.geteuid() != 0:
        pytest.skip("two hosts on one machine take root: network namespaces are made")
    missing = [program for program in ("ip", "unshare") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"two hosts on one machine take {' and '.join(missing)} (Debian: iproute2, util-linux)")
    probe = f"dm{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    add = ["ip", "-n", probe, "link", "add", INTERFACE, "type", "veth", "peer", "name", f"{INTERFACE}2"]
    linked = subprocess.run(add, capture_output=True, text=True, check=False)
    _ip("netns", "del", probe)
    if linked.returncode:
        pytest.skip(f"veth pairs cannot be made here: {linked.stderr.strip()}")


FAULTS: dict[str, tuple[Callable[[Host], None], Callable[[Host], None]]] = {
    "link down": (pull_the_cable, plug_the_cable_in),
    "packets lost": (lose_packets, stop_losing_packets),
}


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as found:
        yield found


def configuration(path: Path, books: Path, run_dir: Path) -> Path:
    changes = {"train": {"steps": STEPS}, "watchdog": {"seconds": SECONDS}, "checkpoint": {"every": 7}}
    return write_config(path, books, run_dir, changes)


def kill_all(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, books: Path) -> Path:
    """The run directory of the same job with nothing in its way."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with two_hosts() as hosts:
        config = configuration(folder / "run.yaml", books, folder / "run")
        codes, text = finish(ranks_on(hosts, ["train", str(config)], port=free_port(), cwd=folder))
    assert codes == [EXIT_DONE, EXIT_DONE], text
    return folder / "run"


def by_torchrun(hosts: tuple[Host, Host], arguments: list[str], *, port: int, cwd: Path) -> list[subprocess.Popen[str]]:
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", hosts[0].address, "--master-port", str(port)]
    command = [str(Path(sys.executable).with_name("torchrun")), *options]
    env = {"OMP_NUM_THREADS": "1"}
    return [
        host.start([*command, "--node-rank", str(rank), "-m", "dist_mem", *arguments], env=env, cwd=cwd)
        for rank, host in enumerate(hosts)
    ]


@pytest.mark.parametrize(
    ("fault", "start"),
    [  # a minute each on a busy machine
        pytest.param("packets lost", ranks_on, id="packets lost", marks=pytest.mark.core),
        pytest.param("link down", ranks_on, id="link down", marks=pytest.mark.nightly),
        pytest.param("packets lost", by_torchrun, id="torchrun", marks=pytest.mark.nightly),
    ],
)
def test_a_job_cut_in_two_ends_on_both_hosts_and_goes_on_to_the_same_bits(
    tmp_path: Path,
    books: Path,
    hosts: tuple[Host, Host],
    undisturbed: Path,
    fault: str,
    start: Callable[..., list[subprocess.Popen[str]]],
) -> None:
    run_dir = tmp_path / "run"
    arguments = ["train", str(configuration(tmp_path / "run.yaml", books, run_dir))]
    cut, mend = FAULTS[fault]
    processes = start(hosts, arguments, port=free_port(), cwd=tmp_path)
    try:
        wait_until(lambda: len(logged_steps(run_dir)) > 12, "13 steps")
        cut(hosts[0])
        begin = time.monotonic()
        codes, text = finish(processes, timeout=10 * SECONDS)
        took = time.monotonic() - begin
    finally:
        kill_all(processes)
    steps = logged_steps(run_dir)[-1]
    print(f"{fault} at step {steps}: exit codes {codes} after {took:.1f} s")
    if start is by_torchrun:
        assert codes == [1, 1], text  # torchrun has no other for a failed rank
        assert text.count(f"exitcode  : {EXIT_HUNG}") == 2
    else:
        assert codes == [EXIT_HUNG, EXIT_HUNG], text
        assert took < limit(SECONDS + 5)
    assert steps < STEPS
    report = next(run_dir.glob("hangs/*/report.txt")).read_text(encoding="utf-8")
    assert all(host.name in report for host in hosts), report

    mend(hosts[0])
    codes, text = finish(start(hosts, arguments, port=free_port(), cwd=tmp_path))
    assert codes == [EXIT_DONE, EXIT_DONE], text
    last = f"checkpoints/step-{STEPS:08d}"
    assert difference(checkpoint_content(run_dir / last), checkpoint_content(undisturbed / last)) is None
    assert losses(run_dir) == losses(undisturbed)


@pytest.mark.parametrize("are_named", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_hosts_whose_names_lead_nowhere_meet_all_the_same(
    tmp_path: Path, books: Path, family: str, are_named: bool
) -> None:
    """gloo takes that interface; without a name, or with 127.0.1.1, it is the loopback. Beside them: with names."""
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"train": {"steps": 2}})
    names, port = tmp_path / "hosts", free_port()
    with_names = ["unshare", "--mount", "sh", "-c", f'mount --bind {names} /etc/hosts && exec "$@"', "sh"]
    command = [*(with_names if are_named else []), sys.executable, "-m", "dist_mem", "train", str(config)]
    with two_hosts(family) as hosts:
        names.write_text("".join(f"{host.address} {host.name}\n" for host in hosts), encoding="ascii")
        named = {"MASTER_ADDR": hosts[0].name} if are_named else {}
        environments = [{**rank_environment(rank, hosts, port), **named} for rank in range(2)]
        processes = [host.start(command, env=env, cwd=tmp_path) for host, env in zip(hosts, environments, strict=True)]
        try:
            codes, text = finish(processes)
        finally:
            kill_all(processes)
    assert codes == [EXIT_DONE, EXIT_DONE], text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_way_to_a_host_goes_by_the_interface_of_the_cable(family: str) -> None:
    code = "from dist_mem.runtime.network_interface import *; print(own_name_is_loopback(), interface_towards(%r))"
    elsewhere = ("192.0.2.77", "2001:db8::77", "nobody.invalid")
    with two_hosts(family) as hosts:
        known = {hosts[0].address: INTERFACE, "127.0.0.1": "lo", "::1": "lo", **dict.fromkeys(elsewhere, "None")}
        for host in hosts:
            for address, interface in known.items():
                process = host.start([sys.executable, "-c", code % address], env={})
                assert process.communicate(timeout=limit(60))[0].split() == ["True", interface], address
