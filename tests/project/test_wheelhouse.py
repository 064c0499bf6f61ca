"""The wheelhouse: what a site without network installs; and that the project's own wheel is whole."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, PathDistribution, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dist_mem.runtime.shipped_files import FOLDERS
from tests.support.jobs import logged_steps
from tests.support.paths import ROOT


def without_pip(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables that name packages to pip or modules to Python."""
    kept = {name: value for name, value in environment.items() if not name.startswith(("PIP_", "PYTHON"))}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def make_environment(folder: Path, wheel: Path, *extras: str) -> Path:
    """Make a virtual environment with a wheel of dist_mem, and return its site-packages.

    Raises:
        PackageNotFoundError: the wheel requires what the environment that runs the tests does not have.
    """
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    for command in ([sys.executable, "-m", "venv", "--without-pip", str(folder)], [*install, str(wheel)]):
        subprocess.run(command, check=True, env=without_pip(os.environ))
    (site,) = folder.glob("lib/python*/site-packages")
    (metadata,) = site.glob("dist_mem-*.dist-info")
    owners = packages_distributions()
    for found in _closure(PathDistribution(metadata), extras):
        _link(found, site, owners)
    return site


def _closure(first: Distribution, extras: Iterable[str]) -> list[Distribution]:
    """Return all that a distribution with these extras requires, directly or through others, here."""
    found: dict[tuple[str, str], Distribution] = {}  # by name and extra
    left = [(first, extra) for extra in ("", *extras)]
    while left:
        one, extra = left.pop()
        for requirement in map(Requirement, one.requires or ()):
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            for its_extra in ("", *requirement.extras):
                key = (requirement.name, its_extra)
                if key not in found:
                    found[key] = distribution(requirement.name)
                    left.append((found[key], its_extra))
    return list({each.metadata["Name"]: each for each in found.values()}.values())


def _link(found: Distribution, site: Path, owners: Mapping[str, list[str]]) -> None:
    """Link a distribution into site-packages: whole folders, or single files of those that it shares with others."""
    for file in found.files or ():
        top = file.parts[0]
        if top in ("..", "__pycache__") or top.endswith(".pth"):
            continue
        name = file if len(set(owners.get(top, ()))) > 1 else top
        if not (link := site / name).exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(str(found.locate_file(name)))


pytestmark = pytest.mark.pages

# Few; DeepSpeed, which compiles its op anew there, and its launcher are among them.
OFFLINE_TESTS = "tests/config/test_config.py tests/model/test_model.py tests/launch/test_launch.py"


def run(*command: str, cwd: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, cwd=cwd, env=dict(environment), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def copy_project(target: Path) -> Path:
    """The files that a clone would have, as they are in this folder."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip(f"{ROOT} is no clone: {listed.stderr.strip()}")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of the project, in a folder named as `git clone` names it."""
    pytest.importorskip("hatchling")
    return copy_project(tmp_path / "dist_mem")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, made without network."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_project(folder / "source")
    command = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-index", "--no-deps", "--no-build-isolation"]
    run(*command, "--wheel-dir", str(folder), str(source), cwd=folder, environment=without_pip(os.environ))
    return next(folder.glob("dist_mem-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """site-packages of an environment with the wheel and what its core and its extra `train` require."""
    return make_environment(tmp_path_factory.mktemp("train"), wheel, "train")


def python(site: Path, *arguments: str, cwd: Path) -> str:
    """Output of Python in an environment, which knows nothing of the checkout."""
    environment = {**without_pip(os.environ), "XDG_CACHE_HOME": str(cwd / "cache"), "DS_ACCELERATOR": "cpu"}
    return run(str(site.parents[2] / "bin" / "python"), *arguments, cwd=cwd, environment=environment)


def dist_mem(site: Path, *arguments: str, cwd: Path) -> str:
    return python(site, "-m", "dist_mem", *arguments, cwd=cwd)


def test_the_folder_that_contains_a_clone_does_not_hide_the_package(clone: Path) -> None:
    """Issue 15: Python imported the clone's own folder, also named dist_mem, as a namespace package.

    pip unpacks into site-packages what the build backend puts into the wheel of an editable installation.
    """
    site = clone.parent / "site"
    code = "import sys, hatchling.build as backend; backend.build_editable(sys.argv[1])"
    isolated = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run(sys.executable, "-c", code, str(clone.parent), cwd=clone, environment=isolated)
    shutil.unpack_archive(next(clone.parent.glob("dist_mem-*.whl")), site, "zip")
    code = "import site, sys; site.addsitedir(sys.argv[1]); import dist_mem as d; print(d.__file__, *d.__all__)"
    # -S: without the installation that runs this test.
    done = run(sys.executable, "-S", "-c", code, str(site), cwd=clone.parent, environment=isolated)
    path, *names = done.split()
    assert path == str(clone / "dist_mem" / "__init__.py")
    assert "load" in names


def test_wheel_has_every_file_of_the_package(installed: Path) -> None:
    def files(folder: Path) -> set[str]:
        found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        return {str(path) for path in found if "__pycache__" not in path.parts}

    shipped = {f"shipped/{folder}/{name}" for folder in FOLDERS for name in files(ROOT / folder)}
    assert files(installed / "dist_mem") == files(ROOT / "dist_mem") | shipped


def test_type_checkers_see_the_types_of_the_installed_package(installed: Path, tmp_path: Path) -> None:
    lines = [
        "import dist_mem",
        'model = dist_mem.load("runs/demo")',
        'reveal_type(model.score(["a"]))',
        "model.generate(3)",
    ]
    (tmp_path / "program.py").write_text("\n".join(lines), encoding="utf-8")
    # torch's own types take a minute
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n", encoding="utf-8")
    python_of = ["--python-executable", str(installed.parents[2] / "bin" / "python")]
    command = [sys.executable, "-m", "mypy", *python_of, "--cache-dir", str(tmp_path / "cache"), "program.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=without_pip(os.environ), capture_output=True, text=True, check=False
    )
    assert 'Revealed type is "list[dist_mem.api.model.Scores]"' in done.stdout, done.stdout + done.stderr
    assert 'Argument 1 to "generate" of "Model" has incompatible type "int"; expected "str"' in done.stdout


def test_commands_of_the_wheel_need_nothing_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    script = dist_mem(installed, "launch", "train.steps=1", "--nodes", "2", "--dry-run", cwd=tmp_path)
    assert "#SBATCH --nodes=2\n" in script
    assert re.search(r"^ *srun .*--kill-on-bad-exit=1", script, re.MULTILINE)
    assert re.search(r"none keeps all \d+ rules", dist_mem(installed, "check-memory", "none", cwd=tmp_path))
    assert "\nlaunch:" in dist_mem(installed, "config", cwd=tmp_path)
    assert "lamemo.table1 " in dist_mem(installed, "reproduce", cwd=tmp_path)
    (tmp_path / "one.yaml").write_text("name: one", encoding="utf-8")
    dist_mem(installed, "config", "one.yaml", "configs/demo.yaml", "--snapshot", "copy", cwd=tmp_path)
    copied = tmp_path / "copy" / "code" / "dist_mem" / "shipped" / "configs" / "demo.yaml"
    assert copied.read_bytes() == (ROOT / "configs" / "demo.yaml").read_bytes()


USE = """
import dist_mem
scores = dist_mem.load("runs/demo").score("It was the best of times.")
print(f"{scores.memory.num_tokens} tokens, {scores.perplexity:.1f}")
"""


@pytest.mark.nightly
@pytest.mark.timeout(900)  # DeepSpeed's op is compiled again: 75 s of a core
def test_a_wheel_alone_builds_data_trains_on_two_ranks_and_its_core_scores_and_generates(
    installed: Path, wheel: Path, tmp_path: Path
) -> None:
    assert "train: 16 documents" in dist_mem(installed, "data", "build", "sample", "--size", "tiny", cwd=tmp_path)
    keys = ["train.steps=20", "schedule.warmup_steps=5", "tracking.mlflow=false", "eval.figures=false"]
    words = ["train", "configs/demo.yaml", "memory/transformer_xl.yaml", *keys]
    assert "data/sample, train: 16 documents" in dist_mem(installed, *words, "--check", cwd=tmp_path)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "dist_mem"]
    python(installed, *ranks, *words, cwd=tmp_path)
    assert logged_steps(tmp_path / "runs" / "demo")[-1] == 20
    core = make_environment(tmp_path / "core", wheel)
    assert not {path.name for path in core.iterdir()} & {"deepspeed", "huggingface_hub", "tokenizers", "tqdm"}
    assert re.fullmatch(r"\d+ tokens, \d+\.\d\n", python(core, "-W", "error", "-c", USE, cwd=tmp_path))
    assert dist_mem(core, "generate", "runs/demo", "--prompt", "It was", "--tokens", "5", cwd=tmp_path).strip()


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="the network is cut by unshare, as root")
def test_setup_and_tests_pass_from_the_wheelhouse_with_the_network_cut(tmp_path: Path) -> None:
    """The wheelhouse is made with the options of pip here; the rest happens where there is no network at all."""
    clone, wheels = copy_project(tmp_path / "clone"), tmp_path / "wheelhouse"
    made = run("launch/wheelhouse.sh", str(wheels), cwd=clone, environment={**os.environ, "PYTHON": sys.executable})
    assert re.search(r"wheelhouse: \d+ wheels, ", made)
    run("sha256sum", "--check", "--quiet", "SHA256SUMS", cwd=wheels, environment=os.environ)

    environment = {
        **without_pip(os.environ),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
        "PIP_NO_CACHE_DIR": "1",
        "PYTEST_ADDOPTS": OFFLINE_TESTS,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    offline = ["unshare", "--net", "bash", "-euc"]
    cut = "ip link set lo up; if ip route get 1.1.1.1 2>/dev/null; then echo the network is there; exit 9; fi; "
    python = str(Path(sys.base_prefix) / "bin" / "python3")
    run(*offline, f'{cut} make setup PYTHON="$0"', python, cwd=clone, environment=environment)
    done = run(*offline, f"{cut} make test", cwd=clone, environment=environment)
    assert re.search(r"^\d+ passed", done, re.MULTILINE), done[-2000:]
    shutil.rmtree(tmp_path)  # gigabytes, which pytest would keep
