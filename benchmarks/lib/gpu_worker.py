"""A process of gpu_cases.py: import what every case needs, wait for one line of work, and do it.

The import takes up to 20 s. It is done while the case before is measured, on another core and without touching the GPU.
The line is JSON: {"arguments": [...], "output": FILE} runs `dist-mem ARGUMENTS` with its output in the file, with
"over_gloo" as a rank of several on one GPU; {"cases": [NAME, ...], "device": ..., "tiny": ...} measures these cases in
this process, and prints one JSON line after each.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from typing import Any

from dist_mem.runtime.distributed import choose_accelerator

_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_DEVICE_IS_LOST = ("CUDA error", "device-side assert", "illegal memory access")


def main() -> None:
    """Import, wait, work; end when the benchmark is killed, so that no endless training is left on the GPU."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    choose_accelerator()
    import dist_mem.evaluation.evaluate
    import dist_mem.training.run  # noqa: F401
    from dist_mem.__main__ import entry

    line = sys.stdin.readline()
    if not line:  # no case is left
        return
    work = json.loads(line)
    if "cases" in work:
        measure_all(work)
        return
    if work.get("over_gloo"):
        join_over_gloo()
    output = os.open(work["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["dist-mem", *work["arguments"]]
    entry()


def measure_all(work: dict[str, Any]) -> None:
    """Measure the cases and print each result; what else is printed goes to the errors."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in work["cases"]:
        try:
            result = measure(name, work["device"], tiny=work["tiny"], micro_lanes=work.get("micro_lanes"))
        except Exception as error:
            text = traceback.format_exc()
            is_full = "OutOfMemory" in type(error).__name__
            result = {"status": "out of memory" if is_full else "failed", "output": text[-1500:]}
        print(json.dumps({"case": name, **result}), file=answers, flush=True)
        if any(words in result.get("output", "") for words in _DEVICE_IS_LOST):
            os._exit(1)  # nothing more can be computed in this process; the next cases have a new one


def measure(name: str, device: str, *, tiny: bool, micro_lanes: int | None) -> dict[str, Any]:
    """Measure a case by the module of the first word of its name."""
    from lib import gpu_kernels, gpu_numbers, gpu_peers, gpu_training

    kind = name.partition(" ")[0]
    if kind in ("memory", "attention"):
        return gpu_numbers.measure(name, device)
    if kind == "speed":
        return gpu_training.measure(name, tiny=tiny, micro_lanes=micro_lanes)
    return {"kernel": gpu_kernels, "peer": gpu_peers}[kind].measure(name, device, tiny=tiny)


def join_over_gloo() -> None:
    """Let `initialize` join this rank by gloo: NCCL refuses two ranks on one GPU."""
    import torch.distributed as dist

    join = dist.init_process_group

    def over_gloo(backend: str, **options: Any) -> None:
        join("gloo", **{**options, "device_id": None})

    setattr(dist, "init_process_group", over_gloo)  # noqa: B010


if __name__ == "__main__":
    main()
