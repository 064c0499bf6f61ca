"""Names and texts that MLflow takes. Whatever is sent to it as the name of a metric, parameter or tag passes here.

valid_name("lm_eval/q@5 (v1)|x/acc")  # "lm_eval/q_5 _v1__x_0b3ff1f2/acc"
"""

from __future__ import annotations

import hashlib
import posixpath
import re

_LONGEST = 250  # characters
_ALLOWED = r"\w.\- :"  # in a part between two slashes
_NAME = re.compile(rf"[/{_ALLOWED}]{{1,{_LONGEST}}}")
_OTHER = re.compile(rf"[^{_ALLOWED}]")


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
