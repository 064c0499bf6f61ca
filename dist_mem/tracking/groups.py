"""The names of metrics in MLflow, TensorBoard, Prometheus and W&B: in groups, which their pages show as sections.

    in_group("loss")                        # train/loss
    in_group("validation/word_perplexity")  # eval/validation/word_perplexity

metrics.jsonl and journals have the plain names, which every command reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

FIRST_GROUPED_FORMAT = 2  # of journals; the run of an older one keeps plain names, so that no curve is cut in two
FIRST_RENAMED_FORMAT = 3  # the run of an older one keeps the former names, for the same reason
OLD_NAMES = {"memory_gb": "peak_memory_gb"}  # of metrics before version 0.1, read until version 0.2 -> present name
_OLD_NAME_OF = {present: old for old, present in OLD_NAMES.items()}
_RECALL, _OLD_RECALL, _RECALL_ACCURACY = "recall_ppl", "recall", "recall_accuracy"  # groups
_GROUPS = ("train", "eval", "memory", _RECALL, _OLD_RECALL, _RECALL_ACCURACY, "system")
_SPEEDS = (
    {"tokens_per_second", "tokens_read_per_second", "step_seconds", "data_wait_share", "mfu", "peak_memory_gb"}
    | {"goodput", "checkpoint", "straggler", *OLD_NAMES}  # first parts of names
)  # fmt: skip
_OF_RECALL = "recall_"


def in_group(name: str, recall: str = _RECALL) -> str:
    """Return the name of a metric with its group in front: train, eval, memory, recall_ppl, recall_accuracy or system.

    No two metrics get one name, and a name that has a group keeps it.

    Args:
        recall: the group of the perplexities of recall tokens.
    """
    first, _, rest = name.partition("/")
    if first in _GROUPS and rest:
        return name
    if first in _SPEEDS:
        return f"system/{name}"
    if first.startswith(_OF_RECALL):
        return f"{recall}/{name.removeprefix(_OF_RECALL)}"
    if rest.startswith(_OF_RECALL):  # of a split
        figure = rest.removeprefix(_OF_RECALL)
        return f"{_RECALL_ACCURACY if figure.startswith('accuracy') else recall}/{first}/{figure}"
    return f"eval/{name}" if rest and first != "divergence" else f"train/{name}"


def naming_of(format_version: int) -> Callable[[str], str]:
    """Return the function that names the metrics of a journal of this format in MLflow."""
    if format_version >= FIRST_RENAMED_FORMAT:
        return in_group
    if format_version >= FIRST_GROUPED_FORMAT:
        return lambda name: in_group(_OLD_NAME_OF.get(name, name), _OLD_RECALL)
    return lambda name: _OLD_NAME_OF.get(name, name)


def with_present_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a point of metrics.jsonl, which an older version may have written."""
    return {OLD_NAMES.get(name, name): value for name, value in metrics.items()}
