"""A text file for Prometheus, which its node exporter reads (--collector.textfile.directory): the run as it is now.

dist_mem_train_loss{run="demo"} 2.5
dist_mem_step{run="demo"} 100.0
dist_mem_heartbeat_timestamp_seconds{run="demo"} 1.764e+09
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dist_mem.errors import UnusableError
from dist_mem.runtime.extras import require
from dist_mem.runtime.files import naming
from dist_mem.tracking.groups import in_group
from dist_mem.tracking.mlflow.names import checksum_of
from dist_mem.tracking.tracker import Point, Sink

SUFFIX = ".prom"  # of the files that the node exporter reads


def check_prometheus(path: Path) -> None:
    """Check that the file can be written, without creating it.

    Raises:
        UnusableError: it cannot, or the package prometheus-client is missing.
    """
    key = f"tracking.prometheus={path}"
    if path.suffix != SUFFIX:
        raise UnusableError(f"{key}: the node exporter reads files whose names end in {SUFFIX}; give one")
    if not path.parent.is_dir():
        raise UnusableError(f"{key}: there is no folder {path.parent}; create it, or give another one")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UnusableError(f"{key}: this user cannot write such a file there; give another one")
    require("prometheus_client", key, "set tracking.prometheus=null")


class PrometheusFile(Sink):
    """Replaces the file at every logged point, atomically; each metric keeps its last value."""

    def __init__(self, path: Path, *, run_name: str) -> None:
        """Write nothing yet.

        Args:
            path: of the file, which `check_prometheus` has checked.  run_name: value of the label `run`.
        """
        from prometheus_client import CollectorRegistry, Gauge

        self._path, self._run_name = path, run_name
        self._registry = CollectorRegistry()  # of its own: the common one has figures of the process
        self._gauges: dict[str, Gauge] = {}
        self._names: dict[str, str] = {}  # name of a gauge -> of the metric that has it

    def log(self, point: Point) -> None:
        from prometheus_client import write_to_textfile

        for name, value in point.metrics.items():
            self._set(in_group(name), value, f"{name} in metrics.jsonl")
        self._set("step", point.step, "step of the last logged point")
        self._set("heartbeat_timestamp_seconds", point.time, "time of the last logged point")
        with naming(self._path):
            write_to_textfile(str(self._path), self._registry)

    def _set(self, name: str, value: float, meaning: str) -> None:
        from prometheus_client import Gauge

        full = "dist_mem_" + re.sub(r"\W", "_", name, flags=re.ASCII)
        if self._names.setdefault(full, name) != name:  # a/b and a_b
            full += f"_{checksum_of(name)}"
        if full not in self._gauges:
            self._gauges[full] = Gauge(full, meaning, ["run"], registry=self._registry)
        self._gauges[full].labels(self._run_name).set(value)
