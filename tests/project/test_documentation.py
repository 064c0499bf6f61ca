"""What the pages say exists: links, files, make targets, and every command down to its configuration keys."""

import ast
import re
import runpy
from pathlib import Path

import pytest

from dist_mem.cli.parser import build_parser
from dist_mem.errors import EXIT_INTERRUPTED, MEANINGS
from tests.support.page_commands import FENCE, PAGES, ROOT, anchor_of, commands_of
from tests.support.program_arguments import check_arguments, check_make

PATTERNS = ("dist_mem/**/*.py", "shards/*.py", "benchmarks/*.py", "benchmarks/*.sh", "configs/**/*.yaml", "launch/*.sh")
SOURCES = sorted(path for pattern in (*PATTERNS, "launch/sites/*.yaml") for path in ROOT.glob(pattern))
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")
HEADING = re.compile(r"\]\((?!https?://)([\w./-]*\.md)?#([^)]+)\)")
NAMED_FILE = re.compile(r"`((?:dist_mem|docs|shards|launch|configs|tests|benchmarks)/[\w./-]+\.\w+)`")
INLINE = re.compile(r"`dist-mem ([a-z][a-z-]*)")

COMMANDS = [(path, command) for path in [*PAGES, *SOURCES] for command in commands_of(path)]


def test_commands_are_what_the_programs_take(subtests: pytest.Subtests) -> None:
    assert {path.name for path, _ in COMMANDS} >= {"README.md", "cluster.md", "evaluate.py", "demo.yaml", "local.sh"}
    for path, command in COMMANDS:
        with subtests.test(path=path, command=command):
            check_arguments(command)


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {anchor_of(heading) for heading in headings}


def test_links_files_commands_and_make_targets_of_a_page_exist(subtests: pytest.Subtests) -> None:
    subcommands = build_parser()[1]
    for page in PAGES:
        with subtests.test(page=page):
            text = page.read_text(encoding="utf-8")
            missing = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
            if page.parent.name != "log":  # which names files of its time
                named = (name for name in NAMED_FILE.findall(text) if "NAME" not in name)
                missing += [name for name in named if not (ROOT / name).exists()]
            missing += [name for name in INLINE.findall(text) if name not in subcommands]
            missing += [
                f"{name}#{anchor}"
                for name, anchor in HEADING.findall(text)
                if anchor not in anchors_of(page.parent / (name or page.name))
            ]
            assert not missing
            check_make(re.findall(r"`make ([a-z]+)", text))


def test_readme_is_short_and_no_first_command_needs_an_address() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
    assert [page.name for page in PAGES if re.search(r"git clone [A-Z]+\b", page.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("page", ["docs/howto/resume.md", "launch/README.md"])
def test_a_table_of_exit_codes_has_their_meanings(page: str) -> None:
    section = (ROOT / page).read_text(encoding="utf-8").partition("\n## Exit codes\n")[2].partition("\n## ")[0]
    found = {
        int(code): text.replace("`", "") for code, text in re.findall(r"^\| (\d+) \| (.*?) \|", section, re.MULTILINE)
    }
    assert found.keys() >= MEANINGS.keys() - {EXIT_INTERRUPTED}  # not of a job
    assert [code for code, text in found.items() if not text.startswith(MEANINGS[code])] == []


def test_functions_that_the_decisions_name_exist() -> None:
    text = (ROOT / "docs" / "dev" / "decisions.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", text)
    assert len(named) > 20
    missing = [f"{path}:{name}" for path, name in named if not defines(ROOT / "dist_mem" / path, name.split("."))]
    assert not missing


def defines(path: Path, names: list[str]) -> bool:
    """Whether a module defines a function or class, or a class a method: the names lead from outside inwards."""
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
    for name in names:
        found = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name]
        if not found:
            return False
        body = found[0].body
    return True


def test_keys_beside_those_of_other_projects_exist() -> None:
    known = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    named = re.findall(
        r"`((?:train|model|memory|optimizer|schedule|data|eval|checkpoint|tracking)\.(?!py)[\w.]+)",
        (ROOT / "docs" / "reference" / "names.md").read_text(encoding="utf-8"),
    )
    assert len(named) > 60
    assert [key for key in named if f"`{key}`" not in known] == []


@pytest.mark.parametrize("name", ["draw_lanes.py", "draw_memories.py"])
def test_the_drawn_pictures_are_those_of_their_script(name: str) -> None:
    drawing = runpy.run_path(str(ROOT / "docs" / "images" / name))
    for path, content in drawing["drawn"]().items():
        assert path.read_text(encoding="utf-8") == content, f"python docs/images/{name}"
