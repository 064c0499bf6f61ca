"""The batch script as it is rendered: golden files, sites, wrong values; and that it passes its arguments on unchanged.

What it does after its ranks have ended is in test_slurm_script.py.
"""

import difflib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_mem.__main__ import main
from dist_mem.config import known_keys, load_config
from dist_mem.errors import EXIT_USAGE, UnusableError
from dist_mem.launch.submit import submit_array
from tests.support.messages import refused, said
from tests.support.paths import ROOT
from tests.support.slurm_cluster import Cluster

SITES = sorted((ROOT / "launch" / "sites").glob("*.yaml"))
CONFIG = "configs/pg19_small.yaml"
# The file -> what prints the script that begins like it. The rest is that of dist_mem/launch/job.sh.
GOLDEN = {
    f"tests/golden/launch/{site}.sbatch": f"{CONFIG} launch/sites/{site}.yaml --nodes 4 --dry-run"
    for site in ("apptainer", "pyxis", "chain")
}
# Everything a shell could take apart, glob or expand, within YAML's own quotes.
AWKWARD = """name=O'Brien's "big" run; touch gone & $(touch gone) `touch gone` *"""
Launch = Callable[..., str]
# Each is refused with its key, as are the others with that of the second table.
WRONG = [
    *("launch.nodes=8-4", "launch.nodes=0", "launch.time=43200", "launch.time=90", "launch.gpus_per_node=a100"),
    *("launch.dependency=afterok", "launch.dependency=afterok:1,afterany:2?singleton"),
    *("launch.dependency='afterok:1 --wrap=x'", "launch.signal_seconds=65536", "launch.account=my project"),
    *("launch.restart=requeu", "launch.gpus_per_nod=8"),
]
WRONG_TOGETHER = {
    "launch.env=[TOKEN]": "launch.env[0]",
    "launch.image=a.sif": "launch.container",
    "launch.container=pyxis": "launch.image",
    "launch.directives=[--time=1:00]": "launch.time",
    "launch.directives=[--gpus=4]": "launch.gpus_per_node",
    "launch.directives=[-G 4]": "launch.gpus_per_node",
    "launch.directives=[-d afterok:1]": "launch.dependency",
    "launch.directives=[--cpu-bind=cores]": "launch.cpu_bind",
}


@pytest.fixture
def rendered(capsys: pytest.CaptureFixture[str]) -> Launch:
    """Returns what `dist-mem launch` prints; it must print nothing else."""

    def launch(*arguments: str) -> str:
        assert main(["launch", *arguments]) == 0
        captured = capsys.readouterr()
        told = captured.err.splitlines()
        expected = ("warning: with ", "not in the script: ")  # of idle lanes, and of a dependency
        assert all(line.startswith(expected) for line in told)
        return captured.out

    return launch


def after_site(script: str, command: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run what a script does for its site, and then a command."""
    given = ["bash", "-c", script.partition("# ---- the job")[0] + command]
    environment["PATH"] = os.environ["PATH"]
    return subprocess.run(given, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    (tmp_path / "programs").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    monkeypatch.setitem(sys.modules, "dist_mem.training.run", None)  # training would fail
    return tmp_path / "programs"


def program(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("path", GOLDEN)
def test_script_begins_as_the_golden_one(path: str, monkeypatch: pytest.MonkeyPatch, rendered: Launch) -> None:
    monkeypatch.chdir(ROOT)
    golden = (ROOT / path).read_text(encoding="utf-8")
    script = rendered(*shlex.split(GOLDEN[path])).partition("number=$SLURM_JOB_ID\n")[0]
    difference = "".join(difflib.unified_diff(golden.splitlines(True), script.splitlines(True), path, "as rendered"))
    if difference:
        made_by = f"dist-mem launch {GOLDEN[path]} | sed '/^number=/,$d' >{path}"
        pytest.fail(f"{difference}\nif this is meant: {made_by}", pytrace=False)


def test_the_script_in_the_tree_is_the_command_s(monkeypatch: pytest.MonkeyPatch, rendered: Launch) -> None:
    monkeypatch.chdir(ROOT)
    path = ROOT / "launch" / "train.sbatch"
    made_by = "dist-mem launch launch/sites/generic.yaml --script > launch/train.sbatch"
    for arguments in (["launch/sites/generic.yaml", "--script"], ["--script"]):
        assert rendered(*arguments) == path.read_text(encoding="utf-8"), f"if this is meant: {made_by}"


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.stem)
def test_every_site_gives_a_sound_script(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rendered: Launch
) -> None:
    monkeypatch.chdir(ROOT)
    path = tmp_path / "job.sbatch"
    checkers = [["bash", "-n"], *([["shellcheck"]] if shutil.which("shellcheck") else [])]
    for command in ([CONFIG, str(site), "--dry-run"], [str(site), "--script"]):
        path.write_text(rendered(*command), encoding="utf-8")
        for checker in checkers:
            done = subprocess.run([*checker, path], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr


def test_generic_site_has_every_key_with_its_default() -> None:
    generic = load_config(["train.steps=1", str(ROOT / "launch" / "sites" / "generic.yaml")])
    assert generic == load_config(["train.steps=1"])
    text = (ROOT / "launch" / "sites" / "generic.yaml").read_text(encoding="utf-8")
    keys = [key.removeprefix("launch.") for key in known_keys() if key.startswith("launch.")]
    assert [key for key in keys if f"\n  {key}: " not in text] == []


@pytest.mark.parametrize(
    "value", ["afterok:1", "afterany:12:13_4", "after:1+30:2", "afterok:1,singleton", "afterok:1?afternotok:2"]
)
def test_dependency_of_slurms_grammar_is_taken_and_is_no_directive(value: str, rendered: Launch) -> None:
    script = rendered("train.steps=1", f"launch.dependency='{value}'", "--dry-run")
    assert not [line for line in script.splitlines() if line.startswith("#SBATCH") and value in line]


def test_dry_run_says_what_sbatch_is_given_beside_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SBATCH_TIMELIMIT", "5")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "failed_nodes").write_text("node7\n", encoding="utf-8")
    options = [f"run_dir={tmp_path}", "launch.dependency=afterok:1", "launch.exclude_failed=true", "--dry-run"]
    assert main(["launch", "train.steps=1", *options]) == 0
    output = capsys.readouterr().err
    assert "sbatch --dependency=afterok:1 --exclude=node7\n" in output
    assert "unset SBATCH_TIMELIMIT" in output
    assert "not passed" not in output


def test_array_cannot_be_a_chain(tmp_path: Path) -> None:
    config = load_config(["train.steps=1", "launch.restart=chain"])
    with refused(UnusableError, "launch.restart"):
        submit_array(
            tmp_path / "runs.txt", config.launch, num_tasks=2, at_once=None, name="sweep", make_snapshot=Path.mkdir
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("override", [*WRONG, *WRONG_TOGETHER])
def test_wrong_value_is_refused_with_its_key(
    override: str, programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "train.steps=1", f"run_dir={tmp_path / 'run'}", override]) == 2
    key = WRONG_TOGETHER.get(override, override.partition("=")[0])
    said(capsys.readouterr().err, "error: command line: launch.", key)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "asked", "num_ranks"),
    [
        (["--gpus-per-node", "a100:4"], "--gpus-per-node=a100:4", 4),
        (["launch.gpus_per_node=2"], "--gpus-per-node=2", 2),
        (["launch.directives=['--gres=gpu:a100:4']"], "--gres=gpu:a100:4", 4),
        (["launch.directives=['--gres=gpu:3,tmp:1G']", "launch.gpus_per_node=0"], "--gres=gpu:3,tmp:1G", 3),
        (["launch.directives=['--gres gpu']"], "--gres gpu", 1),
        (["launch.gpus_per_node=h100:4", "launch.tasks_per_node=2"], "--gpus-per-node=h100:4", 2),
    ],
)
def test_gpus_are_asked_for_once_typed_or_not(given: list[str], asked: str, num_ranks: int, rendered: Launch) -> None:
    """Slurm refuses --gpus-per-node beside --gres; some sites know only the latter."""
    script = rendered("train.steps=1", *given, "--dry-run")
    directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert [line for line in directives if line.startswith(("--gpus", "--gres"))] == [asked]
    assert f"--ntasks-per-node={num_ranks}" in directives
    assert "DS_ACCELERATOR" not in script


def test_dry_run_submits_nothing(tmp_path: Path, programs: Path, rendered: Launch) -> None:
    program(programs / "sbatch", f"#!/bin/sh\n: >{tmp_path}/submitted\n")
    script = rendered("train.steps=1", f"run_dir={tmp_path / 'run'}", "--nodes", "60-64", "--dry-run")
    assert "#SBATCH --nodes=60-64\n" in script
    assert sorted(path.name for path in tmp_path.iterdir()) == ["programs"]


def test_a_job_takes_every_argument_of_train(rendered: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    """The job script gives them to `dist-mem config` too."""
    script = rendered("train.steps=1", "--allow", "optimizer", "run_dir=mine", "--allow", "model.dropout", "--dry-run")
    line = next(line for line in script.splitlines() if line.startswith("arguments=("))
    arguments = shlex.split(line.removeprefix("arguments=(").partition(")")[0])
    assert arguments == ["train.steps=1", "run_dir=mine", "--allow=optimizer", "--allow=model.dropout"]
    assert main(["config", "--get", "run_dir", *arguments]) == 0
    assert capsys.readouterr().out == "mine\n"


def test_what_must_not_change_is_refused_before_a_job_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "train.steps=1", "--allow", "train.seed", "--dry-run"]) == 2
    said(capsys.readouterr().err, "--allow: train.seed")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["launch", "--script", "--dry-run"], "--dry-run"),
        (["launch", "--script", "--allow", "optimizer"], "--allow optimizer"),
        (["train", "train.steps=1", "--world", "4"], "--world 4"),
    ],
)
def test_option_without_effect_is_refused(
    arguments: list[str], named: str, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said(capsys.readouterr().err, named)


@pytest.mark.parametrize("command", [["launch"], ["train", "--check"]])
def test_file_that_stops_the_run_is_named_before_a_job_starts(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    assert main([*command, "train.steps=1", f"run_dir={tmp_path}/run", "preflight=false"]) == 2
    said(capsys.readouterr().err, tmp_path / "run" / "STOP")


@pytest.mark.parametrize("uri", ["htp://mlflow:5000", "http://[::1"])
@pytest.mark.parametrize("command", [["launch"], ["launch", "--dry-run"], ["train", "--check"]])
def test_a_store_that_every_start_refuses_is_named_before_a_job_starts(
    command: list[str], uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [f"run_dir={tmp_path}/run", "preflight=false", f"tracking.uri={uri}"]
    assert main([*command, "train.steps=1", *given]) == 2
    said(capsys.readouterr().err, "tracking.uri")


def test_own_files_are_looked_for_where_the_job_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["train.steps=1", f"run_dir={tmp_path}/run", "preflight=false", "tracking.sinks=[nosuch.py:Sink]"]
    assert main(["launch", *given]) == 2
    said(capsys.readouterr().err, "nosuch.py")
    assert main(["launch", *given, "--dry-run"]) == 0, "for another machine"


def test_without_sbatch_it_ends_with_2_and_trains_nothing(
    tmp_path: Path, programs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["train.steps=1", f"run_dir={tmp_path / 'run'}", f"data.path={tmp_path / 'none'}"]
    assert main(["launch", *settings]) == 2
    refusal = capsys.readouterr().err  # data is looked at on the login node
    said(refusal, tmp_path / "none" / "tokenizer.json", "--dry-run | sbatch")
    assert "preflight=false" not in refusal, "it would also turn off the job's own"
    assert main(["launch", *settings, "preflight=false"]) == 2
    captured = capsys.readouterr()
    said(captured.err, "sbatch")
    assert captured.out == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", ["launch.env=['TOKEN={}']", "launch.setup=['login {}']", "launch.partition={}"])
@pytest.mark.parametrize("how", ["${oc.env:SECRET}", "${oc.decode:${oc.env:SECRET}}", "${tracking.uri}"])
def test_nothing_of_the_environment_gets_into_a_script(
    where: str, how: str, monkeypatch: pytest.MonkeyPatch, rendered: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SECRET", "hidden")
    arguments = ["train.steps=1", "tracking.uri=${oc.env:SECRET}", "tracking.mlflow=false"]
    assert "hidden" not in rendered(*arguments, "--dry-run")
    assert main(["launch", *arguments, where.format(how), "--dry-run"]) == 2
    captured = capsys.readouterr()
    said(captured.err, where.partition("=")[0])
    assert "hidden" not in captured.out + captured.err


@pytest.mark.parametrize("container", ["apptainer", "pyxis"])
def test_shell_expands_names_in_a_site_and_nothing_else(container: str, tmp_path: Path, rendered: Launch) -> None:
    image = 'a "b" `touch gone` $(touch gone) \\ $1.sif'
    block = {"container": container, "image": image, "mounts": ["$LOCAL/my data:/data", "/scratch"]}
    block["env"] = ['TOKENS=$LOCAL/\\${LOCAL} "x" $(touch gone)', "NCCL_DEBUG=WARN"]
    (tmp_path / "site.yaml").write_text(json.dumps({"launch": block}), encoding="utf-8")
    script = rendered("train.steps=1", str(tmp_path / "site.yaml"), "--dry-run")
    shown = """printf '%s\\n' "$TOKENS" "$NCCL_DEBUG" "${in_image[@]}" """
    tokens, debug, *in_image = after_site(script, shown, tmp_path, LOCAL="/local").stdout.splitlines()
    assert tokens == '/local//local "x" $(touch gone)'
    assert debug == "WARN"
    here = str(tmp_path)
    assert (
        in_image
        == {
            "apptainer": [
                *("apptainer", "exec", "--nv", "--bind", here, "--pwd", here),
                *("--bind", "/local/my data:/data", "--bind", "/scratch", image),
            ],
            "pyxis": [
                f"--container-image={image}",
                f"--container-mounts={here}:{here},/local/my data:/data,/scratch:/scratch",
                f"--container-workdir={here}",
            ],
        }[container]
    )
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(
    ("given", "binding"),
    [([], "none"), (["launch.gpus_per_node=0"], "cores"), (["launch.cpu_bind='map_cpu:0,16'"], "map_cpu:0,16")],
)
def test_slurm_binds_ranks_to_cores_only_without_gpus_or_as_the_site_says(
    given: list[str], binding: str, rendered: Launch
) -> None:
    """Slurm numbers cores and GPUs independently: its cores for a rank may be next to the GPU of another one."""
    script = rendered("train.steps=1", *given, "--dry-run")
    assert f"\ncpu_bind={binding} " in script
    assert ' --cpu-bind="$cpu_bind" ' in script


# In place of dist-mem: writes the arguments of each process, a line of JSON in a file of its own, and the exit code.
TOLD = f"""#!{sys.executable}
import json, os, sys
name = sys.argv[1] + os.environ.get("SLURM_PROCID", "") if sys.argv[1] == "train" else sys.argv[1]
with open(os.environ["TOLD"] + "/" + name, "w") as file:
    json.dump(sys.argv[1:], file)
if name == "train0":
    with open(os.environ["TOLD"] + "/environment", "w") as file:
        json.dump(dict(os.environ), file)
    with open(os.environ["DIST_MEM_EXIT_CODE"], "w") as file:
        file.write("0")
print("run")
"""
# In place of Apptainer, which tests do not have: writes its arguments and executes what stands after the image.
APPTAINER = """#!/bin/bash
printf '%s\\n' "$@" >"$TOLD/apptainer-$$"
while [ "$1" != image.sif ]; do shift; done
shift
exec "$@"
"""


@pytest.fixture
def job(slurm: Cluster, tmp_path: Path) -> Path:
    """A folder to submit jobs from: stand-ins in bin/, their arguments in received/."""
    for name in ("bin", "received"):
        (tmp_path / name).mkdir()
    program(tmp_path / "bin" / "dist-mem", TOLD)
    program(tmp_path / "bin" / "apptainer", APPTAINER)
    (tmp_path / "my config.yaml").write_text(
        "train: {steps: 1}\npreflight: false\nlaunch: {snapshot: false, gpus_per_node: 0, tasks_per_node: 2}\n"
    )
    return tmp_path


def finish(slurm: Cluster, folder: Path, *command: str) -> str:
    """Run a command that submits a job, wait for its end, and return the command's output."""
    path = f"{folder / 'bin'}{os.pathsep}{slurm.environment['PATH']}"
    environment = {**slurm.environment, "PATH": path, "TOLD": str(folder / "received"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    number = done.stdout.split()[-1]
    state = slurm.wait_for_state(number, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    logs = "".join(log.read_text() for log in folder.glob("*.log"))
    assert state == "COMPLETED", logs
    return done.stderr


def received(folder: Path) -> dict[str, list[str]]:
    return {path.name: json.loads(path.read_text()) for path in (folder / "received").glob("[ct]*")}


@pytest.mark.slurm
def test_arguments_reach_every_rank_as_they_were_given(slurm: Cluster, job: Path) -> None:
    arguments = ["my config.yaml", AWKWARD, "train.epochs=null", "launch.nodes=2"]
    command = [sys.executable, "-m", "dist_mem", "launch", *arguments, "run_dir=run", "--time", "0:10:00"]
    assert "submitted: run/slurm/job.sbatch; its logs, one per node: run/slurm/" in finish(slurm, job, *command)
    arguments.append("run_dir=run")
    assert received(job) == {
        "config": ["config", "--get", "run_dir", *arguments],
        **{f"train{rank}": ["train", *arguments] for rank in range(4)},
    }
    assert not (job / "gone").exists()
    # Each rank looks for its own caches, on its own node (test_node_caches.py); the script sees only the first one.
    found = json.loads((job / "received" / "environment").read_text())
    assert not [path for path in found.values() if path.startswith(f"{found.get('DIST_MEM_CACHES', '/tmp')}/dist_mem")]


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("asked", "cores"),
    [
        (["launch.directives=[--exclusive]"], "2"),  # of nodes with four cores and two GPUs
        (["launch.directives=[--cpus-per-gpu=2]"], "2"),
        (["launch.cpus_per_task=1", "launch.directives=[--exclusive]"], "1"),
        ([], "1"),  # Slurm's default, a core per rank; the doctor warns
    ],
)
def test_rank_on_a_gpu_has_its_share_of_the_cores(asked: list[str], cores: str, slurm: Cluster, job: Path) -> None:
    gpus = ["launch.gpus_per_node=2", "launch.nodes=2", "run_dir=run", "launch.time='0:10:00'"]
    finish(slurm, job, sys.executable, "-m", "dist_mem", "launch", "my config.yaml", *gpus, *asked)
    assert sorted(received(job)) == ["config", *(f"train{rank}" for rank in range(4))]
    found = json.loads((job / "received" / "environment").read_text())
    assert found["SLURM_CPUS_PER_TASK"] == cores
    assert found["SLURM_GPUS_ON_NODE"] == "2"
    assert found["SLURM_CPU_BIND_TYPE"] == "none", "a rank binds itself to the cores next to its GPU"
    assert "/run/slurm/" in f"/{found['TORCH_FR_DUMP_TEMP_FILE']}"


@pytest.mark.slurm
def test_ranks_have_their_environment_where_sbatch_exports_none(slurm: Cluster, job: Path) -> None:
    """srun takes --export=NONE for itself too, from the environment that sbatch makes: ranks would have no PATH."""
    site = {"setup": [f"export PATH={job / 'bin'}:$PATH TOLD={job / 'received'}"], "directives": ["--export=NONE"]}
    (job / "site.yaml").write_text(json.dumps({"launch": site}))
    finish(slurm, job, sys.executable, "-m", "dist_mem", "launch", "my config.yaml", "site.yaml", "run_dir=run")
    assert received(job)["train0"][:2] == ["train", "my config.yaml"]


@pytest.mark.parametrize(
    ("given", "threads"), [({}, "1"), ({"SLURM_CPUS_PER_TASK": "6"}, "6"), ({"OMP_NUM_THREADS": "3"}, "3")]
)
def test_threads_that_the_user_has_set_stay(
    given: dict[str, str], threads: str, tmp_path: Path, rendered: Launch
) -> None:
    script = rendered("train.steps=1", "--dry-run")
    assert after_site(script, "echo $OMP_NUM_THREADS", tmp_path, **given).stdout.strip() == threads


@pytest.mark.slurm
def test_line_of_an_array_reaches_every_rank_with_its_quotes(slurm: Cluster, job: Path, rendered: Launch) -> None:
    script = rendered("--script", "launch.gpus_per_node=0", "launch.time='0:10:00'")
    (job / "job.sbatch").write_text(script)
    (job / "sweep.txt").write_text("'not this.yaml'\n'my config.yaml' \"name=a 'b' c\" train.seed=3 x=[1,\\ 2]\n")
    command = ["sbatch", "--parsable", "--array=2", "job.sbatch", "sweep.txt"]
    finish(slurm, job, *command)
    assert received(job)["train0"] == ["train", "my config.yaml", "name=a 'b' c", "train.seed=3", "x=[1, 2]"]


def test_a_line_of_an_array_whose_quote_has_no_end_is_refused(tmp_path: Path, rendered: Launch) -> None:
    """The words before it are another configuration, in another run directory."""
    (tmp_path / "job.sbatch").write_text(rendered("--script", "launch.gpus_per_node=0"), encoding="utf-8")
    (tmp_path / "runs.txt").write_text("a.yaml\nb.yaml data.path=/data/bob's/books name=b\n", encoding="utf-8")
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    command = ["bash", "job.sbatch", "runs.txt"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == EXIT_USAGE and "error: line 2 of runs.txt: close its quotes" in done.stderr, done


@pytest.mark.slurm
def test_every_command_of_an_apptainer_job_runs_in_the_image(slurm: Cluster, job: Path) -> None:
    site = ["launch.container=apptainer", "launch.image=image.sif", "launch.mounts=[/my data]", "launch.nodes=2"]
    finish(slurm, job, sys.executable, "-m", "dist_mem", "launch", "my config.yaml", "run_dir=run", *site)
    called = [path.read_text().splitlines() for path in (job / "received").glob("apptainer-*")]
    image = ["exec", "--bind", str(job), "--pwd", str(job), "--bind", "/my data", "image.sif", "dist-mem"]
    assert [call[: len(image)] for call in called] == [image] * 5, "the configuration, and four ranks"
    assert sorted(received(job)) == ["config", "train0", "train1", "train2", "train3"]


SCONTROL = """#!/bin/sh
case $2 in hostnames) echo localhost ;; *) echo "JobId=7 SubmitTime=$TIME EndTime=Unknown JobState=RUNNING X" ;; esac
"""


def test_a_restart_does_not_run_the_copy_of_another_run(tmp_path: Path, rendered: Launch) -> None:
    """Its first start has made no link, but a job of this number, of an earlier counter of Slurm, has left one."""
    script = rendered("train.steps=1", "launch.gpus_per_node=0", "launch.restart=none", "--script")
    (tmp_path / "job.sbatch").write_text(script, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "scontrol", SCONTROL)
    program(tmp_path / "bin" / "srun", '#!/bin/sh\necho "ranks of $DIST_MEM_SNAPSHOT, $PYTHONPATH"\n')
    config = '#!/bin/sh\n[ "$2" != --snapshot ] || mkdir -p "$3"\necho "$PWD/mine"\n'
    program(tmp_path / "bin" / "dist-mem", config)
    snapshot = tmp_path / "other" / "slurm" / "7" / "snapshot"
    snapshot.mkdir(parents=True)
    (tmp_path / ".dist_mem-7@a@earlier").symlink_to(snapshot)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "a", "SLURM_RESTART_COUNT": "1", "SLURM_JOB_NODELIST": "n"}
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TIME": "now", **slurm}
    done = subprocess.run(["bash", "job.sbatch"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert f".dist_mem-7@a@earlier is removed: it leads to the copy of another run, {snapshot}" in done.stdout
    own = tmp_path / "mine" / "slurm" / "7" / "snapshot"
    assert f"ranks of {own}, {own}/code\n" in done.stdout, done.stdout + done.stderr
    assert not list(tmp_path.glob(".dist_mem-*"))
