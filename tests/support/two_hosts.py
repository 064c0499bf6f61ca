"""Two hosts on one machine for tests: network namespaces with names, addresses and a cable between them.

    with two_hosts() as (first, second):
        process = first.start([sys.executable, "-m", "dist_mem", ...], env={...})
        pull_the_cable(first)

They share all file systems, as the nodes of a cluster share some. Between them is nothing but the cable (a veth pair),
so every pair has the same addresses, and tests that run side by side do not meet.
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
NOBODY = "02:00:00:00:00:99"  # a hardware address that neither host has
# A host has its own name; a command replaces the shell, so that a signal to the process reaches the command.
AS_HOST = 'hostname "$0" && exec "$@"'


class Host(NamedTuple):
    """One of the two."""

    name: str  # of the namespace, and what the host calls itself
    address: str
    peer: str  # address of the other one

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` on this host, in the same process."""
        shell = ["unshare", "--uts", "sh", "-c", AS_HOST, self.name]
        return ["ip", "netns", "exec", self.name, *shell, *arguments]

    def start(self, arguments: Sequence[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[str]:
        """A process of this host; both its outputs in one pipe."""
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
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other; skips where they cannot be had. Nothing of them is left at the end."""
    _skip_if_impossible()
    family = f"dm{uuid.uuid4().hex[:8]}"
    hosts = (Host(f"{family}a", "10.77.0.1", "10.77.0.2"), Host(f"{family}b", "10.77.0.2", "10.77.0.1"))
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        names = [("netns", host.name) for host in hosts]
        _ip("link", "add", INTERFACE, *names[0], "type", "veth", "peer", "name", INTERFACE, *names[1])
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            _ip("-n", host.name, "link", "set", "lo", "up")
            _ip("-n", host.name, "link", "set", INTERFACE, "up")
        yield hosts
    finally:
        for host in hosts:
            if Path(f"/run/netns/{host.name}").exists():
                _ip("netns", "del", host.name)  # and the cable with it


def pull_the_cable(host: Host) -> None:
    """Both hosts can see that the link is down; their connections stay as they are."""
    _ip("-n", host.name, "link", "set", INTERFACE, "down")


def plug_the_cable_in(host: Host) -> None:
    """Mend `pull_the_cable`."""
    _ip("-n", host.name, "link", "set", INTERFACE, "up")


def lose_packets(host: Host) -> None:
    """What this host sends arrives nowhere, and nobody is told: it is addressed to hardware that does not exist."""
    _ip("-n", host.name, "neigh", "replace", host.peer, "lladdr", NOBODY, "nud", "permanent", "dev", INTERFACE)


def stop_losing_packets(host: Host) -> None:
    """Mend `lose_packets`."""
    _ip("-n", host.name, "neigh", "del", host.peer, "dev", INTERFACE)


def ranks_on(
    hosts: Sequence[Host], arguments: Sequence[str], *, port: int, cwd: Path, interface: str | None = INTERFACE
) -> list[subprocess.Popen[str]]:
    """`dist-mem ARGUMENTS` as one rank on each host, meeting at the first; `interface` is what gloo is told."""
    command = [sys.executable, "-m", "dist_mem", *arguments]
    told = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return [
        host.start(command, env={**rank_environment(rank, hosts, port), **told}, cwd=cwd)
        for rank, host in enumerate(hosts)
    ]


def rank_environment(rank: int, hosts: Sequence[Host], port: int) -> dict[str, str]:
    """What a launcher sets for the only rank of a host."""
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
