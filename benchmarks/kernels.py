"""Compile the Triton kernels of attention, compiled blocks and chunked memories for GPUs, on a machine without one.

    python benchmarks/kernels.py                                   # everything
    python benchmarks/kernels.py --cases attention titans          # some cases
    python benchmarks/kernels.py --list                            # names of cases

It needs torch's CUDA build with Triton, and a C++ compiler. Every kernel of forward and backward becomes machine code
for sm_90 (H100, H200); none is run, so this says nothing about results or time. The table has the registers of a
thread, the shared memory of a block, the bytes that a thread spills because registers are missing, and errors in one
line. A kernel with several choices of blocks, among which a GPU would measure, is compiled with each. The process exits
with 1 if anything could not be compiled. Shape letters: B lanes, T queries, J keys, H heads, K head width.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from lib.common import arguments_of, load, seconds
from lib.distance_cases import distance_kernels_of
from lib.memory_kernel_cases import memory_kernels_of
from lib.speed import configuration, memories
from lib.stand_in_gpu import Kernel
from lib.update_cases import update_kernels_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dist_mem.block import model_spec
from dist_mem.config import change_config
from dist_mem.memory.parts import basis, linear_rule, neural_backward, neural_memory
from dist_mem.model import MemoryLM
from dist_mem.nn.compilation import compile_ahead, compile_once
from dist_mem.nn.distance_attention import LAUNCHES
from dist_mem.nn.layers import DTYPES

Case = Callable[[argparse.Namespace], list[Kernel] | None]  # returns kernels that Inductor does not compile


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor without values that has a gradient."""
    return torch.empty(*shape, device="cuda", dtype=dtype, requires_grad=True)


def by_distance(arguments: argparse.Namespace) -> list[Kernel]:
    """Compile our own kernels, by the launches of heads up to this width."""
    width = min(width for _, width in LAUNCHES if width >= arguments.d_head)
    return [kernel for kernel in distance_kernels_of(width) if arguments.precision in kernel.blocks]


def of_memories(arguments: argparse.Namespace) -> list[Kernel]:
    """Compile the kernels by which memories read rows, signals and matrices, for heads of 64 or 128 numbers."""
    return list(memory_kernels_of(64 if arguments.d_head <= 64 else 128))


def delta_rule(tokens: linear_rule.RuleTokens, matrix: Tensor) -> tuple[Tensor, Tensor]:
    return linear_rule.chunked_rule(tokens, matrix, delta=True, chunk_len=64)


def linear_chunks(arguments: argparse.Namespace, *, vector: bool) -> None:
    """Compile the delta rule's chunks, with a decay per head or per row of the matrix."""
    shape, width = (arguments.lanes, arguments.num_heads, arguments.seg_len), arguments.d_head
    decay, value = rows(*shape, width if vector else 1), rows(*shape, 2 * width)
    tokens = linear_rule.RuleTokens(rows(*shape, width), rows(*shape, width), value, decay, rows(*shape))
    compile_once(delta_rule)(tokens, rows(*shape[:2], width, 2 * width))


def titans_chunks(arguments: argparse.Namespace) -> list[Kernel]:
    """Compile the functions of a chunk, and of a group of chunks, in which a network of two layers learns a segment.

    Inductor's kernels, and our own of its state.
    """
    lanes, width, chunk_len, every = arguments.lanes, arguments.d_model, 32, 4
    with torch.no_grad():
        query, key, value = (rows(lanes, arguments.seg_len, width) for _ in range(3))
        rates = (rows(lanes, arguments.seg_len) for _ in range(4))
        chunks = neural_backward.in_chunks(neural_memory.NeuralTokens(query, key, value, *rates), chunk_len)
        given = [*chunks, *(rows(lanes, width, width) for _ in range(4))]
        settings = neural_backward.LearningSettings(num_layers=2, every=every, max_gradient=1.0, tf32=True)
        read, _, *found = neural_backward.forward(given, *settings, keeps=True)
        neural_backward.backward(read, found[:2], [*given, *found[2:]], *settings)
    return list(update_kernels_of())


def block(model: nn.Module, arguments: argparse.Namespace) -> None:
    """Compile the model's blocks, as `train.compile` does at the start of a run."""
    tokens = torch.zeros(arguments.lanes, arguments.seg_len, dtype=torch.int64, device="cuda")
    lanes = torch.arange(arguments.lanes, device="cuda")
    valid_len = torch.full((arguments.lanes,), arguments.seg_len, device="cuda")
    state = model.init_state(lanes, "cuda", DTYPES[arguments.precision])  # type: ignore[operator]
    model(tokens, tokens, valid_len, state=state)


def cases(arguments: argparse.Namespace) -> dict[str, Case | dict[str, Any]]:
    """Return functions, and the memories of compiled blocks."""
    blocks = {f"block of {name}": memory for name, memory in memories(arguments.mem_len).items()}
    return {
        "attention by distance": by_distance,
        "rows, signals and matrices": of_memories,
        "chunks of gated_deltanet": partial(linear_chunks, vector=False),
        "chunks of linear, vector decay": partial(linear_chunks, vector=True),
        "chunks of titans": titans_chunks,
        **blocks,
    }


def compile_case(case: Case | dict[str, Any], arguments: argparse.Namespace, answer: Connection) -> None:
    """Compile one case and send its kernels; runs in a process of its own."""
    from lib.stand_in_gpu import compile_only, one_line

    logging.disable()  # Inductor logs the source of a kernel that fails
    found: list[Kernel] = []
    compile_only(found)
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
        try:
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            if isinstance(case, dict):
                config = configuration(case, arguments)
                config = change_config(config, {"train.compile": True})
                model = MemoryLM(model_spec(config, 1000)).to(DTYPES[arguments.precision])
                for key, fit in basis._SOLVED.items():  # by the model, on the CPU
                    basis._SOLVED[key] = basis.Fit(*(mode.from_tensor(part) for part in fit))
                case = partial(block, model)
            with mode, compile_ahead():
                if isinstance(case, partial) and case.args:
                    case.args[0].to_empty(device="cuda")
                found += case(arguments) or []
        except Exception as error:
            found.append(Kernel("(the graph)", "", error=one_line(error)))
        answer.send([kernel._asdict() for kernel in found])


def in_child(case: Case | dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the kernels of one case."""
    context = multiprocessing.get_context("fork")  # imports and stand-ins are shared, changes of torch's state are not
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=compile_case, args=(case, arguments, theirs))
    process.start()
    theirs.close()
    try:
        found: list[dict[str, Any]] = mine.recv()
    except EOFError:
        process.join()
        found = [{"name": "(the process)", "blocks": "", "error": f"it died, exit code {process.exitcode}"}]
    process.join()
    return found


def print_case(name: str, found: list[dict[str, Any]], took: float, *, summary: bool) -> None:
    """Print one row a kernel, then one for the case."""
    good, failed = ([kernel for kernel in found if bool(kernel["error"]) == bad] for bad in (False, True))
    for kernel in [] if summary else good:
        row = f"{kernel['registers']:>6}{kernel['shared']:>9}{kernel['spilled']:>9}"
        print(f"  {kernel['name']:<76}{row}  {kernel['blocks']}")
    for kernel in failed:
        print(f"  {kernel['name']} {kernel['blocks']}: {kernel['error']}")
    most = [max((kernel[part] for kernel in good), default=0) for part in ("registers", "shared", "spilled")]
    spilling = sum(kernel["spilled"] > 0 for kernel in good)
    numbers = f"{len({kernel['name'] for kernel in good}):>8}{len(good):>9}{most[0]:>6}{most[1]:>9}{most[2]:>9}"
    print(f"{name:<40}{numbers}{spilling:>9}{len(failed):>8}{took:>7.0f} s", flush=True)


def main() -> int:
    """Print the table, and write it as JSON if `--json` names a file; return 1 if anything failed."""
    sizes = {"num_layers": 1, "d_model": 768, "num_heads": 12, "d_head": 64, "d_inner": 3072}
    parser = arguments_of(__doc__, **sizes, seg_len=512, mem_len=512, lanes=8)
    parser.add_argument("--cases", nargs="+", metavar="WORD", help="cases whose name has one of these words")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--list", action="store_true", help="print the names of the cases only")
    parser.add_argument("--summary", action="store_true", help="one row a case, and errors")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    words = arguments.cases or [""]
    chosen = {name: case for name, case in cases(arguments).items() if any(word in name for word in words)}
    if arguments.list:
        print(*chosen, sep="\n")
        return 0
    if not torch.backends.cuda.is_built() or find_spec("triton") is None:
        sys.exit(f"torch {torch.__version__} has no CUDA or no Triton: install torch's CUDA build, no GPU is needed")
    if torch.cuda.is_available():
        sys.exit("this machine has a GPU, whose driver cannot be replaced: use benchmarks/gpu.sh")
    import triton
    from lib.stand_in_gpu import load_switch, stand_in_for_the_driver

    load_switch()
    stand_in_for_the_driver()
    import_module("torch._inductor.compile_fx")  # once, before the processes of the cases

    print(f"torch {torch.__version__}, triton {triton.__version__}, sm_90, {load()}, {time.strftime('%Y-%m-%d %H:%M')}")
    header = f"{'regs':>6}{'shared':>9}{'spilled':>9}"
    print(f"{'case':<40}{'kernels':>8}{'choices':>9}{header}{'spilling':>9}{'failed':>8}")
    records: dict[str, list[dict[str, Any]]] = {}
    for name, case in chosen.items():
        took = seconds(lambda: records.update({name: in_child(case, arguments)}))  # noqa: B023
        print_case(name, records[name], took, summary=arguments.summary)
        if arguments.json:
            arguments.json.write_text(json.dumps(records, indent=1), encoding="utf-8")
    return int(any(kernel["error"] for found in records.values() for kernel in found))


if __name__ == "__main__":
    sys.exit(main())
