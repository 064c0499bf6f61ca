"""Read ahead of the consumer in one thread, a bounded number of items."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

ItemT = TypeVar("ItemT")


class _End(NamedTuple):
    """The queue's last entry, after all items."""

    reason: BaseException  # StopIteration at a normal end


class Prefetcher(Generic[ItemT]):
    """An iterator over the items of another, in order, of which a thread makes up to `depth` in advance.

    An error of the source is raised by the `next` that would have returned the item, and by every later one. `close`
    ends and joins the thread, even if items are unread; the consumer must call it.
    """

    def __init__(self, source: Iterator[ItemT], *, depth: int) -> None:
        self._source = source
        # Two queues written in C pass an item faster than a condition in Python.
        self._ready: SimpleQueue[ItemT | _End] = SimpleQueue()
        self._places: SimpleQueue[None] = SimpleQueue()  # one for each item that may be put
        for _ in range(depth):
            self._places.put(None)
        self._end: BaseException | None = None  # why no more items come
        self._closed = False
        # a daemon, so that a process whose consumer died without closing can still exit
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Prefetcher[ItemT]:
        return self

    def __next__(self) -> ItemT:
        if self._end is None:
            item = self._ready.get()
            if not isinstance(item, _End):
                self._places.put(None)
                return item
            self._end = item.reason
        raise self._end

    def close(self) -> None:
        """Stop reading ahead and wait for the thread; may be called more than once."""
        self._closed = True
        self._end = RuntimeError("the reader is closed")
        self._places.put(None)  # the thread may wait for one,
        self._ready.put(_End(self._end))  # and a consumer for an item
        self._thread.join()

    def _fill(self) -> None:
        end: BaseException = StopIteration()
        try:
            for item in self._source:
                self._places.get()
                if self._closed:
                    return
                self._ready.put(item)
        except BaseException as error:  # raised in the consumer
            end = error
        self._ready.put(_End(end))
