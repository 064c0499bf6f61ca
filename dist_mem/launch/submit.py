"""`dist-mem launch`: write the batch script of a job and submit it to Slurm.

dist-mem launch configs/pg19_small.yaml launch/sites/generic.yaml --nodes 4 --time 12:00:00
dist-mem launch configs/pg19_small.yaml --dry-run          # print the script, submit nothing
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dist_mem.config import Config
from dist_mem.config.launch_schema import LaunchConfig
from dist_mem.errors import EXIT_DONE, UnfitError, UnusableError, run_error
from dist_mem.launch import queue, slurm
from dist_mem.launch.directives import names, option, other_folder
from dist_mem.launch.script import render
from dist_mem.runtime.files import free_name, write_text
from dist_mem.runtime.slurm_variables import Submission, environment_of_sbatch

# final, as for job.sh; the last three are of an option that sbatch does not know or understand
_REFUSED = re.compile("not available|nvalid|denied|permi|disabled|policy|limit|unrecognized|ambiguous|an argument")


def run(config: Config, arguments: Sequence[str], *, dry_run: bool, make_snapshot: Callable[[Path], None]) -> int:
    """Submit a job that trains `config`, and return the exit code of the process.

    Args:
        config: resolved from `arguments`, which the ranks read again; `validation.check` accepts it.
        make_snapshot: copies code and configuration into a folder that does not exist yet.

    Raises:
        UnusableError: the script cannot be made, or sbatch refuses it; this command never trains here instead.
        RunError: the run directory cannot be written.
        UnfitError: Slurm does not answer.
    """
    for line in _environment_lines(config.launch, by_hand=dry_run):
        print(line, file=sys.stderr)

    def script(snapshot: Path | None = None) -> str:
        launch, name = config.launch, _job_name(config.name)
        return render(launch, job_name=name, arguments=shlex.join(arguments), snapshot=snapshot)

    failed = queue.read_failed_nodes(Path(config.run_dir)) if config.launch.exclude_failed else []
    if dry_run:
        _show(script(), _options(config.launch, failed))
        return EXIT_DONE
    _require_sbatch(", or --dry-run for the script")
    folder = Path(config.run_dir) / "slurm"
    path = folder / "job.sbatch"
    if failed:
        list_of_them = folder / "failed_nodes"
        print(f"without {', '.join(failed)}: repair these nodes and delete {list_of_them}", file=sys.stderr)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stalled").unlink(missing_ok=True)  # job.sh counts starts without progress from here
        snapshot = _copy_here(config.launch, folder, make_snapshot)
        write_text(path, script(snapshot))
    except OSError as error:
        raise run_error(error, f"run_dir {config.run_dir} cannot be used: {error}") from error
    answer = _submit(path, config.launch, snapshot, failed=failed)
    job, cluster = _read_number(answer, path)
    print(f"job {job} submitted: {path}; its logs, one per node: {folder}/{job}", file=sys.stderr)
    print(job)
    try:
        queue.record(Path(config.run_dir), job, cluster or slurm.cluster())
    except (OSError, UnfitError, UnusableError) as error:
        print(f"warning: {error}; {folder.parent} learns of job {job} when it starts", file=sys.stderr)
    return EXIT_DONE


def _copy_here(launch: LaunchConfig, folder: Path, make_snapshot: Callable[[Path], None]) -> Path | None:
    """Return a copy for all starts if this process sees the job's code and folders; else its first start makes one."""
    if not launch.snapshot or launch.container != "none" or "chdir" in names(launch.directives):
        return None
    snapshot = free_name(folder / "snapshot")
    make_snapshot(snapshot)
    return snapshot


def has_own_environment(launch: LaunchConfig) -> bool:
    """Return whether jobs have other packages than this machine: a container's, or those that `launch.setup` brings."""
    return launch.container != "none" or bool(launch.setup)


def submit_array(
    runs: Path,
    launch: LaunchConfig,
    *,
    num_tasks: int,
    at_once: int | None,
    name: str,
    make_snapshot: Callable[[Path], None],
) -> int:
    """Submit one job for each line of a file, which is what `dist-mem train` takes, and return the exit code.

    Args:
        runs: the file; its tasks read it whenever they start, so nobody may change it.
        launch: accepted by `validation.check`.
        at_once: tasks at the same time; None: no bound.
        make_snapshot: as `run`, of the configurations of all lines.

    Raises:
        UnusableError, UnfitError: as `run`; or `launch.restart` is chain, or the tasks would start in another folder.
    """
    if (folder := other_folder(launch.directives)) is not None:
        raise UnusableError(f"launch.directives has --chdir={folder}: leave it out, and give this command in {folder}")
    if launch.restart == "chain":
        raise UnusableError("launch.restart is chain, which an array of jobs cannot be; use requeue or resubmit")
    _require_sbatch()
    for line in _environment_lines(launch):
        print(line, file=sys.stderr)
    path = runs.with_suffix(".sbatch")
    tasks = f"1-{num_tasks}{'' if at_once is None else f'%{at_once}'}"
    snapshot = _copy_here(launch, path.parent, make_snapshot)
    write_text(path, render(launch, job_name=_job_name(name), array=tasks, snapshot=snapshot))
    job, _ = _read_number(_submit(path, launch, snapshot, arguments=[str(runs.resolve())]), path)
    print(f"job {job} submitted, {num_tasks} tasks: {runs}", file=sys.stderr)
    print(job)
    return EXIT_DONE


def _require_sbatch(otherwise: str = "") -> None:
    if shutil.which("sbatch") is None:
        raise UnusableError(f"launch: there is no sbatch here; use a login node of the cluster{otherwise}")


def _submit(
    path: Path,
    launch: LaunchConfig,
    snapshot: Path | None,
    *,
    arguments: Sequence[str] = (),
    failed: Sequence[str] = (),
) -> str:
    """Submit the script with its own arguments, and without failed nodes, and return the answer of sbatch.

    Args:
        snapshot: removed if sbatch fails.
    """
    done = subprocess.run(
        ["sbatch", "--parsable", *_options(launch, failed), str(path), *arguments],
        capture_output=True, text=True, check=False, env=_environment(launch).environment,
    )  # fmt: skip
    if done.returncode:
        if snapshot is not None:
            shutil.rmtree(snapshot, ignore_errors=True)
        output = (done.stderr or done.stdout).strip()
        if not _REFUSED.search(output):
            raise UnfitError(f"sbatch of {path} failed (exit code {done.returncode}): {output}; try again")
        raise UnusableError(f"sbatch refuses {path} (exit code {done.returncode}): {output}")
    return done.stdout


def _options(launch: LaunchConfig, failed: Sequence[str] = ()) -> list[str]:
    """Return the options of this submission only: a requeue or resubmission must not wait again."""
    options = [] if launch.dependency is None else [f"--dependency={launch.dependency}"]
    if failed:  # this option takes the place of the script's
        options.append(f"--exclude={','.join([*failed, *filter(None, [option(launch.directives, 'exclude')])])}")
    return options


def _read_number(answer: str, path: Path) -> tuple[str, str]:
    """Return the number that sbatch has given a job, and its cluster if sbatch names one; a site's may say more."""
    found = re.findall(r"^(\d+)(?:;(\S+))?\s*$", answer, re.MULTILINE)
    if not found:
        kept = f"squeue shows whether the job is queued; what it runs stays in {path.parent}"
        raise UnfitError(f"sbatch of {path} answers {answer.strip()!r}, without the number of a job; {kept}")
    number, cluster = found[-1]
    return number, cluster


def _environment(launch: LaunchConfig) -> Submission:
    keys = [name for name in ("partition", "account", "qos") if getattr(launch, name) is not None]
    return environment_of_sbatch({*keys, *names(launch.directives)})


def _environment_lines(launch: LaunchConfig, *, by_hand: bool = False) -> Iterator[str]:
    """Yield what variables of this shell do to a job that `launch` describes, or if users give it to sbatch."""
    found = _environment(launch)
    for kind, name in found.passed_on.items():
        way = f"launch.{kind}=..." if hasattr(launch, kind) else f"launch.directives=[--{kind}=...]"
        yield f"{name} of the environment sets --{kind} of the job; {way} goes before it"
    if found.left_out:
        variables = f"{', '.join(found.left_out)} of the environment"
        where = "launch.* and launch.directives say what a job is"
        taken = f"unset {' '.join(found.left_out)} first: sbatch would take {variables} before the script"
        yield f"warning: {taken if by_hand else f'not passed to sbatch: {variables}; {where}'}"


def show_script(launch: LaunchConfig) -> int:
    """Print the script that takes its arguments from sbatch, for one job or for an array of them."""
    _show(render(launch, job_name="dist_mem"), _options(launch))
    return EXIT_DONE


def _show(script: str, options: Sequence[str]) -> None:
    """Print a script, and to the user the options of sbatch that are not in it."""
    print(script, end="")
    if options:
        print(f"not in the script: submit it with sbatch {shlex.join(options)}", file=sys.stderr)


def _job_name(name: str) -> str:
    """Return the name of the run, without characters at which Slurm would split it."""
    return re.sub(r"[^\w.+-]+", "_", name)
