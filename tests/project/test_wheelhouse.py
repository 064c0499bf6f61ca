"""The wheelhouse: what a site without network installs; and that the project's own wheel is whole."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dist_mem.runtime.shipped import FOLDERS
from tests.support.paths import ROOT

# Few; DeepSpeed, which compiles its op anew there, and its launcher are among them.
OFFLINE_TESTS = "tests/config/test_config.py tests/model/test_model.py tests/launch/test_launch.py"


def without_pip(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with nothing in it that tells pip where packages are, or Python where modules are."""
    kept = {name: value for name, value in environment.items() if not name.startswith(("PIP_", "PYTHON"))}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


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


def copy_sources(target: Path) -> Path:
    """What the project's wheel is made of."""
    target.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, target)
    for name in ("dist_mem", *FOLDERS):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of the project, in a folder named as `git clone` names it."""
    pytest.importorskip("setuptools")
    return copy_sources(tmp_path / "dist_mem")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, made without network and installed in a folder of its own."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_sources(folder / "source")
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-input"]
    environment = {**without_pip(os.environ), "PIP_NO_INDEX": "1"}
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    run(*pip, "wheel", *options, str(source), cwd=folder, environment=environment)
    wheel = next(folder.glob("dist_mem-*.whl"))
    run(*pip, "install", "--no-deps", "--target", str(folder / "site"), str(wheel), cwd=folder, environment=environment)
    return folder / "site"


# An editable installation of the checkout would step in for what is missing; so all that was imported is looked at.
COMMAND = """
import sys
from dist_mem.__main__ import main
code = main(sys.argv[2:])
own = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "dist_mem"]
assert own and all(path.startswith(sys.argv[1]) for path in own), own
sys.exit(code)
"""


def dist_mem(installed: Path, *arguments: str, cwd: Path) -> str:
    """Output of `dist-mem` as installed."""
    command = [sys.executable, "-c", COMMAND, str(installed), *arguments]
    return run(*command, cwd=cwd, environment={**os.environ, "PYTHONPATH": str(installed)})


@pytest.mark.slow
def test_the_folder_that_contains_a_clone_does_not_hide_the_package(clone: Path) -> None:
    """Issue 15: Python imported the clone's own folder, also named dist_mem, as a namespace package.

    pip unpacks into site-packages what the build backend puts into the wheel of an editable installation.
    """
    site = clone.parent / "site"
    code = "import sys, setuptools.build_meta as backend; backend.build_editable(sys.argv[1])"
    isolated = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run(sys.executable, "-c", code, str(clone.parent), cwd=clone, environment=isolated)
    shutil.unpack_archive(next(clone.parent.glob("dist_mem-*editable*.whl")), site, "zip")
    code = "import site, sys; site.addsitedir(sys.argv[1]); import dist_mem as d; print(d.__file__, *d.__all__)"
    # -S: without the installation that runs this test.
    done = run(sys.executable, "-S", "-c", code, str(site), cwd=clone.parent, environment=isolated)
    path, *names = done.split()
    assert path == str(clone / "dist_mem" / "__init__.py")
    assert "load" in names


@pytest.mark.slow
def test_wheel_has_every_file_of_the_package(installed: Path) -> None:
    def files(folder: Path) -> set[str]:
        found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        return {str(path) for path in found if "__pycache__" not in path.parts}

    shipped = {f"shipped/{folder}/{name}" for folder in FOLDERS for name in files(ROOT / folder)}
    assert files(installed / "dist_mem") == files(ROOT / "dist_mem") | shipped


@pytest.mark.slow
def test_commands_of_the_wheel_need_nothing_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    script = dist_mem(installed, "launch", "train.steps=1", "--nodes", "2", "--dry-run", cwd=tmp_path)
    assert "#SBATCH --nodes=2\n" in script
    assert re.search(r"^ *srun .*--kill-on-bad-exit=1", script, re.MULTILINE)
    assert re.search(r"none keeps all \d+ rules", dist_mem(installed, "check-memory", "none", cwd=tmp_path))
    assert "\nlaunch:" in dist_mem(installed, "config", cwd=tmp_path)
    assert "train: 16 documents" in dist_mem(installed, "data", "build", "sample", "--size", "tiny", cwd=tmp_path)
    small = ["configs/demo.yaml", "memory/none.yaml", "train.steps=100"]
    assert "data/sample, train: 16 documents" in dist_mem(installed, "train", *small, "--check", cwd=tmp_path)
    assert "lamemo.table1 " in dist_mem(installed, "reproduce", cwd=tmp_path)
    (tmp_path / "one.yaml").write_text("name: one", encoding="utf-8")
    dist_mem(installed, "config", "one.yaml", "configs/demo.yaml", "--snapshot", "copy", cwd=tmp_path)
    copied = tmp_path / "copy" / "code" / "dist_mem" / "shipped" / "configs" / "demo.yaml"
    assert copied.read_bytes() == (ROOT / "configs" / "demo.yaml").read_bytes()


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
