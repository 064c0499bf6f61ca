"""A text file for Prometheus, which its node exporter reads (--collector.textfile.directory): the run as it is now.

dist_mem_train_loss{run="demo"} 2.5
dist_mem_step{run="demo"} 100.0
dist_mem_heartbeat_timestamp_seconds{run="demo"} 1.764e+09
"""

from __future__ import annotations

import re
from pathlib import Path

from dist_mem.errors import UnusableError
from dist_mem.runtime.extras import require
from dist_mem.runtime.files import naming
from dist_mem.tracking.groups import in_group
from dist_mem.tracking.tracker import Point, Sink

SUFFIX = ".prom"  # of the files that the node exporter reads


class PrometheusFile(Sink):
    """Replaces the file at every logged point, atomically; each metric keeps its last value."""

    def __init__(self, path: Path, *, run_name: str) -> None:
        """Write nothing yet, but see that the file can be written.

        Args:
            path: of the file; its folder exists.  run_name: value of the label `run`.

        Raises:
            UnusableError: no such file can be written, or the package prometheus-client is missing.
        """
        key = f"tracking.prometheus={path}"
        if path.suffix != SUFFIX:
            raise UnusableError(f"{key}: the node exporter reads files whose names end in {SUFFIX}; give one")
        if not path.parent.is_dir():
            raise UnusableError(f"{key}: there is no folder {path.parent}; create it, or give another one")
        require("prometheus_client", key, "set tracking.prometheus=null")
        from prometheus_client import CollectorRegistry, Gauge

        self._path, self._run_name = path, run_name
        self._registry = CollectorRegistry()  # of its own: the common one has figures of the process
        self._gauges: dict[str, Gauge] = {}

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
        if full not in self._gauges:
            self._gauges[full] = Gauge(full, meaning, ["run"], registry=self._registry)
        self._gauges[full].labels(self._run_name).set(value)
