"""An installation: what belongs to it, and what works with only a part of the libraries."""

import contextlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import dist_mem
import dist_mem.__main__
from dist_mem import __version__
from dist_mem.__main__ import main
from dist_mem.config import load_config
from dist_mem.errors import CheckpointError
from dist_mem.evaluation.scores import perplexity
from dist_mem.runtime import shipped_files
from dist_mem.runtime.extras import EXTRA_OF
from dist_mem.runtime.files import partial_of
from tests.support.evaluated_runs import MEMORIES, make_run
from tests.support.messages import refused, said
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OF_USERS = {name: needed for name, needed in EXTRAS.items() if name not in ("all", "dev")}
OTHER_NAMES = {
    "nvidia-ml-py": "pynvml",
    "protobuf": "google.protobuf",
    "fla-core": "fla",
}  # distribution -> name in `import`


def test_the_core_is_torch_and_what_reads_configurations_weights_and_text_and_compares() -> None:
    core = {Requirement(one).name for one in PROJECT["dependencies"]}
    assert core == {"torch", "omegaconf", "safetensors", "sentencepiece", "numpy", "fsspec", "scipy"}


def test_the_extra_all_contains_every_other() -> None:
    assert set(re.findall(r"[\w]+", EXTRAS["all"][0].partition("[")[2])) == OF_USERS.keys()


def test_every_version_of_python_that_is_named_is_tried() -> None:
    """One by `make test-all`, with the lock file that names it; the others by `make versions`; all in CI."""
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    locked = re.findall(r"--python-version (\S+)", (ROOT / "requirements.txt").read_text(encoding="utf-8"))
    others = re.findall(r"^VERSIONS \?= (.*)$", makefile, re.MULTILINE)[0].split()
    assert sorted(named) == sorted(locked + others)
    in_ci = [re.findall(r"'(3\.\d+)'", versions) for versions in re.findall(r"python: \[(.*)\]", workflow)]
    assert in_ci == [sorted(named), others]
    assert PROJECT["requires-python"] == f">={min(named)}"


def test_the_error_for_a_missing_library_names_its_extra() -> None:
    names: dict[str, str] = {}  # of a library in several extras, the first one
    for extra, needed in OF_USERS.items():
        for one in needed:
            names.setdefault(Requirement(one).name, extra)
    assert {OTHER_NAMES.get(name, name.replace("-", "_")): names[name] for name in names} == EXTRA_OF


def test_the_version_is_the_same_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"dist-mem {__version__}\n"
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_a_tag_runs_every_step_of_a_release_and_another_number_is_refused(tmp_path: Path) -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    steps = re.findall(r"run: \.ci/release (\w+)", workflow)
    assert f"set -- {' '.join(steps)}\n" in (ROOT / ".ci" / "release").read_text(encoding="utf-8")
    for name in (".ci/release", "dist_mem/version.py", "CITATION.cff", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)

    def version(tag: str) -> subprocess.CompletedProcess[str]:
        command, variables = [str(tmp_path / ".ci" / "release"), "version"], {**os.environ, "RELEASE": tag}
        return subprocess.run(command, env=variables, capture_output=True, text=True)

    assert version("v9.9.9").returncode == 2
    for earlier in ("\n## 0.0.1\n", ""):  # the first release has none
        (tmp_path / "CHANGELOG.md").write_text(f"# Changes\n\n## {__version__} (2026-01-02)\n\nNew: all.\n{earlier}")
        done = version(f"v{__version__}")
        assert (done.returncode, done.stdout) == (0, f"version {__version__}\n"), done.stderr
        assert (tmp_path / "build" / "notes.md").read_text(encoding="utf-8").strip() == "New: all."
    assert f"\n## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_configurations_are_found_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped_files.say_where_from.cache_clear()
    config = load_config(["configs/demo.yaml", "memory/none.yaml", "launch/sites/cpu.yaml"])
    assert (config.name, config.memory["kind"], config.launch.gpus_per_node) == ("demo", "none", "0")
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"files that are not in this folder: taken from {ROOT}"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "demo.yaml").write_text("{name: mine, train: {steps: 1}}", encoding="utf-8")
    assert load_config(["configs/demo.yaml"]).name == "mine"


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "configs/../README.md", "/etc/passwd", "tests", "configs/absent.yaml", "configs/\0"),
        "configs/" * 99,
    ],
)
def test_only_files_of_the_shipped_folders_are_found(name: str) -> None:
    assert shipped_files.shipped_path(name) is None
    assert shipped_files.shipped_path("configs/demo.yaml") == ROOT / "configs" / "demo.yaml"


def test_init_makes_a_project_that_can_train_or_completes_one_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def files(folder: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}

    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine"]) == 0
    made = files("mine")
    assert made.keys() == {"README.md", "config.yaml", "local.sh", "site.yaml"}
    with contextlib.chdir("mine"):
        assert load_config(["config.yaml", "site.yaml"]).train.steps == 200
    capsys.readouterr()
    for name in ("mine", "mine/README.md"):
        assert main(["init", name]) == 2
        said(capsys.readouterr().err, name)
    assert files("mine") == made
    for name, more in (("killed", b""), ("edited", b"# mine\n")):
        Path(name).mkdir()
        Path(name, "README.md").write_bytes(made["README.md"] + more)
        partial = partial_of(Path(name, "config.yaml"))
        partial.with_name(partial.name.replace(f"-{os.getpid()}.", "-999999999.")).write_bytes(b"da")
        before = files(name)
        assert main(["init", name]) == (2 if more else 0)
        assert files(name) == (before if more else made)


def test_the_script_of_shards_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / "shards" / "build.py"
    called: list[list[str]] = []
    monkeypatch.setattr(dist_mem.__main__, "entry", lambda: called.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", [str(script), "sample", "--out", "x"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    runpy.run_path(str(script), run_name="__main__")
    assert called == [["data", "build", "sample", "--out", "x"]]


# A call of one of these starts a program, or loads a module whose name is data.
RUNS_CODE = re.compile(
    r"subprocess\.(?:run|Popen|call|check_\w+)\(|exec_module\(|import_module\(|entry_points\(|os\.(?:exec|system|popen|spawn)\w*\("
    r"|runpy\.|\bpickle\.|torch\.load\(|(?<![\w.])(?:eval|exec)\("
)


def test_the_security_page_lists_the_files_that_run_programs_and_load_modules() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    paragraph = page[page.index("Other programs are started") :].partition("\n\n")[0]
    running = {
        path.relative_to(ROOT / "dist_mem").as_posix()
        for path in (ROOT / "dist_mem").rglob("*.py")
        if RUNS_CODE.search(path.read_text(encoding="utf-8"))
    }
    assert set(re.findall(r"`dist_mem/([\w/]+\.py)`", paragraph)) == running


# What a core installation lacks, as far as Python can tell: each of these imports fails.
CORE_ONLY = f"""
import sys
for name in {sorted(EXTRA_OF)}:
    sys.modules[name] = None
from dist_mem.__main__ import main
"""


def in_core(program: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in which no library of an extra can be imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", CORE_ONLY + program, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


COMMANDS = "sys.exit(main(sys.argv[1:]))"
# Python's functions and the command, in one process: its imports take the time.
USE = """
import dist_mem
from dist_mem.cli.commands.data import builder_parser
from dist_mem.datasets.recipes import builder_names
print(*(builder_parser(name).format_help() for name in builder_names()))
model = dist_mem.load(sys.argv[1])
assert len(model.score(["A b."])[0].nll) == 4
sys.exit(main(["generate", sys.argv[1], "--prompt", "A b.", "--tokens", "4"]))
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Path:
    return make_run(tmp_path_factory.mktemp("run"), library, MEMORIES["infinite_over_transformer_xl"])[0]


def test_a_core_installation_scores_generates_and_explains_every_builder(run_dir: Path, tmp_path: Path) -> None:
    done = in_core(USE, str(run_dir), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 tokens, " in done.stderr
    assert "dist-mem data build wikitext" in done.stdout


EXAMPLE = """
for arguments in (["report", "--example"], ["generate", "--example", "--tokens", "8"]):
    assert main(arguments) == 0, arguments
"""


def test_a_core_installation_shows_the_shipped_model_and_writes_one_page(tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in shipped_files.example_model().iterdir()}
    done = in_core(EXAMPLE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page, _, text = done.stdout.partition("\n")
    assert page.startswith("written: example_report.html (") and len(text.split()) > 4
    assert "8 tokens, " in done.stderr and "first half of" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["example_report.html"]
    written = (tmp_path / "example_report.html").read_text(encoding="utf-8")
    assert "flora_marsh.txt, read by demo</title>" in written and "No evaluation yet" not in written
    assert {path: path.stat().st_mtime_ns for path in shipped_files.example_model().iterdir()} == before


def test_the_shipped_model_is_far_better_with_its_memory_than_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a book that it was not trained on."""
    assert sum(path.stat().st_size for path in shipped_files.example_model().iterdir()) < 2**20
    monkeypatch.chdir(tmp_path)
    text = shipped_files.example_book().read_text(encoding="utf-8")
    found = dist_mem.load("example").inspect(text)
    losses = (found.nll, found.windowed, found.without)
    with_memory, windowed, emptied = (perplexity(float(part.double().sum()), len(text.split())) for part in losses)
    assert with_memory < 4.1 and windowed > 1.3 * with_memory and emptied > 2.2 * with_memory
    (tmp_path / "example").mkdir()
    with refused(CheckpointError, "example/checkpoints: no checkpoint"):
        dist_mem.load("example")


def test_what_the_example_leaves_out_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("report", "generate"):
        assert main([command, str(tmp_path / "a"), "--example"]) == 2
        said(capsys.readouterr().err, "--example")
    assert main(["report", "--text", "x"]) == 2
    said(capsys.readouterr().err, "no run")


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("train configs/demo.yaml tracking.mlflow=false", "train"),
        ("data build sample --size tiny", "train"),
        ("compare RUN --plot x.png", "plots"),
    ],
)
def test_a_missing_extra_is_one_line_with_the_command_that_installs_it(
    command: str, extra: str, run_dir: Path, tmp_path: Path
) -> None:
    if "compare" in command:
        assert in_core(COMMANDS, "evaluate", str(run_dir), "--split", "test", cwd=tmp_path).returncode == 0
    done = in_core(COMMANDS, *command.replace("RUN", str(run_dir)).split(), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (error,) = (line for line in done.stderr.splitlines() if line.startswith(("error", "Traceback")))
    assert error == done.stderr.splitlines()[-1]
    said(error, f"dist-mem[{extra}]")
    assert not list(tmp_path.iterdir()), "something was begun"
