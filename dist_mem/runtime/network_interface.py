"""Addresses of both families, IPv4 and IPv6: where to listen, how to write them, and the interface towards a host.

By default, gloo takes the interface of the host's own name. On many machines that name resolves to 127.0.1.1
(/etc/hosts of Debian), or not at all; gloo then listens on the loopback, and the ranks of two nodes never connect. NCCL
finds its interfaces itself.
"""

from __future__ import annotations

import fcntl
import ipaddress
import random
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_IPV6_INTERFACES = Path("/proc/net/if_inet6")  # Linux: a line per address, which it begins with; the name is last


def listen_to_all(port: int = 0, *, backlog: int = 1) -> socket.socket:
    """Listen at a port of every address of this host: IPv4 and IPv6, or the first alone on a system without the other.

    Args:
        port: 0: the system chooses one.

    Raises:
        OSError: the port is taken.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def families(listening: socket.socket) -> str:
    """Return the families of the addresses at which a socket of `listen_to_all` listens."""
    return "IPv4 and IPv6" if listening.family == socket.AF_INET6 else "IPv4 only"


def free_port() -> int:
    """Return a TCP port of this host on which nothing listens now.

    It is below those that Linux gives to outgoing connections: one of those could be taken before the caller listens.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with suppress(OSError), listen_to_all(port):
            return port


def without_brackets(host: str) -> str:
    """Return the address in `[ADDRESS]`, as URLs have those of IPv6; any other text is returned as it is."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def describe_address(host: str, port: int) -> str:
    """Return host and port for a message; a name with the addresses that it has, which are tried in turn."""
    text = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    found = ", ".join(_addresses(host))
    return text if found in ("", host) else f"{text} ({found})"


def _addresses(host: str) -> list[str]:
    """Return the addresses of a host, each once; none if its name does not resolve."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the second: no name at all
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def own_name_is_loopback() -> bool:
    """Return whether this host's name resolves to the loopback, or not at all: other hosts cannot reach it there."""
    found = _addresses(socket.gethostname())
    return not found or ipaddress.ip_address(found[0]).is_loopback  # gloo takes the first too


def interface_towards(host: str) -> str | None:
    """Return the name of the interface by which packets to a host leave this one; None if it is unknown.

    Args:
        host: name or address of the host; may be this one.
    """
    for address in _addresses(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:  # no route in this family
            probe.connect((address, 9))  # UDP: nothing is sent, the kernel only chooses the route
            source = probe.getsockname()[0]
            name = _interface_of(source) if family == socket.AF_INET6 else _interface_of_ipv4(probe, source)
            if name is not None:
                return name
    return None


def _interface_of_ipv4(probe: socket.socket, source: str) -> str | None:
    for _, name in socket.if_nameindex():
        with suppress(OSError):  # an interface without an IPv4 address
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            if socket.inet_ntoa(answer[20:24]) == source:
                return name
    return None


def _interface_of(source: str) -> str | None:
    """Return the interface of an IPv6 address, as the kernel lists them."""
    packed = ipaddress.IPv6Address(source.partition("%")[0]).packed.hex()
    lines = map(str.split, _IPV6_INTERFACES.read_text(encoding="ascii").splitlines())
    return next((words[-1] for words in lines if words[0] == packed), None)
