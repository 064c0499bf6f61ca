"""Our kernels of memories, compiled for sm_90 by their launches, without a GPU.

    python benchmarks/lib/memory_kernel_cases.py

prints registers, shared memory and spilled bytes of each; it needs Triton only, of any version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lib.stand_in_gpu import CAPABILITY, Kernel, compiled_kernel, log_registers

from dist_mem.memory.parts import fused_matrix, fused_rows, fused_signal, matrix_kernels, row_kernels, signal_kernels

BYTES = {"bf16": 2, "fp32": 4}
_FLOAT32 = (
    "gain", "share", "log_sum", "to_gain", "to_share", "mean", "variance", "centres", "squares", "to_mean",
    "to_variance", "matrix", "norm", "to_products", "to_sums", "new_matrix", "new_norm", "of_matrix", "of_norm",
    "to_matrix", "to_norm", "cosine", "sine",
)  # fmt: skip
_ROWS = (
    "q", "k", "v", "rows", "given", "made", "one", "other", "mixed", "to_q", "to_k", "to_v", "to_rows", "to_one",
    "to_other",
)  # fmt: skip
_OTHERS = {
    **{"marks": "*u8", "num_real": "*i64", "scale": "fp32", "sign": "fp32"},
    **dict.fromkeys(("found", "orders", "candidates", "candidate_orders"), "*i32"),
    **dict.fromkeys(_FLOAT32, "*fp32"),
}


def memory_kernels_of(width: int) -> Iterator[Kernel]:
    """Compile each kernel for heads of this width, in bf16 and in float32."""
    log_registers()
    for dtype, itemsize in BYTES.items():
        types = _OTHERS | dict.fromkeys(_ROWS, f"*{dtype}")
        yield from _row_kernels(width, types | {"k": "*fp32", "v": "*fp32"})  # stored rows
        size, warps = fused_signal.tile_of(itemsize, width)
        constants = {"WIDTH": width, "PADDED": width, "SIZE": size, "PRECISION": "tf32x3"}
        for kernel in (signal_kernels.read_signal, signal_kernels.backward_densities, signal_kernels.backward_values):
            yield compile_one(kernel, constants, types, warps, stages=2)
        types |= {"scale": "fp32", "of_mean": "*fp32", "of_variance": "*fp32"}
        for kernel in (signal_kernels.moments, signal_kernels.backward_asking, signal_kernels.backward_samples):
            yield compile_one(kernel, constants, types, warps, stages=1)
        appended = fused_signal.APPENDED
        sizes = {"SIZE": appended.size, "STEP": appended.step, "PRECISION": "tf32x3"}
        matrices = dict.fromkeys(("first", "new", "linear", "old", "signal", "given"), "*fp32") | {"mode": "*i32"}
        for kernel in (signal_kernels.append_rows, signal_kernels.append_backward):
            yield compile_one(kernel, sizes, types | matrices, appended.warps, stages=2)
        size, warps = fused_matrix.tile_of(width)
        constants |= {"SIZE": size}
        state, delta = {"STATE": True}, {"DELTA": True}
        for kernel, more in (
            (matrix_kernels.recall, {}),
            (matrix_kernels.recall_backward, state),
            (matrix_kernels.write, delta | {"COLUMNS": fused_matrix.COLUMNS}),
            (matrix_kernels.write_backward, delta | state),
            (matrix_kernels.of_state, {}),
        ):
            yield compile_one(kernel, constants | more, types, warps, stages=1)
        constants = {"WIDTH": width, "PADDED": width, "SIZE": fused_matrix.TURNED}
        yield compile_one(matrix_kernels.turn, constants, types, 4)


def _row_kernels(width: int, types: dict[str, str]) -> Iterator[Kernel]:
    search, padded = fused_rows.SEARCH, {"WIDTH": width, "PADDED": width}
    product = {"WIDTH": width, "STEP": search.step, "QUERIES": search.queries, "PRECISION": "tf32x3"}
    reading, warps = padded | {"ROWS": fused_rows.READ_ROWS, "LEAST": fused_rows.WRITTEN}, fused_rows.read_warps(width)
    yield compile_one(row_kernels.nearest, product | {"CHUNK": fused_rows.CHUNK}, types, search.warps)
    yield compile_one(row_kernels.nearest_of_buckets, product | {"CHUNK": 64}, types, 4)
    yield compile_one(row_kernels.read_rows, reading, types, warps)
    yield compile_one(row_kernels.read_backward, reading, types, warps)
    blocks = padded | {"SIZE": fused_rows.UNIT_ROWS}
    for kernel in (row_kernels.unit_rows, row_kernels.unit_rows_backward):
        yield compile_one(kernel, blocks | {"GAIN": True}, types, 4)
    for kernel in (row_kernels.mix, row_kernels.mix_backward):
        yield compile_one(kernel, blocks, types, 4)
    constants = {"QUERIES": search.queries, "CHUNK": fused_rows.CHUNK}
    yield compile_one(row_kernels.nearest_of_parts, constants, types, search.warps)


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
