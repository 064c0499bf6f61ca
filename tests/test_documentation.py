"""What the pages say exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "shards").glob("*.md")])
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")
NAMED_FILE = re.compile(r"`((?:dist_mem|docs|shards|launch|configs|tests|benchmarks)/[\w./-]+\.\w+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    missing += [name for name in NAMED_FILE.findall(text) if "NAME" not in name and not (ROOT / name).exists()]
    assert not missing


def test_readme_names_every_module() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    modules = [
        path.name for path in (ROOT / "dist_mem").glob("*.py") if not path.name.startswith(("__init__", "config_"))
    ]
    assert not [name for name in modules if name not in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_real_make_targets(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^ {4}|`)make ([a-z]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert named <= targets
