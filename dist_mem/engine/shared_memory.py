"""The shared memory of DeepSpeed's CPU op: 66 MiB a rank in /dev/shm, which the op itself never removes."""

from __future__ import annotations

import os
from pathlib import Path

from dist_mem.runtime.environment import meeting_point

SHM = Path("/dev/shm")
BUFFER = "deepspeed_allreduce_buffer"  # how the names begin


def drop_buffer_name(rank: int) -> None:
    """Unlink this rank's buffer, once all ranks have been through `start_communication`: they keep it mapped.

    So nothing stays behind when the job ends, however it ends.
    """
    address, port = meeting_point()
    (SHM / f"{BUFFER}_{os.getuid()}_{address}_{port}_{rank}").unlink(missing_ok=True)
