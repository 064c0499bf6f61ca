"""Record system metrics: a thread samples MLflow's monitors of CPU, memory, disk, network and GPUs.

    system = record_system_metrics(log, report=print)   # "system/cpu_utilization_percentage", ...
    system.close("FINISHED")

MLflow's own thread is not used: it calls the server after every sample, ends at its first error, and delays the exit.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dist_mem.errors import TakenOverError
from dist_mem.runtime.environment import system_metrics_interval
from dist_mem.tracking.log import Log, last_entry
from dist_mem.tracking.mlflow.client import import_mlflow_quietly
from dist_mem.tracking.names import OF_SYSTEM
from dist_mem.tracking.tracker import Sink


class Monitor(Protocol):
    """The interface of MLflow's monitors."""

    def collect_metrics(self) -> Any:
        """Take one sample."""

    def aggregate_metrics(self) -> Mapping[str, float]:
        """Return the metrics since `clear_metrics`."""

    def clear_metrics(self) -> None:
        """Discard the samples."""


def system_monitors() -> list[Any]:
    """Return MLflow's monitors of this machine: CPU, disk, network, and GPUs if it has any."""
    import_mlflow_quietly()
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    monitors = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    try:
        monitors.append(GPUMonitor())
    except Exception:  # no nvidia-ml-py, no GPU, or a driver error: MLflow's thread ignores it too
        return monitors
    return monitors


def record_system_metrics(log: Log, *, report: Callable[[str], None]) -> SystemMetrics:
    """Record system metrics in a log from now on, numbered after those that it has; imports mlflow."""
    last = last_entry(log.path, "system")
    numbers = itertools.count(last.body["step"] + 1 if last else 0)

    def record(metrics: Mapping[str, float]) -> None:
        log.record("system", {"step": next(numbers), "metrics": metrics})

    return SystemMetrics(system_monitors(), record, interval=system_metrics_interval(), report=report)


class SystemMetrics(Sink):
    """A thread that samples until `close`, and ends with the process."""

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
            record: called in the thread with the metrics of a sample, under MLflow's names; an OSError ends the thread.
            interval: seconds between two samples.
            report: called in the thread with a line for the user, once for each monitor that fails.
        """
        self._monitors = list(monitors)
        self._record = record
        self._interval = interval
        self._report = report
        self._is_closed = threading.Event()
        self._recording = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="system metrics", daemon=True)
        self._thread.start()

    def close(self, status: str) -> None:
        """Stop recording, at once even if a monitor hangs."""
        with self._recording:
            self._is_closed.set()

    def _work(self) -> None:
        self._sample_all()  # psutil measures CPU use between two calls of one thread: the first result is void
        while self._monitors and not self._is_closed.wait(self._interval):
            metrics = self._sample_all()
            with self._recording:
                if self._is_closed.is_set() or not metrics:
                    continue
                try:
                    self._record(metrics)
                except TakenOverError:  # the training reports it
                    return
                except OSError as error:  # a full disk: the training reports more
                    self._report(f"no more system metrics: {error}")
                    return

    def _sample_all(self) -> dict[str, float]:
        return {name: value for monitor in [*self._monitors] for name, value in self._sample(monitor).items()}

    def _sample(self, monitor: Monitor) -> dict[str, float]:
        """Return the metrics of one monitor; a monitor that fails is not used again."""
        try:
            monitor.collect_metrics()
            metrics = {f"{OF_SYSTEM}{name}": float(value) for name, value in monitor.aggregate_metrics().items()}
            monitor.clear_metrics()
        except Exception as error:  # no error of psutil or a driver may end the thread or the training
            self._monitors.remove(monitor)
            if not self._is_closed.is_set():
                self._report(f"no more system metrics of {type(monitor).__name__}: {type(error).__name__}: {error}")
            return {}
        return metrics
