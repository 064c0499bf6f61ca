"""Stand-ins for one GPU of compute capability 9.0: fake CUDA tensors are compiled to kernels that never run.

Inductor, Triton and ptxas are the real ones. Stand-ins replace what asks the driver: the device's properties (those of
an H100), its random state, streams and events, and the launch of a kernel. Graphs return tensors without values. They
change torch itself and cannot be undone: use a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import re
import subprocess
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from dist_mem.runtime.compilers import cpp_compiler

CAPABILITY = (9, 0)
MOST_SHARED = 232_448  # bytes that one block may use, 227 KiB; what asks for more cannot be launched
H100 = types.SimpleNamespace(
    name="stand-in for an H100", major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132, warp_size=32,
    regs_per_multiprocessor=65_536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=49_152, shared_memory_per_block_optin=MOST_SHARED,
    shared_memory_per_multiprocessor=233_472, total_memory=80 * 2**30, L2_cache_size=50 * 2**20,
)  # fmt: skip
META = {"device": "meta"}
# Autograd asks for streams and events of CUDA tensors and for the device's context: there is one stream, no context.
SWITCH = """
#include <ATen/detail/AcceleratorHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cstring>
namespace at { struct CUDAHooksInterface; namespace detail { const CUDAHooksInterface& getCUDAHooks(); } }
namespace {
const c10::Device device(c10::DeviceType::CUDA, 0);
struct Switch final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return device; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
} guard;
bool has_no_context(const void*, c10::DeviceIndex) { return false; }
const bool done = [] {
  c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, &guard);
  auto method = &at::AcceleratorHooksInterface::hasPrimaryContext;
  std::ptrdiff_t offset;  // of the method in its table, plus one, in the ABI of Linux
  std::memcpy(&offset, &method, sizeof offset);
  char* table = *reinterpret_cast<char* const*>(&at::detail::getCUDAHooks());
  auto slot = reinterpret_cast<void**>(table + offset - 1);
  auto size = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  auto page = reinterpret_cast<std::uintptr_t>(slot) & ~(size - 1);
  if (mprotect(reinterpret_cast<void*>(page), size, PROT_READ | PROT_WRITE)) return false;
  *slot = reinterpret_cast<void*>(has_no_context);
  return true;
}();
}
"""


class Kernel(NamedTuple):
    """A kernel that was compiled, or was not."""

    name: str
    blocks: str  # the sizes of its blocks, warps and stages
    registers: int = 0  # per thread
    shared: int = 0  # bytes per block
    spilled: int = 0  # bytes that a thread stores and loads again because registers are missing
    error: str = ""  # one line


def one_line(error: BaseException) -> str:
    """Return type and first lines of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).partition('Set TORCHDYNAMO_VERBOSE')[0].split())[:300]}"


def load_switch() -> None:
    """Compile the library that lets autograd trace CUDA tensors without a device, and load it."""
    torch_dir, compiler = Path(torch.__file__).parent, cpp_compiler()
    if compiler is None:
        raise SystemExit("no C++ compiler: apt-get install g++")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "switch.cpp", Path(folder) / "switch.so"
        source.write_text(SWITCH)
        paths = [f"-I{torch_dir / 'include'}", f"-L{torch_dir / 'lib'}", "-lc10", "-ltorch_cpu"]
        subprocess.run(
            [compiler, "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library), *paths], check=True
        )
        ctypes.CDLL(str(library))


def stand_in_for_the_driver() -> None:
    """Answer what torch, Inductor and Triton ask a driver; to be called before torch._dynamo is imported."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
        "get_device_properties": lambda device=None: H100,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "synchronize": lambda device=None: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_lazy_init": lambda: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.accelerator.is_available = lambda: False  # Dynamo would ask for its streams

    def properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": MOST_SHARED, "multiprocessor_count": H100.multi_processor_count}

    target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], H100.warp_size)
    for name, answer in {
        "__init__": lambda self: setattr(self, "utils", types.SimpleNamespace(get_device_properties=properties)),
        "get_current_target": lambda self: target,
        "get_current_device": lambda self: 0,
    }.items():
        setattr(CudaDriver, name, answer)
    log_registers()


def log_registers() -> None:
    """Let Triton compile every kernel, and print what ptxas says of it."""
    from triton import knobs

    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True


def compile_only(found: list[Kernel]) -> None:
    """Let Inductor compile kernels, add each to `found`, and launch none."""
    import torch._inductor.compile_fx as inductor
    import torch.nn.functional
    from torch._inductor import config
    from torch._inductor.fx_passes import fuse_attention as patterns
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._subclasses import fake_tensor

    def precompile(self: Any, *_: Any, **__: Any) -> None:
        found.extend(measured(self, choice) for choice in self.configs)

    def graph_without_values(graph: Any, inputs: Any, **options: Any) -> Callable[[list[Any]], list[Any]]:
        outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0]
        values = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in outputs]
        compile_graph(graph, inputs, **options)

        def run(arguments: list[Any]) -> list[Any]:
            arguments.clear()
            return [like(value) for value in values]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def with_replaced(name: str, replacement: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            with patch.object(torch, name, replacement):
                return function(*arguments, **options)

        return run

    def compile_whole(graph: Any, inputs: Any, inner_compile: Any = None, **options: Any) -> Any:
        return compile_all(graph, inputs, inner_compile=cast(Any, graph_without_values), **options)

    def fold_on_the_host(self: Any, *arguments: Any, **options: Any) -> Any:
        with OnHost():
            return fold(self, *arguments, **options)

    fold: Any = UniformValueConstantFolder.run
    compile_graph, compile_all, random = inductor.compile_fx_inner, inductor.compile_fx, torch.randn
    config.compile_threads = 1
    config.use_static_triton_launcher = False
    config.force_disable_caches = True
    # A fake tensor that has a value would be copied to the device.
    scalar = with_replaced("tensor", lambda value, **options: torch.full((), value, **options), patterns._sfdp_init)
    # Whether to pad a product follows from its shape, but Inductor makes tensors first, to measure if it does not.
    padded = with_replaced("randn", lambda *size, **options: random(*size, **options | META), pad_mm._should_pad)
    replacements: list[tuple[Any, str, Any]] = [
        (fake_tensor, "init_gpu_context", lambda device: None),
        (patterns, "_sfdp_init", scalar),
        (pad_mm, "_should_pad", padded),
        (UniformValueConstantFolder, "run", fold_on_the_host),
        (CachingAutotuner, "precompile", precompile),
        (inductor, "compile_fx", compile_whole),
        (torch.nn.functional, "scaled_dot_product_attention", fused_attention),
        (torch, "tensor", tensor_without_values),
    ]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)


class OnHost(TorchDispatchMode):
    """Computes on the CPU what is meant for the GPU: Inductor folds constants on the graph's device."""

    def __torch_dispatch__(self, function: Any, kinds: Any, arguments: Any = (), options: Any = None) -> Any:
        def moved(value: Any) -> Any:
            return torch.device("cpu") if isinstance(value, torch.device) else value

        return function(*tree_map(moved, arguments), **tree_map(moved, options or {}))


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *, is_causal: bool = False, scale: float
) -> Tensor:
    """Attend by the kernels that torch has for a GPU; without one, it chooses products and a softmax of all scores."""
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]
    scores = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, scores, True, scale=scale)[0]


_tensor = torch.tensor


def tensor_without_values(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    """Return a tensor as torch.tensor does, of which one on a GPU that is not there cannot be filled."""
    made = _tensor(data, **options)
    on_gpu = device is not None and torch.device(device).type == "cuda"
    return torch.empty(made.shape, dtype=made.dtype, device=device) if on_gpu else made


def like(value: Any) -> Any:
    """Return a tensor of the same shape, strides, type and device; what is no tensor as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def measured(tuner: Any, choice: Any) -> Kernel:
    """Compile a kernel of Inductor with one choice of its blocks."""
    sizes = [f"{name} {value}" for name, value in choice.kwargs.items() if isinstance(value, int)]
    blocks = ", ".join([*sizes, f"{choice.num_warps} warps", f"{choice.num_stages} stages"])
    return compiled_kernel(tuner.fn.__name__, blocks, lambda: tuner._precompile_config(choice).kernel)


def compiled_kernel(name: str, blocks: str, make: Callable[[], Any]) -> Kernel:
    """Return what the compiler's log says of the kernel that `make` compiles."""
    log = io.StringIO()
    try:
        with contextlib.redirect_stdout(log):
            binary = make()
        assert binary.asm["cubin"][:4] == b"\x7fELF"
        shared = binary.metadata.shared
        numbers = [re.findall(words, log.getvalue()) for words in (r"Used (\d+) registers", r"(\d+) bytes spill")]
        registers, spilled = max(map(int, numbers[0])), sum(map(int, numbers[1]))
    except Exception as error:
        return Kernel(name, blocks, error=one_line(error))
    over = f"{shared} bytes of shared memory, of {MOST_SHARED}" if shared > MOST_SHARED else ""
    return Kernel(name, blocks, registers, shared, spilled, over)
