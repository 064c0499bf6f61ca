"""flash-linear-attention's kernels, computed by Triton's interpreter, have the results of our recurrence in float64.

The interpreter takes a copy of the package in which a loop's index, there a number of Python, is cast by a function.
"""

import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from dist_mem.memory import convert_options, linear
from dist_mem.memory.linear import LinearMemory, LinearState
from dist_mem.memory.parts import linear_check, linear_kernels
from dist_mem.memory.parts.linear_rule import recurrent_rule
from dist_mem.nn.attention import BackEndChoice
from dist_mem.nn.kernel_shapes import LAUNCHED
from dist_mem.nn.layers import initialize
from tests.support.own_process import in_new_child
from tests.support.paths import ROOT
from tests.support.published import layer_spec

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it has no macOS wheels"),
    pytest.mark.skipif(find_spec("fla") is None, reason="fla-core is not installed: pip install 'dist-mem[fla]'"),
]
RULES = [(delta, by_row) for delta in (True, False) for by_row in (False, True)]
SEG_LEN, LENGTHS = 66, [66, 0, 33]  # more than a chunk; a whole segment, an idle lane, short ones


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of fla that the interpreter can run."""
    spec = find_spec("fla")
    assert spec is not None and spec.origin is not None
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(Path(spec.origin).parent, folder / "fla", ignore=shutil.ignore_patterns("__pycache__"))
    for file in folder.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        file.write_text(re.sub(r"\b([a-z_0-9]+)\.to\(tl\.int64\)", r"tl.cast(\1, tl.int64)", text), encoding="utf-8")
    return folder


@pytest.fixture
def interpreted(site: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that calls another in a process where fla's kernels are interpreted."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return lambda function, *arguments: in_new_child(in_site, site, function, *arguments)


def in_site(site: Path, function: Callable[..., None], *arguments: Any) -> None:
    sys.path.insert(0, str(site))
    function(*arguments)


def linear_presets() -> dict[str, dict[str, Any]]:
    """Return the `memory` block of every file whose memory is linear."""
    blocks: dict[str, Any] = {
        path.stem: OmegaConf.to_container(OmegaConf.load(path).memory)
        for path in (ROOT / "configs" / "memory").glob("*.yaml")
    }
    return {name: block for name, block in blocks.items() if block.get("kind") == "linear"}


def layer_of(block: dict[str, Any], dtype: torch.dtype) -> LinearMemory:
    """Return a layer with larger weights than initial ones, always the same."""
    spec = layer_spec(d_model=12, num_heads=2, d_head=6, seg_len=SEG_LEN, norm="pre")
    layer = LinearMemory(spec, convert_options(block)[1])
    torch.manual_seed(0)
    initialize(layer, std=0.5)
    layer.reset_parameters()
    return layer.to(dtype)


def results(layer: LinearMemory, dtype: torch.dtype, run: Callable[..., Any]) -> dict[str, Tensor]:
    """Return outputs and new state, and the gradients of a fixed function of them, of lanes that hold something."""
    torch.manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()

    x = drawn(len(LENGTHS), SEG_LEN, 12)
    state = LinearState(*(drawn(*part.shape) for part in layer.init_state(torch.arange(len(x)), "cpu", dtype)[:2]))
    output = run(layer, x, state, torch.tensor(LENGTHS))
    found = {"y": output.y, "matrix": output.state.matrix, "tail": output.state.tail}
    weights = {
        name: torch.cos(torch.arange(part.numel(), dtype=dtype)).view(part.shape) for name, part in found.items()
    }
    loss = torch.stack([(part * weights[name]).sum() for name, part in found.items()]).sum()
    leaves = {"x": x, "matrix": state.matrix, "tail": state.tail, **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    given = {f"gradient of {name}": one for name, one in zip(leaves, gradients, strict=True) if one is not None}
    return {**found, "query": output.query, "kept": output.logs["kept"], **given}


@contextmanager
def forced_to_kernels() -> Iterator[None]:
    """Let `memory.kernels: fla` compute on this CPU, and PyTorch token by token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_check, "choose", lambda kernels, *given, **sizes: BackEndChoice(kernels, ""))
        patch.setattr(linear, "chunked_rule", lambda *given, chunk_len, **rest: recurrent_rule(*given, **rest))
        yield


def compare_block(block: dict[str, Any]) -> None:
    with forced_to_kernels():
        exact, kernels = ({**block, "kernels": kernels} for kernels in ("torch", "fla"))
        expected = results(layer_of(exact, torch.float64), torch.float64, LinearMemory.__call__)
        found = results(layer_of(kernels, torch.float32), torch.float32, LinearMemory.__call__)
    assert found.keys() == expected.keys()
    for part, wanted in expected.items():
        scale = float(wanted.abs().max()) if wanted.numel() else 0.0
        assert (found[part] - wanted).abs().le(1e-4 * scale).all(), part


def test_linear_presets_are_found() -> None:
    assert {"retnet", "mamba2", "gla", "deltanet", "gated_deltanet", "kda"} <= linear_presets().keys()


@pytest.mark.parametrize("preset", sorted(linear_presets()))
def test_every_preset_has_the_results_of_the_recurrence(interpreted: Callable[..., None], preset: str) -> None:
    """Outputs, state and gradients, also of the state, of whole, short and idle lanes."""
    interpreted(compare_block, linear_presets()[preset])


def compare_compiled(block: dict[str, Any]) -> None:
    with forced_to_kernels():
        layer = layer_of({**block, "kernels": "fla"}, torch.float32)
        run = torch.compile(LinearMemory.__call__, fullgraph=True, backend="aot_eager")
        found = results(layer, torch.float32, run)
        for part, wanted in results(layer, torch.float32, LinearMemory.__call__).items():
            assert torch.equal(found[part], wanted), part


def test_a_compiled_block_keeps_the_operators_and_has_the_same_bits(interpreted: Callable[..., None]) -> None:
    """So bits are equal from run to run too."""
    interpreted(compare_compiled, linear_presets()["gated_deltanet"])


def check_operators() -> None:
    """Compare what an operator returns with its shapes for plans, and the kernels it launches with the planned ones."""
    from triton.runtime.interpreter import GridExecutor

    launched: list[int] = []
    call = GridExecutor.__call__

    def counted(self: Any, *given: Any, **named: Any) -> Any:
        tensors = [one for one in (*given, *named.values()) if isinstance(one, Tensor)]
        if self.fn.__name__ != "compute_dh0_kernel":  # which reads a few rows of its tensors
            launched.append(sum(one.numel() * one.element_size() for one in tensors))
        return call(self, *given, **named)

    GridExecutor.__call__ = counted

    def check(name: str, *given: Any) -> Any:
        operator = getattr(torch.ops.dist_mem, name)
        launched.clear()
        found = operator(*given)
        if name in LAUNCHED:
            planned = Counter(LAUNCHED[name](*given).num_bytes)
            assert not Counter(launched) - planned, (name, launched, planned)
            assert (planned - Counter(launched)).total() <= 6, name  # of torch: zeros, and sums of gradients
        torch.library.opcheck(operator.default, given, test_utils=("test_schema", "test_faketensor"))
        return found

    lanes, heads, d_key, d_value = 1, 2, 16, 32

    def drawn(*shape: int) -> Tensor:
        return torch.randn(lanes, *shape)

    for delta, by_row in RULES:
        decay = -drawn(SEG_LEN, heads, *([d_key] if by_row else [])).abs()
        beta = drawn(SEG_LEN, heads).sigmoid() if delta else None
        query, key, value = (drawn(SEG_LEN, heads, width) for width in (d_key, d_key, d_value))
        given = (query, key, value, decay, beta, drawn(heads, d_key, d_value))
        read, new, *kept = check("linear_rule", *given, 1.0)
        check("linear_rule_backward", read, new, *given, *kept, 1.0)
    unit, factors = check("fla_unit_rows", drawn(SEG_LEN, heads, d_key))
    check("fla_unit_rows_backward", unit, unit, factors)
    norm = (drawn(SEG_LEN, heads, d_value), drawn(SEG_LEN, heads, d_value), torch.randn(d_value))
    gated, factors = check("gated_norm", *norm, 1e-6, True)
    check("gated_norm_backward", gated, *norm, factors, 1e-6, True)
    widths = [16, 16, 32]
    convolution = (drawn(SEG_LEN, sum(widths)), drawn(3, sum(widths)), torch.randn(sum(widths), 4))
    parts = check("linear_convolution", *convolution, widths, True)
    check("linear_convolution_backward", *parts, *convolution, True)
    assert all(len(tuner.configs) == 1 for tuner in linear_kernels._tuners())


def test_operators_return_and_launch_what_is_planned(interpreted: Callable[..., None]) -> None:
    interpreted(check_operators)


def check_the_check() -> None:
    for delta, by_row in RULES:
        assert linear_check.differs("cpu", torch.float16, 16, 32, delta=delta, by_row=by_row) is None
    linear_kernels.spreads_decays = lambda: True  # type: ignore[assignment]
    for delta in (True, False):
        assert linear_check.differs("cpu", torch.float32, 16, 32, delta=delta, by_row=False) is None
    backward = linear_kernels.fla().chunk_kda_bwd

    def wrong(**given: Any) -> tuple[Any, ...]:
        to_query, to_key, *rest = backward(**given)
        return to_query, 1.1 * to_key, *rest

    linear_kernels.fla().chunk_kda_bwd = wrong
    said = linear_check.differs("cpu", torch.float32, 16, 32, delta=True, by_row=True)
    assert said and re.match(
        r"the gradient of the keys of .* kernel is -?[\d.]+ on .* recurrence's is -?[\d.]+ \(", said
    )


def test_the_check_at_the_start_accepts_right_kernels_and_names_a_wrong_one(interpreted: Callable[..., None]) -> None:
    """Also with decays per head given as decays per row, as for compilers that are wrong on Hopper."""
    interpreted(check_the_check)
