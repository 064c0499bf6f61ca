"""Check the arguments of commands on a page without running them: parsers, configuration keys, files."""

import importlib
import re
import shlex
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

from dist_mem.cli.commands.data import builder_parser
from dist_mem.cli.parser import parse
from dist_mem.config import known_keys, load_config
from tests.support.page_commands import PROGRAMS, ROOT

OWN_FILE = re.compile(r"(?:tests|shards|launch|configs|benchmarks)/")
# test_documented_commands.py runs or checks them.
SHELL = (".", "cp", "curl", "echo", "sed", "sha256sum", "true", "xdg-open")
LAUNCHED = ("dist-mem", "dist_mem")  # directly, or through `python -m`, torchrun, deepspeed, srun


def check_arguments(command: str) -> None:
    """Raise AssertionError, or exit as the parsers do, if a program of the command does not accept its arguments."""
    if command.startswith("for "):
        return  # test_documented_commands.py runs the loop
    if " && " in command or " || " in command:
        for part in re.split(r" (?:&&|\|\|) ", command):
            check_arguments(part)
        return
    command = re.sub(r"^\w+=\$\((.*)\)$", r"\1", command)
    with chdir(ROOT):
        words = shlex.split(command, comments=True)
        assert not [word for word in words if OWN_FILE.match(word) and not Path(word).exists()]
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        program, arguments = Path(words[0]).name, words[1:]
        launched = next((index for index, word in enumerate(words) if word.rpartition("/bin/")[2] in LAUNCHED), None)
        if program in CHECKS:
            CHECKS[program](arguments)
        elif launched is not None and words[0] not in ("git", "cd"):
            check_dist_mem(words[launched + 1 :])
        else:
            assert re.fullmatch(PROGRAMS, program) or words[0] in SHELL, f"{program} is new: how is it checked?"


def check_dist_mem(arguments: list[str]) -> None:
    """Assert that the real parser accepts the arguments, and that the configuration has every file and key."""
    options = parse(arguments)
    if options.command == "train":
        load_config(options.config)
    if options.command == "data" and options.action == "build":
        builder_parser(options.dataset).parse_args(options.arguments)
    for override in getattr(options, "overrides", []):
        if options.command in ("inspect", "sweep", "arena") and "=" not in override:
            continue  # another run to compare with; a site's file, which was found above
        assert override.split("=")[0] in known_keys(), override


def check_make(targets: list[str]) -> None:
    """Assert that the Makefile has the targets."""
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(targets) <= set(known), targets


def _check_python(arguments: list[str]) -> None:
    if arguments[0] == "-m" and arguments[1] in LAUNCHED:
        check_dist_mem(arguments[2:])
    elif arguments[0] == "shards/build.py":
        check_dist_mem(["data", "build", *arguments[1:]])
    elif arguments[0] == "-m" and arguments[1].startswith("dist_mem."):
        importlib.import_module(arguments[1]).parse_arguments(arguments[2:])


def _check_sbatch(arguments: list[str]) -> None:
    script = next(index for index, word in enumerate(arguments) if word.endswith(".sbatch"))
    if not any(word.startswith(("--array", "[")) for word in arguments):
        check_dist_mem(["train", *arguments[script + 1 :]])


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "local.sh": lambda arguments: check_dist_mem(["train", *arguments]),
    "make": check_make,
    "python": _check_python,
    "sbatch": _check_sbatch,
}
