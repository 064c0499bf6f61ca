"""The names of metrics in MLflow, TensorBoard, Prometheus and W&B: in groups, which their pages show as sections.

    in_group("loss")                        # train/loss
    in_group("validation/word_perplexity")  # eval/validation/word_perplexity

metrics.jsonl and journals have the plain names, which every command reads.
"""

from __future__ import annotations

_RECALL, _RECALL_ACCURACY = "recall_ppl", "recall_accuracy"  # groups
_GROUPS = ("train", "eval", "memory", _RECALL, _RECALL_ACCURACY, "system")
_SPEEDS = (
    {"tokens_per_second", "tokens_read_per_second", "step_seconds", "data_wait_share", "mfu", "peak_memory_gb"}
    | {"goodput", "checkpoint", "straggler"}  # first parts of names
)  # fmt: skip
_OF_RECALL = "recall_"


def in_group(name: str) -> str:
    """Return the name of a metric with its group in front: train, eval, memory, recall_ppl, recall_accuracy or system.

    No two metrics get one name, and a name that has a group keeps it.
    """
    first, _, rest = name.partition("/")
    if first in _GROUPS and rest:
        return name
    if first in _SPEEDS:
        return f"system/{name}"
    if first.startswith(_OF_RECALL):
        return f"{_RECALL}/{name.removeprefix(_OF_RECALL)}"
    if rest.startswith(_OF_RECALL):  # of a split
        figure = rest.removeprefix(_OF_RECALL)
        return f"{_RECALL_ACCURACY if figure.startswith('accuracy') else _RECALL}/{first}/{figure}"
    return f"eval/{name}" if rest and first != "divergence" else f"train/{name}"
