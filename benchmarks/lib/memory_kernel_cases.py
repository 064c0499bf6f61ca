"""Our kernels of memories, compiled for sm_90 by their launches, without a GPU.

    python benchmarks/lib/memory_kernel_cases.py

prints registers, shared memory and spilled bytes of each; it needs Triton only, of any version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lib.stand_in_gpu import CAPABILITY, Kernel, compiled_kernel, log_registers

from dist_mem.memory.parts import fused_rows, row_kernels

_INTEGERS = {"marks": "*u8", **dict.fromkeys(("found", "orders", "candidates", "candidate_orders"), "*i32")}
_FLOAT32 = ("gain", "share", "log_sum", "to_gain", "to_share")
_STORED = ("k", "v")
_ROWS = (
    "q", "rows", "given", "made", "one", "other", "mixed", "to_q", "to_rows", "to_one", "to_other",
)  # fmt: skip


def memory_kernels_of(width: int) -> Iterator[Kernel]:
    """Compile each kernel for heads of this width, in bf16 with stored rows in float32, and in float32 alone."""
    log_registers()
    search, padded = fused_rows.SEARCH, {"WIDTH": width, "PADDED": width}
    product = {"WIDTH": width, "STEP": search.step, "QUERIES": search.queries, "PRECISION": "tf32x3"}
    reading = padded | {"ROWS": fused_rows.READ_ROWS, "LEAST": fused_rows.WRITTEN}
    sizes = {"SIZE": fused_rows.UNIT_ROWS}
    read_warps = fused_rows.read_warps(width)
    for dtype in ("bf16", "fp32"):
        types = _INTEGERS | dict.fromkeys(_FLOAT32, "*fp32") | dict.fromkeys(_STORED, "*fp32")
        types |= dict.fromkeys(_ROWS, f"*{dtype}")
        yield compile_one(row_kernels.nearest, product | {"CHUNK": fused_rows.CHUNK}, types, search.warps)
        yield compile_one(row_kernels.nearest_of_buckets, product | {"CHUNK": 64}, types, 4)
        yield compile_one(row_kernels.read, reading, types, read_warps)
        yield compile_one(row_kernels.read_backward, reading, types, read_warps)
        for kernel in (row_kernels.unit_rows, row_kernels.unit_rows_backward):
            yield compile_one(kernel, padded | sizes | {"GAIN": True}, types, 4)
        for kernel in (row_kernels.mix, row_kernels.mix_backward):
            yield compile_one(kernel, padded | sizes, types, 4)
    constants = {"QUERIES": search.queries, "CHUNK": fused_rows.CHUNK}
    yield compile_one(row_kernels.nearest_of_parts, constants, _INTEGERS, search.warps)


def compile_one(kernel: Any, constants: dict[str, Any], types: dict[str, str], warps: int, stages: int = 3) -> Kernel:
    """Compile one kernel, as for tensors whose strides are multiples of 16; arguments without a type are integers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, values, multiples = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(place,)] = "constexpr", constants[name]
        else:
            signature[name] = types.get(name, "i32")
            if signature[name].startswith("*") or name.endswith(("_head", "_lane", "_row")):
                multiples[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=multiples)
    target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)
    options = {"num_warps": warps, "num_stages": stages}
    blocks = ", ".join(f"{name} {value}" for name, value in constants.items()) + f", {warps} warps"
    return compiled_kernel(kernel.__name__, blocks, lambda: triton.compile(source, target=target, options=options))


if __name__ == "__main__":
    for width in (64, 128):
        for found in memory_kernels_of(width):
            print(
                f"{found.name:<20}{found.registers:>5}{found.shared:>8}{found.spilled:>6} {found.blocks} {found.error}"
            )
