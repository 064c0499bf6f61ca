"""A process of gpu_cases.py: import what every case needs, wait for one line of work, and do it.

The import takes up to 20 s. It is done while the case before is measured, on another core and without touching the GPU.
The line is JSON: {"arguments": [...], "output": FILE} runs `dist-mem ARGUMENTS` with its output in the file;
{"numbers": [NAME, ...], "device": ...} makes the cases of gpu_numbers.py, and prints one JSON line after each.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

from dist_mem.runtime.distributed import choose_accelerator

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


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
    if "numbers" in work:
        from lib.gpu_numbers import measure

        for name in work["numbers"]:
            print(json.dumps({"case": name, **measure(name, work["device"])}), flush=True)
        return
    output = os.open(work["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["dist-mem", *work["arguments"]]
    entry()


if __name__ == "__main__":
    main()
