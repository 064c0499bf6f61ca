"""The addresses by which this machine reaches itself; in many containers it has none of IPv6."""

import socket


def _can_listen(address: str, family: socket.AddressFamily) -> bool:
    try:
        socket.create_server((address, 0), family=family).close()
    except OSError:
        return False
    return True


IPV6 = ["::1"] if _can_listen("::1", socket.AF_INET6) else []
LOOPBACKS = ["127.0.0.1", *IPV6]
