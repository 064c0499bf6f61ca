"""Hand things over to a service that may be slow or down, in order, from one background thread.

Whoever hands over waits a microsecond and never fails. The thread tries again while the service is down and drops only
what the service refuses for good. The queue lives in memory: what is not delivered when the process ends must be
recoverable elsewhere.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_LONGEST_PAUSE = 30.0  # seconds between two attempts while the service is down


class Request(NamedTuple):
    """One thing to ask of the service."""

    what: str  # for messages
    send: Callable[[], None]  # raises if it was not taken; may be called again


def brief(error: Exception) -> str:
    """An error in one line."""
    first_line = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line[:300]}"


class Delivery:
    """The queue and its thread."""

    def __init__(
        self,
        opening: Request,
        *,
        combine: Callable[[Sequence[Any]], Sequence[Request]],
        is_refusal: Callable[[Exception], bool],
        report: Callable[[str], None],
        service: str,
        interval: float = 1.0,
    ) -> None:
        """Start the thread with `opening`; if that is refused, nothing else is ever sent.

        Args:
            combine: makes requests of everything that was put within `interval` seconds; called in the thread.
            is_refusal: whether an error says that trying again is useless.
            report: takes a line for the user; called in the thread, once per outage and refusal.
            service: its name in messages.
        """
        self._opening = opening
        self._combine = combine
        self._is_refusal = is_refusal
        self._report = report
        self._service = service
        self._interval = interval
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._is_down = False
        self._has_given_up = False
        self._is_complete = False
        self._thread = threading.Thread(target=self._work, name=f"delivery to {service}", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """Queue something for `combine`."""
        if self._thread.is_alive():  # it ends early only when the opening was refused, and that was reported
            self._items.put(item)

    def close(self, seconds: float) -> bool:
        """Deliver what is left, for at most `seconds`; a service that is down gets one attempt.

        Returns:
            Whether everything was delivered, or refused.
        """
        self._closing.set()
        self._thread.join(seconds)
        return self._is_complete

    def _work(self) -> None:
        if not self._deliver(self._opening):
            return
        is_last = False
        while not is_last:
            self._closing.wait(self._interval)
            is_last = self._closing.is_set()  # asked before taking: whatever was put before `close` is among the items
            items = []
            while not self._items.empty():
                items.append(self._items.get())
            for request in self._combine(items):
                self._deliver(request)
                if self._has_given_up:
                    return
        self._is_complete = True

    def _deliver(self, request: Request) -> bool:
        """Try until it is taken; False if it was refused, or not taken before the end."""
        pause = self._interval
        while True:
            try:
                request.send()
            except Exception as error:  # whatever a client library raises must not end the thread, nor training
                if self._is_refusal(error):
                    self._report(f"{self._service} refused {request.what}: {brief(error)}")
                    return False
                self._note_outage(error)
            else:
                self._note_success()
                return True
            if self._closing.is_set():
                self._has_given_up = True
                return False
            self._closing.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _note_outage(self, error: Exception) -> None:
        if not self._is_down:
            self._is_down = True
            self._report(
                f"{self._service} cannot be reached ({brief(error)}); training goes on, and so do the attempts"
            )

    def _note_success(self) -> None:
        if self._is_down:
            self._is_down = False
            self._report(f"{self._service} answers again")
