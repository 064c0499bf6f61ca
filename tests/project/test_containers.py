"""The recipes of images: the same for Docker and for Apptainer, with files that are there and nothing secret.

Building them takes programs that are not at hand in tests; docs/howto/offline.md says how their steps have been run.
"""

import re
import subprocess
from pathlib import Path

import pytest

from dist_mem.runtime.shipped_files import FOLDERS
from tests.support.paths import ROOT

DOCKERFILE = (ROOT / "launch" / "Dockerfile").read_text(encoding="utf-8")
DEFINITION = (ROOT / "launch" / "apptainer.def").read_text(encoding="utf-8")


def instructions(word: str) -> list[str]:
    """What stands behind a word of the Dockerfile, lines joined."""
    return re.findall(rf"^{word} (.*)$", DOCKERFILE.replace("\\\n", " "), re.MULTILINE)


def section(name: str) -> list[str]:
    """Lines of a section of apptainer.def, without comments."""
    text = re.split(r"^%", DEFINITION.partition(f"%{name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def commands(lines: list[str]) -> list[str]:
    """Single commands, in their order; what makes room or a shell's option is left out."""
    split = [re.sub(r" +", " ", part).strip() for line in lines for part in line.split("&&")]
    return [part for part in split if not part.startswith(("rm ", "set ", "mkdir "))]


def test_both_recipes_run_the_same_commands_on_the_same_base_with_the_same_variables() -> None:
    assert commands(instructions("RUN")) == commands(section("post"))
    assert instructions("FROM") == re.findall(r"^From: (.*)$", DEFINITION, re.MULTILINE)
    variables = re.findall(r"^export (\w+)=", "\n".join(section("environment")), re.MULTILINE)
    assert re.findall(r"(\w+)=\S+", instructions("ENV")[0]) == variables


def test_files_that_go_into_an_image_are_there_and_are_the_same_in_both() -> None:
    lines = map(str.split, instructions("COPY"))
    copied = {name: f"{to.rstrip('/')}/{Path(name).name}" for *names, to in lines for name in names}
    copied |= {name: f"/src/{name}" for name in ("dist_mem", *FOLDERS)}  # COPY names what becomes of the folder
    assert copied == dict(line.split() for line in section("files"))
    assert [name for name in copied if not (ROOT / name).exists()] == []
    build_needs = {"pyproject.toml", "README.md", "LICENSE", "dist_mem", *FOLDERS}
    assert build_needs <= set(copied)


def test_caches_of_the_apptainer_image_are_the_users_and_may_be_set(tmp_path: Path) -> None:
    script = "\n".join([*section("environment"), "env"])
    given = {"PATH": "/usr/bin:/bin", "TMPDIR": "/local"}
    for more, place in (({}, "/local"), ({"DIST_MEM_CACHES": "/mine"}, "/mine")):
        done = subprocess.run(
            ["sh", "-euc", script], env={**given, **more}, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        found = dict(line.split("=", 1) for line in done.stdout.splitlines())
        assert found["DIST_MEM_CACHES"] == place
    assert found["PATH"].startswith("/opt/dist_mem/bin:")


@pytest.mark.parametrize("text", [DOCKERFILE, DEFINITION], ids=["Dockerfile", "apptainer.def"])
def test_image_takes_nothing_secret_and_no_data(text: str) -> None:
    assert not re.search(r"(?i)password|token|secret|\.netrc|//[^/\s]*@|\.ssh|aws_", text)
    assert not re.search(r"^(?:COPY|ADD)\s+\.\s", text, re.MULTILINE), "the whole folder: with runs, books, .git"


def test_no_shell_stands_between_the_runtime_and_a_rank() -> None:
    """An entry point would be the process that a signal reaches."""
    assert instructions("ENTRYPOINT") == []
    assert section("runscript") == ['exec dist-mem "$@"']
