"""What runs under a real Slurm are started with."""

import os
import sys
from pathlib import Path
from typing import Any

from dist_mem.config import LaunchConfig
from dist_mem.runtime.environment import extension_cache
from tests.support.slurm_cluster import Cluster

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def launch_block(**changes: Any) -> Any:
    block = {"nodes": "2", "gpus_per_node": "0", "time": "0:20:00", "snapshot": False}
    return LaunchConfig(**{**block, **changes})


BIN = Path(sys.executable).parent


def path_of(slurm: Cluster) -> dict[str, str]:
    """The environment of sbatch: this installation, and where DeepSpeed's op is compiled already."""
    compiled = os.environ.get("TORCH_EXTENSIONS_DIR", str(extension_cache()))
    ranks = {"RANK": "0", "WORLD_SIZE": "1"}  # of the submitting shell, which must not count
    return {**ranks, "PATH": f"{BIN}{os.pathsep}{slurm.environment['PATH']}", "TORCH_EXTENSIONS_DIR": compiled}
