"""Which network interface leads to another host. gloo asks nobody: it takes that of the host's own name.

On many machines that name is 127.0.1.1 (/etc/hosts of Debian), or nothing at all; then gloo waits on the loopback, and
the ranks of two nodes never meet. NCCL finds its interfaces by itself.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def free_port() -> int:
    """A TCP port of this host that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def own_name_is_loopback() -> bool:
    """Whether other hosts cannot reach this one by the address that it has for its own name."""
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return True


def interface_towards(address: str) -> str | None:
    """Name of the interface by which packets to a host leave this one; None if it cannot be told.

    Args:
        address: name or IPv4 address of the host; may be this one.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # UDP: nothing is sent, the kernel only chooses the way
        except OSError:
            return None
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    return None
