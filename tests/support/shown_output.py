"""Compare the output that a page shows with what its command printed, in form: words are equal, figures may differ.

- Numbers, times, checksums and absolute paths are equal to any other one; `n/a`, `nan` and `inf` are numbers.
- A bar `[###---]` is equal to any other one.
- A line `...` on the page stands for any lines, none too; `...` within a line for any text.
- Amounts of blanks, empty lines, and the bracket of `compare` (`1.21x lower`) do not count.
- An interval is as well the reason why there is none: here a split has four documents, and a bootstrap needs eight.
"""

from __future__ import annotations

import re

GAP = "..."
_VERDICT = re.compile(r" ?\([\d.,]+x? (?:lower|higher)\)")  # left out of a table where the figures are equal
_PATH = re.compile(r"(?<![\w.])/[\w.+-]+(?:/[\w.+-]*)+")
_HASH = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b")
_NUMBER = re.compile(r"(?<![A-Za-z_])[-+]?\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?|\b(?:n/a|nan|inf)\b")
_INTERVAL = re.compile(r"\([\d.]+ % interval [^)]*\)|\(no interval: [^)]*\)")
_BAR = re.compile(r"\[#*-*\](?= \w)")
_TERMINAL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def difference(shown: str, printed: str) -> str | None:
    """Return how the output differs from what the page shows, with both; None if it has the same form."""
    lines = _lines(shown)
    pattern = "".join(
        r"(?:.*\n)*?" if line == GAP else ".*".join(map(re.escape, line.split(GAP))) + r"\n" for line in lines
    )
    found = _lines(printed)
    if re.fullmatch(pattern, "".join(f"{line}\n" for line in found)):
        return None
    return f"{_hint(lines, found)}\n--- the page shows\n{shown.rstrip()}\n--- the command printed\n{printed.rstrip()}"


def _lines(text: str) -> list[str]:
    """Return the lines in the form in which they are compared, without empty ones."""
    found = (_plain(line) for line in text.splitlines())
    return [line for line in found if line]


def _plain(line: str) -> str:
    line = _INTERVAL.sub("(an interval)", _VERDICT.sub("", _TERMINAL.sub("", line)))
    for form, name in ((_BAR, "BAR"), (_PATH, "PATH"), (_HASH, "HASH"), (_NUMBER, "#")):
        line = form.sub(name, line)
    return " ".join(line.split())


def _hint(shown: list[str], printed: list[str]) -> str:
    """Return the likeliest reason."""
    for line in shown:
        pattern = ".*".join(map(re.escape, line.split(GAP)))
        if line != GAP and not any(re.fullmatch(pattern, other) for other in printed):
            return f"no line has this form (# is a number): {line}"
    return f"lines are in another order, or others are between them: put {GAP} where lines are left out"
