"""The side channel: a thread of every rank agrees with rank 0 while the training's collectives run.

    rank 0 listens, and sends all ranks its port and a secret -> each rank connects to rank 0
        -> a vote: every rank sends a value, rank 0 decides, every rank receives the decision

The connections are a star: one per rank. A gloo group connects every rank with every other, 524,000 times at 1,024
ranks. Rank 0 sees at once which rank has ended, and its decision names it.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeVar, cast

from dist_mem.errors import CheckpointError, RunError, TakenOverError, UnfitError, UnreadableError, UnusableError
from dist_mem.runtime.distributed import World, decide_on_rank0, has_note, leave_note, on_all_ranks
from dist_mem.runtime.environment import node_name
from dist_mem.runtime.network_interface import describe_address, families, listen_to_all
from dist_mem.runtime.ranks import rendezvous_address
from dist_mem.runtime.terminal import some

_OPEN_SECONDS = 120.0  # for all ranks to connect; a thousand attempts at once may be refused at first
_LOOK_SECONDS = 0.5  # rank 0 looks whether another rank has failed to connect
_IDLE_SECONDS = 300  # after which the kernel checks that the other host is there; it gives one up after 11 minutes
_HELLO_SECONDS = 5.0  # for a rank that has connected to identify itself
_SECRET_BYTES = 16
_RANK_BYTES = 4

ResultT = TypeVar("ResultT")


class Hub(NamedTuple):
    """Where rank 0 listens."""

    port: int
    secret: bytes  # shows that a connection is from a rank of this job
    node: str
    families: str  # of its addresses

    @property
    def note(self) -> str:
        """The note in the store by which a rank says that it cannot connect."""
        return f"dist_mem/side_channel/{self.secret.hex()}"


# Errors that keep their kind on other ranks; those derived from them may take more than a text.
_KINDS = (TakenOverError, UnfitError, UnreadableError, CheckpointError, UnusableError)


class SideChannel:
    """Connections of all ranks with rank 0; `open_side_channel` opens them, each rank closes its own."""

    def __init__(self, peers: Mapping[int, Connection], *, rank: int, size: int, seconds: float = 1800.0) -> None:
        """Take over the connections.

        Args:
            peers: by rank: all others on rank 0, rank 0 on the others.
            seconds: how long rank 0 waits in a vote for the slowest rank; the others wait for rank 0 while it is there,
                or one that gives up would miss a decision that the rest has got.
        """
        self._peers, self._rank, self._size, self._seconds = dict(peers), rank, size, seconds
        self._lost: dict[int, str] = {}  # ranks that take part no more, with the reason

    def decide_on_rank0(self, value: Any, decide: Callable[[list[Any]], ResultT]) -> ResultT:
        """Call `decide` on rank 0 with the values of all ranks, in rank order; return its result on every rank.

        Raises:
            RunError: on every rank, if `decide` raised, or a rank has ended; an UnfitError unless `decide` raised a
                TakenOverError or an UnusableError.
        """
        result = self._decide(value, decide) if self._rank == 0 else self._ask(value)
        if isinstance(result, RunError):
            raise result
        return cast(ResultT, result)

    def _decide(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Gather, decide, and send the decision to all ranks; return it, or the error."""
        values = self._gather(value)
        try:
            if self._lost:
                named = [f"rank {rank} {reason}" for rank, reason in sorted(self._lost.items())]
                raise UnfitError(some(named, 3, separator="; "))
            result = decide(values)
        except Exception as error:  # of any type: the other ranks wait for rank 0, and raise it too
            kind = next((kind for kind in _KINDS if isinstance(error, kind)), None)
            result = UnfitError(f"{type(error).__name__}: {error}") if kind is None else kind(str(error))
        for peer in self._peers.values():
            with suppress(OSError):  # it has ended: reported by the next vote
                peer.send(result)
        return result

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks; None for those that are lost, which are noted."""
        values = [value] + [None] * (self._size - 1)
        deadline = time.monotonic() + self._seconds
        with selectors.DefaultSelector() as waiting:
            for rank, peer in self._peers.items():
                waiting.register(peer, selectors.EVENT_READ, rank)
            while waiting.get_map():
                ready = waiting.select(max(0.0, deadline - time.monotonic()))
                for key, _ in ready:
                    waiting.unregister(key.fileobj)
                    try:
                        values[key.data] = self._peers[key.data].recv()
                    except (EOFError, OSError) as error:
                        self._lose(key.data, f"has ended, or its connection is cut ({type(error).__name__})")
                if not ready:
                    for key in list(waiting.get_map().values()):
                        waiting.unregister(key.fileobj)
                        self._lose(key.data, f"has sent nothing for {self._seconds:g} s")
        return values

    def _lose(self, rank: int, reason: str) -> None:
        self._lost[rank] = reason
        self._peers.pop(rank).close()

    def _ask(self, value: Any) -> Any:
        """Send a value to rank 0 and return its decision."""
        try:
            self._peers[0].send(value)
            return self._peers[0].recv()
        except (EOFError, OSError) as error:
            return UnfitError(f"rank 0 has ended, or its connection is cut ({type(error).__name__})")

    def close(self) -> None:
        """Close this rank's connections."""
        for peer in self._peers.values():
            peer.close()
        self._peers = {}


def open_side_channel(world: World) -> SideChannel:
    """Connect all ranks with rank 0; collective, in the training's thread.

    Raises:
        UnfitError: on every rank, if any cannot connect.
    """
    if world.size == 1:
        return SideChannel({}, rank=0, size=1)
    servers: list[socket.socket] = []

    def publish() -> Hub:
        server, hub = listen(world.size)
        servers.append(server)
        return hub

    hub = decide_on_rank0(publish)

    def connect() -> dict[int, Connection]:
        if servers:
            return accept_all(servers[0], hub, world.size, lambda: has_note(hub.note))
        try:
            return call(hub, rendezvous_address()[0], world.rank)
        except OSError:
            leave_note(hub.note)  # rank 0 would wait for this one
            raise

    try:
        peers = on_all_ranks(connect, "connecting the ranks for saving")
    finally:
        for server in servers:
            server.close()
    return SideChannel(peers, rank=world.rank, size=world.size)


def listen(num_ranks: int) -> tuple[socket.socket, Hub]:
    """Listen at a port that the system chooses; rank 0 calls it. Raises OSError."""
    server = listen_to_all(backlog=num_ranks)
    secret = secrets.token_bytes(_SECRET_BYTES)
    return server, Hub(server.getsockname()[1], secret, node_name(), families(server))


def accept_all(
    server: socket.socket, hub: Hub, num_ranks: int, has_failed: Callable[[], bool] = lambda: False
) -> dict[int, Connection]:
    """Accept the connections of all other ranks, and drop those of strangers.

    Args:
        has_failed: whether a rank has failed to connect, which reports it: then those are returned that have come.

    Raises:
        OSError: ranks are missing.
    """
    peers: dict[int, Connection] = {}
    deadline = time.monotonic() + _OPEN_SECONDS
    server.settimeout(_LOOK_SECONDS)
    while len(peers) < num_ranks - 1:
        try:
            accepted, _ = server.accept()
        except TimeoutError as error:
            if has_failed():
                break
            if time.monotonic() < deadline:
                continue
            missing = sorted(set(range(1, num_ranks)) - peers.keys())
            waited = f"rank 0 waited {_OPEN_SECONDS:g} s at port {hub.port}"
            raise OSError(f"{waited} for ranks {some(missing)}") from error
        rank = _identify(accepted, hub.secret)
        if rank is None:
            accepted.close()
        else:
            peers[rank] = _connection(accepted)
    return peers


def _identify(accepted: socket.socket, secret: bytes) -> int | None:
    """Return the rank that has connected; None if it is not one of this job."""
    accepted.settimeout(_HELLO_SECONDS)
    hello = b""
    with suppress(OSError):
        while len(hello) < len(secret) + _RANK_BYTES and (part := accepted.recv(_SECRET_BYTES + _RANK_BYTES)):
            hello += part
    is_own = hmac.compare_digest(hello[:_SECRET_BYTES], secret) and len(hello) == _SECRET_BYTES + _RANK_BYTES
    return int.from_bytes(hello[_SECRET_BYTES:]) if is_own else None


def call(hub: Hub, host: str, rank: int) -> dict[int, Connection]:
    """Connect to rank 0, on `host`. Raises OSError if it cannot be reached."""
    where = f"{describe_address(host, hub.port)}, where rank 0 listens,"
    try:
        caller = socket.create_connection((host, hub.port), timeout=_OPEN_SECONDS)
        caller.sendall(hub.secret + rank.to_bytes(_RANK_BYTES))
    except ConnectionRefusedError as error:
        raise OSError(
            f"{where} refuses the connection: rank 0 listens on {hub.node}, at its addresses of {hub.families}; set "
            "MASTER_ADDR to one of these, in a job by launch.env=[MASTER_ADDR=...]"
        ) from error
    except OSError as error:
        raise OSError(
            f"{where} cannot be reached ({error.strerror or error}): the system chooses this port, as those of gloo; "
            "allow all connections between the nodes of a job in their firewalls"
        ) from error
    return {0: _connection(caller)}


def _connection(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())
