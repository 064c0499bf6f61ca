"""What names may be: those that come from a file, a server or a user and become part of a path, and hidden ones.

A plain name is one component of a path: it cannot lead out of its folder, hide a file, or break a line of a message.
"""

from __future__ import annotations

from dist_mem.errors import UnusableError

MAX_BYTES = 230  # file systems allow 255; a file that is being written also has a suffix
_SYSTEM_FOLDERS = {"__MACOSX", "$RECYCLE.BIN", "System Volume Information", "lost+found", "@eaDir", "#recycle"}
PLAIN = "one plain name: printable, without / and \\, without a dot in front, at most 230 bytes long"


def is_plain(name: object) -> bool:
    """Return whether a name is plain."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and not name.startswith(".")
        and not set(name) & {"/", "\\"}
        and 0 < len(name.encode()) <= MAX_BYTES
    )


def is_plain_path(path: object) -> bool:
    """Return whether a path is plain names joined by /: it stays below the folder it is joined to."""
    return isinstance(path, str) and all(map(is_plain, path.split("/")))


def check_plain(name: object, what: str) -> None:
    """Raise UnusableError if a name is not plain; `what` begins the message."""
    if not is_plain(name):
        raise UnusableError(f"{what} is {str(name)[:80]!r}, but must be {PLAIN}")


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is one that a system or an editor keeps beside the user's own.

    `._book.txt` of macOS, `.ipynb_checkpoints`, `.Trash-1000`, `.git`, and folders that have no dot in front.
    """
    return name.startswith(".") or name in _SYSTEM_FOLDERS
