"""A sink with a metric of its own: every point gets bits per token, and RUN/losses.csv a line.

dist-mem train configs/demo.yaml 'tracking.sinks=[examples/csv_sink.py:CsvSink]'
"""

import math
from collections.abc import Mapping
from pathlib import Path

from dist_mem.tracking.log import Point
from dist_mem.tracking.tracker import Sink


class CsvSink(Sink):
    def __init__(self, run_dir: Path, first_step: int) -> None:
        self.path = run_dir / "losses.csv"

    def further_metrics(self, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        return {"bits_per_token": metrics["loss"] / math.log(2)} if "loss" in metrics else {}

    def log(self, point: Point) -> None:
        with self.path.open("a") as file:
            file.write(f"{point.step},{point.metrics.get('bits_per_token', '')}\n")
