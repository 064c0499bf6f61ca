"""The commands of pages that the tests cannot run, each with the reason, and some with a cheaper check.

That the programs take the arguments of all of them, and that files and keys exist: tests/project/test_documentation.py.
"""

import re
import shlex
from collections.abc import Callable
from typing import NamedTuple

from tests.support.scaled_tree import Tree

IDLE = re.compile(r"^warning.* idle lane", re.MULTILINE)  # of plan.idle_work


def checked(*worlds: int) -> Callable[[Tree, str], None]:
    """`dist-mem train ... --check` for these numbers of ranks has no warning of idle ones."""

    def check(tree: Tree, command: str) -> None:
        words = shlex.split(command, comments=True)
        first = next(index for index, word in enumerate(words) if word.endswith(".yaml"))
        for world in worlds:
            reported = tree.must(f"dist-mem train {shlex.join(words[first:])} --check --world {world}")
            assert not IDLE.search(reported), reported

    return check


def without_last(tree: Tree, command: str) -> None:
    """All but the last of the commands run."""
    tree.must(command.rpartition(" && ")[0])


def sweep(tree: Tree, _: str) -> None:
    """Every line of the file is a configuration that leaves no rank idle."""
    lines = (tree.folder / "sweep.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 6
    for line in lines:
        checked(8)(tree, f"dist-mem train {line}")


def dry_run(tree: Tree, command: str) -> None:
    """The script can be made, for ranks of which none is idle."""
    reported = tree.must(f"{shlex.join(shlex.split(command, comments=True))} --dry-run")
    assert "#SBATCH" in reported
    assert not IDLE.search(reported), reported


class NotRun(NamedTuple):
    """What cannot run here."""

    page: str
    begins: str  # the command
    reason: str
    check: Callable[[Tree, str], None] = lambda tree, command: None


NOT_RUN = [
    *(
        NotRun(f"docs/{page}.md", f"dist-mem {command}", "a cluster; test_slurm_commands.py")
        for page in ("howto/cluster", "tutorials/own_cluster")
        for command in ("status", "logs", "cancel")
    ),
    NotRun("docs/howto/model_sizes.md", "dist-mem data build", "books for 32,000 pieces; own_corpus.md builds"),
    NotRun("docs/howto/model_sizes.md", "dist-mem launch", "that data; test_launch_script.py", dry_run),
    NotRun("docs/results/gpu.md", "bash benchmarks/gpu.sh", "a GPU; test_benchmarks.py"),
    NotRun("docs/results/arena.md", "dist-mem arena", "a day of two cores; tables.md runs a smaller one"),
    NotRun("docs/results/long_context.md", "dist-mem sweep", "hours of a core; pages of the tasks run small ones"),
    NotRun("docs/results/state_passing.md", "dist-mem data build pg19", "286 books of PG-19; test_build_pg19.py"),
    NotRun("docs/results/state_passing.md", "dist-mem arena", "3 hours of a core; tables.md runs a smaller one"),
    NotRun("README.md", "make demo", "4 to 8 minutes; `after_demo` runs its commands"),
    NotRun("README.md", "xdg-open", "a browser; test_page_browser.py clicks through the page"),
    NotRun("docs/start/install.md", "pip wheel", "test_wheelhouse.py"),
    NotRun("docs/start/install.md", "python3 -m venv", "test_wheelhouse.py"),
    NotRun("docs/start/install.md", ". env/bin/activate", "the environment is the one that the tests run in"),
    NotRun("docs/start/install.md", "pip install", "the network; test_wheelhouse.py"),
    NotRun("docs/howto/tracking.md", ".venv/bin/mlflow ui", "a server, which does not end"),
    NotRun("docs/howto/add_a_memory.md", "class State", "a sketch of the contract; the example beside it runs"),
    NotRun("docs/howto/dialogue.md", "dist-mem train configs/papers", "the weights of GPT-2"),
    NotRun("docs/howto/cluster.md", "torchrun --nnodes 2", "two nodes of 8 GPUs", checked(16)),
    NotRun("docs/howto/cluster.md", "srun", "two nodes of 8 GPUs", checked(16)),
    NotRun("docs/howto/cluster.md", "first=", "a cluster; test_slurm_commands.py"),
    NotRun("docs/howto/cluster.md", "dist-mem launch", "a cluster; test_slurm_commands.py"),
    NotRun("docs/howto/cluster.md", "deepspeed --hostfile", "two nodes of 8 GPUs", checked(16)),
    NotRun("docs/howto/data.md", "dist-mem train configs/pg19_small.yaml data.path=https:", "test_remote.py"),
    NotRun("docs/howto/data.md", "dist-mem train configs/pg19_small.yaml data.path=s3:", "test_remote.py"),
    NotRun("docs/howto/data.md", "dist-mem data verify https:", "test_remote.py"),
    NotRun("docs/howto/data.md", "dist-mem evaluate runs/pg19_small data.path=gs:", "test_remote.py"),
    NotRun("docs/howto/data.md", "dist-mem train configs/pg19_small.yaml data.stage=m", "/dev/shm; test_stage.py"),
    NotRun("docs/howto/doctor.md", "srun", "two nodes of 8 GPUs; see test_slurm_jobs.py"),
    NotRun("docs/howto/inspect.md", "dist-mem figure lamemo.fig6", "one layer has no alpha; test_figures.py"),
    NotRun("docs/howto/inspect.md", "dist-mem figure infinite.fig8", "may predict no word better; test_figures.py"),
    NotRun("docs/howto/lm_eval.md", ".venv/bin/pip install", "the network; CI has it"),
    NotRun("docs/howto/lm_eval.md", "dist-mem lm-eval runs/demo --tasks lambada", "the network"),
    NotRun(
        "docs/howto/lm_eval.md", "dist-mem lm-eval runs/demo --tasks niah", "the network, and the package wonderwords"
    ),
    *(
        NotRun("docs/howto/lm_eval.md", f"dist-mem lm-eval runs/demo --tasks {tasks}", "the network, or more packages")
        for tasks in ("babilong_longctx", "longbench,infinitebench")
    ),
    NotRun("docs/howto/offline.md", "bash launch/wheelhouse.sh", "test_wheelhouse.py"),
    NotRun("docs/howto/offline.md", "PIP_NO_INDEX=1", "needs the wheelhouse; test_wheelhouse.py"),
    NotRun("docs/howto/offline.md", "make test", "is what runs this"),
    NotRun("docs/howto/performance.md", "bash benchmarks/gpu.sh", "a GPU; test_benchmarks.py"),
    NotRun("docs/howto/tables.md", "dist-mem reproduce lamemo.table3 --scale small", "hours"),
    NotRun("docs/howto/tables.md", "dist-mem reproduce lamemo.table1 --scale paper", "days, on GPUs"),
    NotRun("docs/howto/babilong.md", "dist-mem data build babilong --out data/babi ", "bAbI's files and PG-19's"),
    NotRun("docs/howto/recall_tasks.md", "dist-mem sweep", "half an hour each; test_runner.py"),
    NotRun("docs/howto/tables.md", "dist-mem sweep configs/sweeps/rates.yaml --slurm", "a cluster; test_slurm_jobs.py"),
    NotRun("docs/howto/tracking.md", "MLFLOW_TRACKING_URI=", "a server, which does not end; test_serving.py"),
    NotRun("docs/howto/tracking.md", "curl", "test_serving.py asks the server and compares the answer"),
    NotRun("docs/tutorials/own_memory.md", "sed -i 's/last=x/last=x.d", "12 s; add_a_memory.md", without_last),
    NotRun("docs/tutorials/own_cluster.md", "srun", "two nodes; test_slurm_jobs.py"),
    NotRun("docs/tutorials/own_cluster.md", "dist-mem launch configs", "a cluster; test_slurm_jobs.py"),
    NotRun("launch/README.md", "sbatch --nodes=2 ", "a cluster; test_slurm_jobs.py", checked(16)),
    NotRun("launch/README.md", "sbatch --nodes=2-4", "a cluster; test_slurm_jobs.py", checked(16, 24, 32)),
    NotRun("launch/README.md", "dist-mem launch configs/demo.yaml", "a cluster; test_launch_script.py", dry_run),
    NotRun("launch/README.md", "sbatch --array", "a cluster; test_slurm_script.py", sweep),
]
