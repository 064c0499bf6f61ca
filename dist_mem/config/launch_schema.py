"""The keys of the Slurm job that `dist-mem launch` submits: the block `launch:` of schema.py, in the same form."""

from __future__ import annotations

from dataclasses import dataclass

from dist_mem.config.keys import key


@dataclass(frozen=True)
class LaunchConfig:
    nodes: str = "1"  # number, or range as 60-64
    gpus_per_node: str = "8"  # number, or type and number as a100:4; 0: train on CPUs; --gres in directives goes before
    tasks_per_node: int | None = key(None, at_least=1, at_most=4_096)  # ranks; None: one per GPU, or one on CPUs
    # cores of a rank; None: on GPUs an even share of what the job has on a node, on CPUs the cluster's default
    cpus_per_task: int | None = key(None, at_least=1, at_most=4_096)
    # of srun, as cores, rank_ldom or map_cpu:0,16; None: cores on CPUs, none on GPUs, where a rank binds itself
    cpu_bind: str | None = None
    memory: str | None = None  # of a node, as 64G; None: the cluster's default
    time: str = "24:00:00"  # of one start of the job
    partition: str | None = None  # None: the cluster's default; so for the next two
    account: str | None = None  # who pays
    qos: str | None = None  # quality of service
    dependency: str | None = None  # jobs that the first start waits for, as afterok:1234; in sbatch's form
    directives: list[str] = key([])  # more options of sbatch, each in full, as --constraint=a100
    # shell lines before training: module load, activate; the first command that fails ends the job
    setup: list[str] = key([], may_be_empty=True)
    env: list[str] = key([])  # NAME=VALUE, for all ranks; no secrets: the script contains them
    interface: str | None = None  # network interface for NCCL and gloo, as ib0; None: they choose
    # before the end of the time, when all ranks get the signal to stop and save
    signal_seconds: int = key(300, at_least=1, at_most=65_535)
    # how a job that has not finished continues
    restart: str = key("requeue", choices=("requeue", "resubmit", "chain", "none"))
    chain: int = key(10, at_least=1, at_most=10_000)  # jobs of a chain, one after another
    # starts without a new checkpoint after which the job is not started again
    max_stalled: int = key(3, at_least=1, at_most=10_000)
    snapshot: bool = True  # every start runs code and YAML as submitted, from a copy in the run directory
    exclude_failed: bool = False  # nodes that failed the preflight or hung are left out of the next start
    container: str = key("none", choices=("none", "apptainer", "pyxis"))  # what runs the ranks in an image
    # path of a .sif file; for pyxis also the name of an image
    image: str | None = key(None, is_path=True, is_expanded=True)
    # PATH or PATH:PATH_INSIDE, beside the folder of the job
    mounts: list[str] = key([], is_path=True, is_expanded=True)
