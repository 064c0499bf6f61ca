"""What the machine does meanwhile: MLflow's own monitors of CPU, memory, disk, network and GPUs, sampled by a thread.

    system = SystemMetrics(monitors, record, interval=10.0, report=print)   # "system/cpu_utilization_percentage", ...
    system.close()

MLflow's own thread is not used: it asks the server after every sample, ends at its first mistake, and is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dist_mem.errors import TakenOverError

PREFIX = "system/"


class Monitor(Protocol):
    """What MLflow's monitors offer."""

    def collect_metrics(self) -> Any:
        """Take one sample."""

    def aggregate_metrics(self) -> Mapping[str, float]:
        """The figures since `clear_metrics`."""

    def clear_metrics(self) -> None:
        """Forget the samples."""


class SystemMetrics:
    """The thread; it samples until `close`, and dies with the process."""

    def __init__(
        self,
        monitors: Sequence[Monitor],
        record: Callable[[dict[str, float]], None],
        *,
        interval: float,
        report: Callable[[str], None],
    ) -> None:
        """Start sampling.

        Args:
            record: takes the figures of one sample, under MLflow's names; called in the thread, which an OSError ends.
            interval: seconds between two samples.
            report: takes a line for the user; called in the thread, once for each monitor that fails.
        """
        self._monitors = list(monitors)
        self._record = record
        self._interval = interval
        self._report = report
        self._is_closed = threading.Event()
        self._recording = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="system metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing is recorded any more; at once, also while a monitor hangs."""
        with self._recording:
            self._is_closed.set()

    def _work(self) -> None:
        self._sample_all()  # psutil tells the use of the CPU between two calls of one thread: the first tells nothing
        while self._monitors and not self._is_closed.wait(self._interval):
            figures = self._sample_all()
            with self._recording:
                if self._is_closed.is_set() or not figures:
                    continue
                try:
                    self._record(figures)
                except TakenOverError:  # of which the training will tell
                    return
                except OSError as error:  # a full disk, of which the training will tell more
                    self._report(f"no more system metrics: {error}")
                    return

    def _sample_all(self) -> dict[str, float]:
        return {name: value for monitor in [*self._monitors] for name, value in self._sample(monitor).items()}

    def _sample(self, monitor: Monitor) -> dict[str, float]:
        """The figures of one monitor; one that fails is not asked again."""
        try:
            monitor.collect_metrics()
            figures = {f"{PREFIX}{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
            monitor.clear_metrics()
        except Exception as error:  # whatever psutil or a driver raises must neither end the thread nor the training
            self._monitors.remove(monitor)
            self._report(f"no more system metrics of {type(monitor).__name__}: {type(error).__name__}: {error}")
            return {}
        return figures
