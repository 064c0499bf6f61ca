"""Read ahead of the consumer in one thread, a bounded number of items."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Prefetcher(Generic[ItemT]):
    """The items of an iterator, in order, up to `depth` of them made before they are asked for.

    An error of the iterator is raised by the `next` that would have returned the item, and by every one after it.
    `close` ends and joins the thread, also while items wait unread; whoever iterates must call it.
    """

    def __init__(self, source: Iterator[ItemT], *, depth: int) -> None:
        self._source = source
        self._depth = depth
        self._ready: deque[ItemT] = deque()
        self._changed = threading.Condition()  # guards everything below and `_ready`
        self._end: BaseException | None = None  # why no more items come; StopIteration at a plain end
        self._closed = False
        # a daemon, so that a process whose consumer died without closing can still exit
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Prefetcher[ItemT]:
        return self

    def __next__(self) -> ItemT:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._end is not None or self._closed)
            if self._closed:
                raise RuntimeError("the reader is closed")
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            assert self._end is not None
            raise self._end

    def close(self) -> None:
        """Stop reading ahead and wait for the thread; may be called more than once."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def _fill(self) -> None:
        try:
            for item in self._source:
                if not self._put(item):
                    return
            end: BaseException = StopIteration()
        except BaseException as error:  # handed to the consumer, whatever it is
            end = error
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def _put(self, item: ItemT) -> bool:
        """Wait for room and add the item; False once closed."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < self._depth or self._closed)
            if not self._closed:
                self._ready.append(item)
                self._changed.notify_all()
            return not self._closed
