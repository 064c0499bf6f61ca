"""Two hosts on one machine for tests: network namespaces with names, addresses and a cable between them.

    with two_hosts() as (first, second):
        process = first.start([sys.executable, "-m", "dist_mem", ...], env={...})
        pull_the_cable(first)

They share all file systems, as the nodes of a cluster share some. Only the cable (a veth pair) connects them, so every
pair can have the same addresses, and tests that run in parallel do not interfere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

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
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }


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
