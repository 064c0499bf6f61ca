"""Every key that is new, gone or has another default since the last release is named in the changelog.

Keys and defaults of that release are in golden/released_keys.txt; `python -m tests.project.test_changelog` writes those
of this tree there, as a step of a release.
"""

import re

from tests.support.paths import GOLDEN, ROOT

RELEASED = GOLDEN / "released_keys.txt"


def keys() -> set[str]:
    """Return `KEY DEFAULT` of every row of docs/reference/config.md."""
    page = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if re.match(r"\| `[a-z_]+[.` ]", line)]
    return {f"{cells[0].strip('| `')} {cells[2]}" for cells in rows if len(cells) > 3}


def test_a_change_of_a_key_has_a_line_in_the_changelog() -> None:
    released = set(RELEASED.read_text(encoding="utf-8").splitlines())
    changed = sorted({row.partition(" ")[0] for row in keys() ^ released})
    unreleased = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("## Unreleased")[2].partition("\n## ")[0]
    assert [key for key in changed if f"`{key}" not in unreleased] == []


if __name__ == "__main__":
    RELEASED.write_text("\n".join(sorted(keys())) + "\n", encoding="utf-8")
