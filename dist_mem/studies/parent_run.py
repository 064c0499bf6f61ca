"""The run in MLflow of a whole study, which contains the table and the runs of its trainings.

It is found, or made again, as that of a training (tracking/mlflow/run.py). Its log is only a header, with its id: what
it has, the table and the means, is sent whole at the end of every call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dist_mem.config import TrackingConfig
from dist_mem.runtime.figures import json_text
from dist_mem.tracking.log import Entry, Header, new_uid, read_header, write_log
from dist_mem.tracking.mlflow.run import MlflowRun, target_of
from dist_mem.tracking.mlflow.sender import hide_credentials
from dist_mem.tracking.mlflow.store import experiment_of, settle_run_id, store_uri

# Tags that MLflow's clients set on a run they start, here its parent. dist_mem gets them from MLflow.
CONTEXT = "MLFLOW_RUN_CONTEXT"
_LOG = Path("mlflow") / "study.jsonl"  # in the folder of the study


class ParentRun:
    """A run in MLflow that contains the table and the runs of its trainings."""

    def __init__(self, tracking: TrackingConfig, out: Path, *, name: str, tags: Mapping[str, str]) -> None:
        """Find the run of an earlier call, or create one.

        Raises:
            UnusableError: the experiment is deleted or absent, or the run in the folder is that of another log.
            Exception: any other error of MLflow's client.
        """
        self._tags, report = tags, hide_credentials(_report, store_uri(tracking))
        settle_run_id(out, report=report)
        if not (out / _LOG).exists():
            write_log(out / _LOG, Header(new_uid(), name, experiment_of(tracking)))
        self._run = MlflowRun(target_of(tracking, out, read_header(out / _LOG)), report=report)
        self._open()
        self._run.send(Entry("status", 0, {"status": "RUNNING"}))

    def _open(self) -> None:
        self._run.open(None)
        self._run.send_tags(self._tags)

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return str(self._run.run_id)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the processes of its children."""
        return {CONTEXT: json_text({"mlflow.parentRunId": self.run_id})}

    def close(
        self, means: Mapping[str, float], files: Sequence[Path], children: Sequence[Path], *, status: str
    ) -> None:
        """Send everything and end the run with status FINISHED, KILLED or FAILED; it may have been deleted meanwhile.

        Args:
            means: over the seeds, by "row/column".
            files: of the results.
            children: run directories of the trainings.
        """
        self._open()
        now = int(time.time() * 1000)
        self._run.send_values(means, now)
        self._run.send_files(files)
        self._run.adopt(children)
        self._run.send(Entry("status", now, {"status": status}))


def _report(text: str) -> None:
    print(text, file=sys.stderr)
