"""What the pages say exists: links, files, make targets, and every command down to its configuration keys."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dist_mem.__main__ import parse
from dist_mem.config import known_keys, load_config

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "shards").glob("*.md")])
SOURCES = sorted(
    path
    for pattern in (
        "dist_mem/**/*.py",
        "shards/*.py",
        "benchmarks/*.py",
        "configs/**/*.yaml",
        "launch/*.sh",
        "launch/sites/*.yaml",
    )
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)")
NAMED_FILE = re.compile(r"`((?:dist_mem|docs|shards|launch|configs|tests|benchmarks)/[\w./-]+\.\w+)`")
OWN_FILE = re.compile(r"(?:tests|shards|launch|configs|benchmarks)/")
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PROGRAMS = "dist-mem|python3?|torchrun|deepspeed|srun|make|launch/local.sh|pip|mlflow|git|cd|apt-get|bash"
# In an indented block, a docstring or a comment; the program may stand in .venv/bin and be told variables.
COMMAND = re.compile(rf"^(?:#   | {{4}})((?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:{PROGRAMS}) .*)$", re.MULTILINE)
INLINE = re.compile(r"`dist-mem ([a-z][a-z-]*)")
LAUNCHED = ("dist-mem", "dist_mem")  # directly, or through `python -m`, torchrun, deepspeed, srun


def commands_of(path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    if path.suffix == ".md":
        for language, block in FENCE.findall(text):
            if language == "sh":
                yield from (line.strip() for line in block.splitlines() if not re.match(r" *(#|$)", line))
        text = FENCE.sub("", text)
    yield from COMMAND.findall(text)


COMMANDS = [(path, command) for path in [*PAGES, *SOURCES] for command in commands_of(path)]


def check_dist_mem(arguments: list[str]) -> None:
    """The real parser takes the arguments, and the configuration knows every file and key."""
    options = parse(arguments)
    if options.command == "train":
        load_config(options.config)
    for override in getattr(options, "overrides", []):
        assert override.split("=")[0] in known_keys(), override


def check_script(script: str, arguments: list[str]) -> None:
    if script.startswith("shards/"):
        importlib.import_module(Path(script).stem).parse_arguments(arguments)


def check_make(targets: list[str]) -> None:
    known = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(targets) <= set(known), targets


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "local.sh": lambda arguments: check_dist_mem(["train", *arguments]),
    "make": check_make,
}


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[f"{path.name}-{line}" for path, line in COMMANDS])
def test_commands_are_what_the_programs_take(path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command, comments=True)
    assert not [word for word in words if OWN_FILE.match(word) and not Path(word).exists()]
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    program, arguments = Path(words[0]).name, words[1:]
    launched = next((index for index, word in enumerate(words) if Path(word).name in LAUNCHED), None)
    if launched is not None:
        check_dist_mem(words[launched + 1 :])
    elif program == "python" and arguments[0].endswith(".py"):
        check_script(arguments[0], arguments[1:])
    elif program in CHECKS:
        CHECKS[program](arguments)
    else:
        assert re.fullmatch(PROGRAMS, program) or words[0] == ".", f"{path}: {program} is new: how is it checked?"


def test_commands_are_found() -> None:
    assert {path.name for path, _ in COMMANDS} >= {"README.md", "cluster.md", "evaluate.py", "demo.yaml", "local.sh"}
    assert len(COMMANDS) > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    missing += [name for name in NAMED_FILE.findall(text) if "NAME" not in name and not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_subcommands_named_in_the_text_exist(page: Path) -> None:
    known = (ROOT / "dist_mem" / "commands.py").read_text(encoding="utf-8")
    functions = [name.replace("-", "_") for name in INLINE.findall(page.read_text(encoding="utf-8"))]
    missing = [name for name in functions if f"\ndef {name}(" not in known]
    assert not missing


def test_readme_names_every_module() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    package = ROOT / "dist_mem"
    modules = [path.name for path in package.glob("*.py") if path.name != "__init__.py"]
    packages = [f"{path.parent.name}/" for path in package.glob("*/__init__.py")]
    assert not [name for name in (*modules, *packages) if name not in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_named_in_the_text_exist(page: Path) -> None:
    check_make(re.findall(r"`make ([a-z]+)", page.read_text(encoding="utf-8")))
