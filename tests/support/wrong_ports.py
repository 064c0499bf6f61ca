"""A network in which the port that rank 0 names is not reached, as behind a firewall that refuses connections."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from dist_mem.runtime.network_interface import listen_to_all
from dist_mem.supervision import side_channel
from dist_mem.supervision.side_channel import Hub


@contextmanager
def naming_a_wrong_port() -> Iterator[None]:
    """Let the side channels of this process name a port at which nobody accepts."""
    listening = listen_to_all()
    port = listening.getsockname()[1]
    listening.close()
    published = side_channel.listen

    def listen_elsewhere(num_ranks: int) -> tuple[socket.socket, Hub]:
        server, hub = published(num_ranks)
        return server, hub._replace(port=port)

    side_channel.listen = listen_elsewhere
    try:
        yield
    finally:
        side_channel.listen = published
