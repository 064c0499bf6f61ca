"""What a reader of MLflow's page of a run finds where: folders of files, the description, the address of its curves."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from urllib.parse import urlencode

from dist_mem.tracking.mlflow.stores import is_server
from dist_mem.tracking.names import in_group

NOTE_TAG = "mlflow.note.content"  # the description, in Markdown
_FIRST_LINE = "Newest results, written by dist_mem. A text of yours that replaces it stays."
_PICTURES = (".png", ".svg", ".pdf")
_EVALUATIONS = "evaluations"
_PICTURE_LINE = re.compile(r"^!\[.*\]\(get-artifact\?.*\)$", re.MULTILINE)


def folder_of(path: str) -> str | None:
    """Return the folder in MLflow of a file of the run directory: plots, evaluations, or None for the top."""
    file = PurePosixPath(path)
    if file.suffix in _PICTURES:
        return "plots"
    return _EVALUATIONS if file.parts[0] == _EVALUATIONS else None


def is_shown(path: str) -> bool:
    """Return whether the description of a run can show a file: browsers do not show a PDF as a picture."""
    return PurePosixPath(path).suffix == ".png"


def description(
    metrics: Mapping[str, float],
    present: str | None,
    *,
    experiment_id: str,
    run_id: str,
    picture: str | None = None,
    max_chars: int = 5000,
) -> str | None:
    """Return the description of a run: a table of its newest loss and evaluations, and below it a picture.

    Each name links to its chart. The loss comes first. MLflow's own pages of charts have it late: they sort groups by
    their names. MLflow 3.17 shows a picture that is an artifact, and leaves out one that is in the text (data:).

    Args:
        metrics: the newest values of the run, under MLflow's names.
        present: the description that the run has.
        picture: path of an artifact; None: the one that is shown now.
        max_chars: the last metrics are left out where the text would be longer.

    Returns:
        None if there is nothing to say, or if the present text is not by dist_mem.
    """
    if present and not present.startswith(_FIRST_LINE):
        return None
    rows = [
        f"| [{name}]({_chart(name, experiment_id, run_id)}) | {value:.5g} |"
        for name, value in sorted(metrics.items(), key=lambda item: (in_group(item[0]) != "train/loss", item[0]))
        if in_group(name) == "train/loss" or in_group(name).startswith(("eval/", "recall_ppl/", "recall_accuracy/"))
    ]
    shown = _PICTURE_LINE.findall(present or "")[-1:] if picture is None else [_shown(picture, run_id)]
    while True:
        table = ["", "| metric | value |", "|---|---|", *rows] if rows else []
        text = "\n".join([_FIRST_LINE, *table, *(("", *shown) if shown else ())])
        if len(text) <= max_chars or not rows:
            return text if rows or shown else None
        rows.pop()


def again(run_name: str, first: int, last: int) -> str:
    """Return the description of a nested run."""
    return (
        f"Steps {first} to {last} of {run_name}, as they were made again after a rollback, with other values. "
        "MLflow cannot delete the earlier ones, which stay in that run; everything else is there too."
    )


def _shown(picture: str, run_id: str) -> str:
    """Return the Markdown of a picture among the artifacts; its address is relative to any page of MLflow."""
    address = urlencode({"path": picture, "run_uuid": run_id})
    return f"![{PurePosixPath(picture).stem}](get-artifact?{address})"


def _chart(name: str, experiment_id: str, run_id: str) -> str:
    """Return the address of one chart, relative to any page of MLflow."""
    given = {"runs": [run_id], "experiments": [experiment_id], "metric": name, "plot_metric_keys": [name]}
    texts = {key: json.dumps(value) for key, value in (given | {"x_axis": "step"}).items()}
    return f"#/metric?{urlencode(texts)}"


def where_to_look(uri: str, experiment_id: str, run_id: str) -> str:
    """Return how to open the curves of a run: an address, and before it the command of a page if there is no server."""
    # Without the view, MLflow 3 opens in that for chat models.
    page = f"/#/experiments/{experiment_id}/runs/{run_id}/model-metrics?workflowType=machine_learning"
    if is_server(uri):
        return f"curves: {uri.rstrip('/')}{page}"
    return f"curves: mlflow ui --backend-store-uri {uri}, then http://127.0.0.1:5000{page}"
