"""`dist-mem launch`: write the batch script of a job and submit it to Slurm.

dist-mem launch configs/pg19_small.yaml launch/sites/generic.yaml --nodes 4 --time 12:00:00
dist-mem launch configs/pg19_small.yaml --dry-run          # the script, and nothing is submitted
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dist_mem.errors import EXIT_DONE, UnusableError
from dist_mem.launch.script import render
from dist_mem.launch.validation import check
from dist_mem.runtime.files import write_text


def run(config: Any, arguments: Sequence[str], *, dry_run: bool) -> int:
    """Submit a job that trains `config`. Returns the exit code of the process.

    Args:
        config: resolved, of `arguments`, which the ranks will read again.

    Raises:
        UnusableError: the script cannot be made or submitted; nothing is ever trained here instead.
    """
    check(config)
    script = render(config.launch, job_name=_job_name(config.name), arguments=shlex.join(arguments))
    if dry_run:
        print(script, end="")
        return EXIT_DONE
    if shutil.which("sbatch") is None:
        raise UnusableError(
            "launch: there is no sbatch here; use a login node of the cluster, or --dry-run for the script"
        )
    path = Path(config.run_dir) / "slurm" / "job.sbatch"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, script)
    except OSError as error:
        raise UnusableError(f"run_dir {config.run_dir} cannot be used: {error}") from error
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise UnusableError(f"sbatch refuses {path} (exit code {done.returncode}): {said}")
    job = done.stdout.partition(";")[0].strip()  # after it comes the cluster, where there are several
    print(f"job {job} submitted: {path}; its logs, one a node: {path.parent}/{job}", file=sys.stderr)
    print(job)
    return EXIT_DONE


def show_script(config: Any, *, kind: str) -> int:
    """Print the script that takes its arguments from sbatch: launch/train.sbatch, launch/array.sbatch."""
    check(config)
    print(render(config.launch, job_name="dist_mem", kind=kind), end="")
    return EXIT_DONE


def _job_name(name: str) -> str:
    """The name of the run, without what Slurm would take apart."""
    return re.sub(r"[^\w.+-]+", "_", name)
