"""Our kernel of `rank_update`, compiled for sm_90 by its launch, without a GPU.

    python benchmarks/lib/update_cases.py

prints registers, shared memory and spilled bytes; it needs Triton only, of any version.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from lib.stand_in_gpu import CAPABILITY, Kernel, compiled_kernel, log_registers

from dist_mem.memory.parts.rank_update import LAUNCH
from dist_mem.memory.parts.update_kernels import update

STEPS = {"on": (1, 1), "back": (2, 3), "back, one layer": (2, 0)}  # pairs of rows and columns of each layer


def update_kernels_of() -> Iterator[Kernel]:
    """Compile the kernel for one layer and two, on and back, with products of TF32 and more exact ones."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    log_registers()
    target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)
    options = {"num_warps": LAUNCH.warps, "num_stages": LAUNCH.stages}
    for (name, counts), precision in product(STEPS.items(), ("tf32", "tf32x3")):
        constants = {
            **{"COUNTS": counts, "BACK": name != "on", "PRECISION": precision},
            **{"WIDTH": LAUNCH.width, "ROWS": LAUNCH.rows},
        }
        types, values, multiples = {}, {}, {}
        for place, argument in enumerate(update.arg_names):
            if argument in constants:
                types[argument], values[(place,)] = "constexpr", constants[argument]
                continue
            types[argument] = "i32" if argument.startswith(("inputs_", "outputs_", "num_")) else "*fp32"
            multiples[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=update, signature=types, constexprs=values, attrs=multiples)
        blocks = f"{name}, {precision}, {LAUNCH.warps} warps, {LAUNCH.stages} stages"
        make = lambda source=source: triton.compile(source, target=target, options=options)  # noqa: E731
        yield compiled_kernel("update", blocks, make)


if __name__ == "__main__":
    for found in update_kernels_of():
        print(f"{found.blocks:<44}{found.registers:>5}{found.shared:>8}{found.spilled:>6} {found.error}")
