"""Names of metrics as MLflow, TensorBoard and W&B get them: in groups, and without what MLflow refuses.

    in_group("loss")                        # train/loss
    in_group("validation/word_perplexity")  # eval/validation/word_perplexity
    valid_name("lm_eval/q@5 (v1)|x/acc")    # lm_eval/q_5 _v1__x_0b3ff1f2/acc

Their pages show a group as a section. The log has the plain names, which every command reads. Whatever is sent to
MLflow as the name of a metric, parameter or tag passes `valid_name`.
"""

from __future__ import annotations

import hashlib
import posixpath
import re

OF_SYSTEM = "system/"  # begin of the names of what was measured, not trained
_RECALL, _RECALL_ACCURACY = "recall_ppl", "recall_accuracy"  # groups
_GROUPS = ("train", "eval", "memory", _RECALL, _RECALL_ACCURACY, "system")
_SPEEDS = (
    {"tokens_per_second", "tokens_read_per_second", "step_seconds", "data_wait_share", "mfu", "peak_memory_gb"}
    | {"num_alloc_retries", "num_ooms"}
    | {"goodput", "checkpoint", "straggler"}  # first parts of names
)  # fmt: skip
_OF_RECALL = "recall_"
_OF_TRAINING = ("divergence", "mixture")
_LONGEST = 250  # characters
_ALLOWED = r"\w.\- :"  # in a part between two slashes
_NAME = re.compile(rf"[/{_ALLOWED}]{{1,{_LONGEST}}}")
_OTHER = re.compile(rf"[^{_ALLOWED}]")


def in_group(name: str) -> str:
    """Return the name of a metric with its group in front: train, eval, memory, recall_ppl, recall_accuracy or system.

    A name that has a group keeps it, so own sinks may not log both `loss` and `train/loss` (own_sinks.py).
    """
    first, _, rest = name.partition("/")
    if first in _GROUPS and rest:
        return name
    if first in _SPEEDS:
        return f"{OF_SYSTEM}{name}"
    if first.startswith(_OF_RECALL):
        return f"{_RECALL}/{name.removeprefix(_OF_RECALL)}"
    if rest.startswith(_OF_RECALL):  # of a split
        metric = rest.removeprefix(_OF_RECALL)
        return f"{_RECALL_ACCURACY if metric.startswith('accuracy') else _RECALL}/{first}/{metric}"
    return f"eval/{name}" if rest and first not in _OF_TRAINING else f"train/{name}"


def valid_name(name: str) -> str:
    """Return a name that MLflow takes: this one if it does, else one with a checksum, so that no two names get one."""
    if _is_valid(name):
        return name
    made = "/".join(map(_valid_part, name.split("/")))
    if not _is_valid(made):
        made = f"{made[: _LONGEST - 10].rstrip('/')}_{checksum_of(name)}"
    return made


def valid_text(text: str) -> str:
    """Return a text without what databases refuse: halves of surrogate pairs, and the null character."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def _is_valid(name: str) -> bool:
    is_path = posixpath.normpath(name) == name and name != "." and not name.startswith(("..", "/"))
    return is_path and _NAME.fullmatch(name) is not None


def _valid_part(part: str) -> str:
    cleaned = _OTHER.sub("_", part)
    is_kept = cleaned == part and part and not part.startswith("..") and part != "."
    return part if is_kept else f"{cleaned.lstrip('.')}_{checksum_of(part)}"


def checksum_of(text: str) -> str:
    """Return eight characters that tell this text from others."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
