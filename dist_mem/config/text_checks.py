"""Check the texts of a configuration: none is empty, all can be written into files, no path is too long, no password.

The code that uses a path or a name checks whether the path exists and whether the name is valid.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from dist_mem.config.check import Problem, flatten, format_value
from dist_mem.config.interpolations import default_of_variable
from dist_mem.config.keys import KeyMetadata, keys_of
from dist_mem.config.schema import Config
from dist_mem.config.settings import metadata_of
from dist_mem.runtime.addresses import login_of
from dist_mem.runtime.files import expansion_fault
from dist_mem.runtime.names import PLAIN, is_plain, is_plain_path

_IN_NO_TEXT = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]"  # YAML and UTF-8 cannot hold them
_IN_NO_NAME = r"[\x00-\x1f\x7f\ud800-\udfff]"  # a line end would end the line of a script or a log
_MOST_LETTERS = 10_000
_MOST_NAME_BYTES = 255  # of one path component, in all common file systems
_MOST_PATH_BYTES = 3_500  # Linux allows 4,096; the paths of a checkpoint's files are longer
# with a value: password=, sslpassword= and passwd= of databases; PWD= in the quoted odbc_connect= of pyodbc
_PASSWORD_IN_QUERY = r"://.*\?.*(passw(or)?d|pwd)(=|%3d)(?!%3b|[&;#]|$)"


def check_texts(leaves: Mapping[str, Any], metadata: Callable[[str], KeyMetadata] = metadata_of) -> Iterator[Problem]:
    """Yield the texts that cannot be used as they are.

    Args:
        leaves: full key -> value, as of `check.flatten`; values that are not texts are skipped.
        metadata: returns that of a key.
    """
    for key, value in leaves.items():
        if isinstance(value, str) and (message := _fault(metadata(key), value)):
            yield Problem(key, message)


def check_given(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the texts that OmegaConf would take for something else: `???`, and the default of a variable as a number.

    Args:
        tree: a file, or the overrides of a command line, with unresolved interpolations.
    """
    for key, value in flatten(tree).items():
        if value == "???":  # no value at all: that of an earlier source would stay
            yield Problem(key, "is ???, which asks for a value: give one, or leave the key out for its default")
        for default in re.findall(r"\$\{\s*oc\.env\s*:[^,{}]*,([^{}]*)\}", value) if isinstance(value, str) else ():
            read = default_of_variable(default)
            if default.strip()[:1] not in ("'", '"') and read not in (None, default.strip()):
                text = f"is {format_value(value)}, whose default {default.strip()} would become {read}"
                yield Problem(key, f"{text}: write it in quotes, '{default.strip()}'")


def _fault(key: KeyMetadata, text: str) -> str | None:
    if not text.strip() and not key.may_be_empty:
        return f"is {format_value(text)}, but must be a text; leave the key out for its default"
    if wrong := re.search(_IN_NO_NAME if key.is_path or key.in_path else _IN_NO_TEXT, text):
        return f"is {format_value(text)}, but must not contain {wrong[0]!a}; leave it out"
    if len(text) > _MOST_LETTERS:
        return f"is {format_value(text)}, but must have at most {_MOST_LETTERS:,} characters"
    fault = expansion_fault(text) if key.is_place and not (key.is_expanded and text.startswith("$")) else None
    fault = fault or (_place_fault(text) if key.is_path or key.in_path else None)
    fault = fault or (_name_fault(text, key.may_nest) if key.in_path else None)
    return fault and f"is {format_value(text)}, but {fault}"


def _name_fault(text: str, may_nest: bool) -> str | None:
    if is_plain_path(text) if may_nest else is_plain(text):
        return None
    return f"must be {PLAIN}{', or several joined by /; run_dir sets any other folder' if may_nest else ''}"


def _place_fault(text: str) -> str | None:
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        return _path_fault(text)
    try:
        parts = urlsplit(text)
        is_whole = bool(parts.hostname or parts.port or parts.scheme not in ("http", "https"))
    except ValueError as error:  # invalid brackets or port
        return f"is not an address: {error}"
    return None if is_whole else f"names no host: write one after {parts.scheme}://"


def _path_fault(text: str) -> str | None:
    """Return why no file system accepts a path; None if some do."""
    if re.fullmatch(r"\[.*\]|\{.*\}", text):
        return (
            "must be one path; of several directories, data.curriculum reads one after the other and data.mixture "
            f"draws from all by weight; write ./{text} for a folder of that name"
        )
    parts = [len(os.fsencode(part)) for part in text.split("/")]
    if max(parts) > _MOST_NAME_BYTES:
        return f"a name in it has {max(parts):,} bytes; file systems allow {_MOST_NAME_BYTES}: give a shorter one"
    total = sum(parts) + len(parts) - 1
    if total > _MOST_PATH_BYTES:
        return f"it has {total:,} bytes, and a path may have {_MOST_PATH_BYTES:,}: give a shorter one"
    return None


def check_credentials(tree: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the addresses that contain a user or password; values read from the environment are accepted.

    Args:
        tree: a file, or the overrides of a command line, with unresolved interpolations.
    """
    leaves = flatten(tree)
    for key, found in keys_of(Config).items():
        fix = found.metadata.credentials
        if fix and isinstance(address := leaves.get(key), str) and _has_credentials(address):
            yield Problem(key, f"contains a user or password, which files and lists of processes would show; {fix}")


def _has_credentials(address: str) -> bool:
    """Return whether a URL has a password, or, over HTTP, a user, which may be a token. Databases may have a user."""
    previous = ""
    while previous != address:  # removes interpolations, innermost first
        previous, address = address, re.sub(r"\$\{[^{}]*\}", "", address)
    for scheme, rest in re.findall(r"([a-z][a-z0-9+.-]*)://(\S*)", address, re.IGNORECASE):
        user, _, password = login_of(scheme, rest).removesuffix("@").partition(":")
        if password or (user and scheme.lower() in ("http", "https")):
            return True
    return re.search(_PASSWORD_IN_QUERY, address, re.IGNORECASE) is not None
