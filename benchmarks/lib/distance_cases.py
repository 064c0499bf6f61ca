"""Our kernels of attention with scores by distance, compiled for sm_90 by their launches, without a GPU.

    python benchmarks/lib/distance_cases.py

prints registers, shared memory and spilled bytes of each; it needs Triton only, of any version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lib.stand_in_gpu import CAPABILITY, Kernel, compiled_kernel, log_registers

from dist_mem.nn import distance_kernels
from dist_mem.nn.distance_attention import LAUNCHES, TileLaunch

DTYPES = {2: "bf16", 4: "fp32"}  # by bytes of a number
_FLOAT32 = ("log_sum", "of_log_sum", "delta")
_NUMBERS = ("store_columns", "first", "above", "upto")
_STRIDES = ("_head", "_lane", "_row", "_column")
_MARKS = {"valid": "*u8", "sees": "*u8", "first_key": "*i32"}


def distance_kernels_of(*widths: int) -> Iterator[Kernel]:
    """Compile each kernel for each dtype and width, as Transformer-XL, LaMemo's memory rows and T5 take it."""
    log_registers()
    kernels = distance_kernels.forward, distance_kernels.backward_keys, distance_kernels.backward_queries
    for (itemsize, width), chosen in LAUNCHES.items():
        if width not in widths:
            continue
        for kernel, launch in zip(kernels, chosen, strict=True):
            for scalar in (False, True):
                for sees in (False, True) if "SEES" in kernel.arg_names else (False,):
                    yield compile_one(kernel, launch, width=width, dtype=DTYPES[itemsize], scalar=scalar, sees=sees)


def compile_one(kernel: Any, launch: TileLaunch, *, width: int, dtype: str, scalar: bool, sees: bool) -> Kernel:
    """Compile one kernel, as for tensors whose strides are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {
        **{"WIDTH": width, "PADDED": width, "SCALAR": scalar, "SEES": sees, "SIZE": launch.size},
        **{"PRECISION": "tf32x3", "r_width": 1},
    }
    types, values, multiples = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name], values[(place,)] = "constexpr", constants[name]
        elif name in _MARKS:
            types[name] = _MARKS[name]
        elif ("_" in name and not name.startswith("to_") and name not in _FLOAT32) or name in (
            "first",
            "above",
            "upto",
        ):
            types[name] = "i32"
        else:
            types[name] = "*fp32" if name in _FLOAT32 else f"*{dtype}"
        if types[name].startswith("*") or name.endswith(_STRIDES):
            multiples[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=multiples)
    target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    kind = f"{dtype}, K {width}{', scalar' if scalar else ''}{', sees' if sees else ''}"
    blocks = f"{kind}, size {launch.size}, {launch.warps} warps, {launch.stages} stages"
    return compiled_kernel(kernel.__name__, blocks, lambda: triton.compile(source, target=target, options=options))


if __name__ == "__main__":
    for found in distance_kernels_of(64, 128):
        print(
            f"{found.name:<18}{found.blocks:<48}{found.registers:>5}{found.shared:>8}{found.spilled:>6} {found.error}"
        )
