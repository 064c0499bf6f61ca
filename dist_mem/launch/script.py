"""The batch script of a job: job.sh, filled in with the directives and the settings of a site."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path

from dist_mem.config.launch_schema import LaunchConfig
from dist_mem.launch import setup_lines
from dist_mem.launch.directives import gpus_of_gres, names, parse

_HEAD = """\
# Train on a Slurm cluster until it is done: through time limits, preemptions and dead nodes. See launch/README.md.
#
#   sbatch job.sbatch configs/pg19_small.yaml [more.yaml ...] [key=value ...]
#   sbatch --array=1-6 job.sbatch runs.txt      # one job per line, which is what `dist-mem train` takes
#
# `dist-mem launch SITE.yaml --script` made this script. Options of sbatch override its lines #SBATCH."""
_ARGUMENTS = """\
arguments=("$@") # of dist-mem train
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ] && [ "$restart" != chain ]; then # those of the task's line; quotes as in a shell
  line=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "$1")
  [ -n "$line" ] || { echo "error: $1 has no line $SLURM_ARRAY_TASK_ID" >&2; exit 2; }
  if ! words=$(xargs -n 1 printf '%s\\n' <<<"$line"); then
    echo "error: line $SLURM_ARRAY_TASK_ID of $1: close its quotes" >&2
    exit 2
  fi
  mapfile -t arguments <<<"$words"
fi"""

_PASSED = """\
passed() { # or the command before it has failed
  local code=$?
  [ "$code" = 0 ] && return
  say "error: launch.setup: exit code $code of: $1 (if it may fail, append: || true)"
  give_up 2
}"""


def render(
    launch: LaunchConfig,
    *,
    job_name: str,
    arguments: str | None = None,
    array: str | None = None,
    snapshot: Path | None = None,
) -> str:
    """Return the batch script.

    Args:
        launch: resolved, and checked by validation.py.
        arguments: of `dist-mem train`, quoted for a shell, for the script to contain; None: the script takes them, or
            in an array of jobs a file, and each job the arguments from its line of the file.
        array: tasks, as sbatch --array takes them; None: those of a chain, or none.
        snapshot: of code and configuration, made at the submission; None: the first start makes one.
    """
    if launch.restart == "chain":
        array = f"1-{launch.chain}%1"
    parts = {
        "header": [
            *([] if arguments else _HEAD.splitlines()),
            *_directives(launch, job_name, array),
            *_to_fill_in(launch),
        ],
        "site": list(_site(launch, snapshot)),
        "arguments": (_ARGUMENTS if arguments is None else f"arguments=({arguments}) # of dist-mem train").splitlines(),
    }
    template = files("dist_mem.launch").joinpath("job.sh").read_text(encoding="utf-8")
    return _fill(template, parts)


def _fill(template: str, parts: Mapping[str, list[str]]) -> str:
    """Return the template with each line `#@name` replaced by the lines of that part."""
    lines: list[str] = []
    for line in template.splitlines():
        lines += parts[line.removeprefix("#@")] if line.startswith("#@") else [line]
    return "\n".join(lines) + "\n"


def numbers_of_ranks(launch: LaunchConfig) -> list[int]:
    """Return the ranks of the whole job: one number, or the least and the most if `launch.nodes` is a range."""
    return [int(nodes) * ranks_per_node(launch) for nodes in dict.fromkeys(launch.nodes.split("-"))]


def ranks_per_node(launch: LaunchConfig) -> int:
    """Return the ranks that a job starts on each of its nodes."""
    return launch.tasks_per_node or num_gpus(launch) or 1


def num_gpus(launch: LaunchConfig) -> int:
    """Return the GPUs per node: those of a --gres among the directives, else `launch.gpus_per_node`."""
    gres = gpus_of_gres(launch.directives)
    return int(launch.gpus_per_node.rpartition(":")[2]) if gres is None else gres


def _cpu_bind(launch: LaunchConfig) -> str:
    """Return srun's --cpu-bind: on GPUs none, because Slurm numbers cores and GPUs independently (runtime/gpu.py)."""
    return launch.cpu_bind or ("none" if num_gpus(launch) else "cores")


def _directives(launch: LaunchConfig, job_name: str, array: str | None) -> Iterator[str]:
    options = {
        "job-name": job_name,
        "nodes": launch.nodes,
        "ntasks-per-node": ranks_per_node(launch),
        "gpus-per-node": launch.gpus_per_node if num_gpus(launch) and gpus_of_gres(launch.directives) is None else None,
        "cpus-per-task": launch.cpus_per_task,
        "mem": launch.memory,
        "time": launch.time,
        "partition": launch.partition,
        "account": launch.account,
        "qos": launch.qos,
        "signal": f"USR2@{launch.signal_seconds}",  # to the ranks; NCCL may catch USR1
        "open-mode": "append",
        "output": "%x-%j.log" if array is None else "%x-%A_%a.log",
        "array": array,
    }
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    requeue = "--requeue" if launch.restart == "requeue" else "--no-requeue"
    yield from (f"#SBATCH {option}" for option in (*given, requeue, *map(_as_job_sh_reads_it, launch.directives)))


def _as_job_sh_reads_it(directive: str) -> str:
    """Return an option for the script; of --exclude, which a resubmission adds nodes to, in one form."""
    name, value = parse(directive)
    return f"--exclude={value}" if name == "exclude" else directive


def _to_fill_in(launch: LaunchConfig) -> Iterator[str]:
    """Yield commented-out directives for options that many clusters require and that are not set."""
    options = {
        "partition=NAME": launch.partition,
        "account=NAME": launch.account,
        "cpus-per-task=NUMBER": launch.cpus_per_task,
        "mem=480G": launch.memory,
        "exclusive": "exclusive" in names(launch.directives) or None,
    }
    yield from (f"##SBATCH --{option}" for option, value in options.items() if value is None)


def _site(launch: LaunchConfig, snapshot: Path | None) -> Iterator[str]:
    """Yield shell lines: variables, modules, and what runs a command in the image."""
    yield f"restart=${{DIST_MEM_RESTART:-{launch.restart}}} # requeue | resubmit | chain | none"
    yield f"max_stalled={launch.max_stalled} # starts without a new checkpoint after which it is not started again"
    yield f"take_snapshot={'true' if launch.snapshot else 'false'} # of code and configuration, for all starts"
    # A resubmitted script also contains the path. It is resolved where the job runs, as the run directory is.
    yield "snapshot=" + ("" if snapshot is None else f"$(realpath {shlex.quote(str(snapshot))})")
    yield f"exclude_failed={'true' if launch.exclude_failed else 'false'}"
    yield f"cpu_bind={shlex.quote(_cpu_bind(launch))} # of srun"
    yield f"shares_cores={'true' if num_gpus(launch) else 'false'} # evenly among the ranks, without cpus-per-task"
    yield "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
    if not num_gpus(launch):
        yield "export DS_ACCELERATOR=cpu"
    if launch.interface:
        interface = shlex.quote(launch.interface)
        yield f"export NCCL_SOCKET_IFNAME={interface} GLOO_SOCKET_IFNAME={interface}"
    else:
        yield "# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0 # launch.interface, if ranks do not connect"
    if launch.env:
        yield from _with_names_unset(f"export {_in_shell(line)}" for line in launch.env)
    if launch.container == "none" and not launch.setup:
        yield "[ ! -x .venv/bin/dist-mem ] || PATH=$PWD/.venv/bin:$PATH # of make setup; for another: launch.setup"
    if launch.setup:
        yield from _PASSED.splitlines()
        yield "set +u # conda's scripts use variables that are not set"
        for command in setup_lines.commands(launch.setup):
            yield command
            if not re.match(r"\s*(#|$)", command):
                yield f"passed {shlex.quote(command)}"
        yield "set -u"
    yield from _with_names_unset(_container(launch)) if launch.image else _container(launch)


def _with_names_unset(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines in which a name that is not set is empty, as in PATH:$LD_LIBRARY_PATH."""
    yield "set +u # names that are not set are empty"
    yield from lines
    yield "set -u"


def _in_shell(text: str) -> str:
    """Return the text in double quotes, in which the shell expands only $NAME and ${NAME}."""
    return '"' + re.sub(r'[\\"`]|\$(?![A-Za-z_]|\{\w+\})', r"\\\g<0>", text) + '"'


def _container(launch: LaunchConfig) -> Iterator[str]:
    """Yield `in_image`: srun options, and the program that runs a rank; and `alone`: runs a command on this node."""
    image = _in_shell(launch.image or "")  # given with every container, by validation.py
    if launch.container == "apptainer":
        binds = "".join(f" --bind {_in_shell(mount)}" for mount in launch.mounts)
        gpus = " --nv" if num_gpus(launch) else ""
        yield f'in_image=(apptainer exec{gpus} --bind "$PWD" --pwd "$PWD"{binds} {image})'
        yield 'alone() { "${in_image[@]}" "$@"; }'
    elif launch.container == "pyxis":
        mounts = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in ("$PWD", *launch.mounts))
        options = (f"--container-image={launch.image}", f"--container-mounts={mounts}", "--container-workdir=$PWD")
        yield f"in_image=({' '.join(map(_in_shell, options))})"
        yield 'alone() { srun --export=ALL --nodes=1 --ntasks=1 --overlap "${in_image[@]}" "$@"; }'
    else:
        yield "in_image=() # in no container"
        yield 'alone() { "$@"; }'
