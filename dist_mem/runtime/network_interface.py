"""The network interface that leads to another host. By default, gloo takes that of the host's own name.

On many machines that name resolves to 127.0.1.1 (/etc/hosts of Debian), or not at all; gloo then listens on the
loopback, and the ranks of two nodes never connect. NCCL finds its interfaces itself.
"""

from __future__ import annotations

import fcntl
import random
import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def free_port() -> int:
    """Return a TCP port of this host on which nothing listens now.

    It is below those that Linux gives to outgoing connections: one of those could be taken before the caller listens.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def own_name_is_loopback() -> bool:
    """Return whether this host's name resolves to the loopback, or not at all: other hosts cannot reach it there."""
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return True


def interface_towards(address: str) -> str | None:
    """Return the name of the interface by which packets to a host leave this one; None if it is unknown.

    Args:
        address: name or IPv4 address of the host; may be this one.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # UDP: nothing is sent, the kernel only chooses the route
        except OSError:
            return None
        source = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == source:
                    return name
    return None
