"""Folders of the project that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dist_mem"
GOLDEN = ROOT / "tests" / "golden"
EXAMPLES = ROOT / "examples"
SUPPORT = ROOT / "tests" / "support"
