"""Print the largest errors against every file of reference vectors: outputs, states and gradients.

    python benchmarks/parity.py                          # those of tests/golden: two minutes
    python benchmarks/parity.py FOLDER --only rmt        # a folder with further files under the same names

Runs the parity tests themselves, which note every error (tests/support/parity.py). Errors are over the largest entry of
an array; those of Transformer-XL and LaMemo, whose published code ran in float32, are absolute for outputs and states.
Files whose name ends in _f32 may differ by 2e-5. A file that a test cannot read, and one that none reads, is listed.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Generator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from lib.common import ROOT

FLOAT32 = 2e-5
IMPORTED = ("support import parity", "support.parity", "test_infinite_parity", "memory.published")  # by tests of parity
KINDS = ("outputs", "states", "gradients")


class Errors:
    """Plugin of pytest that keeps the errors which each test notes, by the files that it reads."""

    def __init__(self, golden: Path) -> None:
        self.golden = golden
        self.rows: dict[str, dict[str, float]] = {}  # file -> kind -> largest error
        self.failures: dict[str, str] = {}
        self.opened: list[str] = []

    def load(self, file: Any, *given: Any, **options: Any) -> Any:
        """Stand in for `numpy.load`."""
        path = Path(file)
        if path.is_relative_to(self.golden):
            self.opened.append(str(path.relative_to(self.golden).with_suffix("")))
        return _LOAD(file, *given, **options)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Name the test's file: it is opened in the test, or by a fixture that an earlier test of the module shares."""
        from tests.support import parity

        parity.noted.clear()
        before = len(self.opened)
        parity.allowed = FLOAT32 if "_f32" in item.name else 0.0
        result = yield
        read = self.opened[before:] or self.opened[-1:]
        if read and parity.noted:
            row = self.rows.setdefault(read[-1], {})
            for kind, error in parity.noted.items():
                row[kind] = max(row.get(kind, 0.0), error)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the reason of a test that fails."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message.splitlines()[0] if crash else str(report.longrepr).splitlines()[-1]
            self.failures[report.nodeid.removeprefix("tests/")] = reason

    def unread(self) -> list[str]:
        """Return the files that no test has opened."""
        files = {str(path.relative_to(self.golden).with_suffix("")) for path in self.golden.glob("*/*.npz")}
        return sorted(files - set(self.opened))


_LOAD = np.load


def main() -> None:
    """Run the tests and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ROOT / "tests" / "golden"
    parser.add_argument("folder", type=Path, nargs="?", default=default, help="default: tests/golden")
    parser.add_argument("--only", default="", help="only tests whose name contains this text")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.support import paths

    paths.GOLDEN = arguments.folder.resolve()
    errors = Errors(paths.GOLDEN)
    chosen = "(published or paper or matrices or basis)" + (f" and {arguments.only}" if arguments.only else "")
    files = [
        str(path)
        for path in sorted((ROOT / "tests").glob("*/test_*.py"))
        if any(name in path.read_text(encoding="utf-8") for name in IMPORTED)
    ]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", f"--rootdir={ROOT}", "-k", chosen]
    with mock.patch.object(np, "load", errors.load), redirect_stdout(io.StringIO()):
        pytest.main([*options, *files], plugins=[errors])
    print(f"{'file':<44}" + "".join(f"{kind:>11}" for kind in KINDS))
    for name, row in sorted(errors.rows.items()):
        print(f"{name:<44}" + "".join(f"{row[kind]:>11.1e}" if kind in row else f"{'':>11}" for kind in KINDS))
    for name, reason in sorted(errors.failures.items()):
        print(f"failed: {name}: {reason}")
    for name in errors.unread():
        print(f"no test reads {name}")


if __name__ == "__main__":
    main()
