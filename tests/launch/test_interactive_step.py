"""Ranks in a shell of `srun --pty`, on a real Slurm: the shell is task 0 of a step whose other tasks have no shell."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.slurm_cluster import Cluster

pytestmark = pytest.mark.slurm
PRINT = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); from dist_mem.runtime.ranks import read_ranks; print(read_ranks())"
)


@pytest.mark.parametrize(
    ("started_by", "ranks"),
    [
        ("bash {}; true", {"(0, 1, 0, 1)"}),  # one process, whatever the number of tasks
        ("srun --overlap bash {}; true", {"(0, 2, 0, 1)", "(1, 2, 0, 1)"}),  # a step of its own
    ],
)
def test_interactive_shell_is_one_process_and_a_step_in_it_has_its_ranks(
    started_by: str, ranks: set[str], slurm: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "job.sh").write_text(f"{shlex.quote(sys.executable)} -c {shlex.quote(PRINT)}; true\n")
    shell = shlex.join(["bash", "-c", started_by.format(shlex.quote(str(tmp_path / "job.sh")))])
    step = f"srun --nodes=2 --ntasks-per-node=1 --pty {shell}"
    printed = slurm.call("script", "--quiet", "--return", "--command", step, "/dev/null")
    assert set(re.findall(r"\(\d+, \d+, \d+, \d+\)", printed)) == ranks, printed
