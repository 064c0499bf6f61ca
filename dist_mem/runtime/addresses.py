"""Logins in addresses, which are not shown."""

from __future__ import annotations

import re

_OF_DATABASE = re.compile(r"[^:/?#@]*:[^@]*@")  # as SQLAlchemy reads it: a password may contain / # ?
_OF_SERVER = re.compile(r"[^:/?#@]*:(?!\d*(?:[/?#]|$))[^@]*@")  # but what is a port is none
_USUAL = re.compile(r"[^/?#]*@")


def login_of(scheme: str, rest: str) -> str:
    """Return the user and password of an address, with the @; "" without one.

    Args:
        rest: what follows `scheme://`. Characters of the password need not be escaped.
    """
    pattern = _OF_SERVER if scheme.lower() in ("http", "https") else _OF_DATABASE
    found = _USUAL.match(rest) or pattern.match(rest)
    return found[0] if found else ""
