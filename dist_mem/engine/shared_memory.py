"""Shared memory of DeepSpeed's CPU op: 66 MiB a rank in /dev/shm, which the op never removes."""

from __future__ import annotations

import os
from pathlib import Path

from dist_mem.runtime.environment import meeting_point

SHM = Path("/dev/shm")
BUFFER = "deepspeed_allreduce_buffer"  # prefix of the names


def drop_buffer_name(rank: int) -> None:
    """Unlink this rank's buffer; call it after all ranks have finished `start_communication`.

    The ranks keep the buffer mapped, and nothing is left behind when the job ends, however it ends.
    """
    address, port = meeting_point()
    (SHM / f"{BUFFER}_{os.getuid()}_{address}_{port}_{rank}").unlink(missing_ok=True)
