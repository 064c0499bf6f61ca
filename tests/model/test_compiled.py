"""Blocks that torch.compile has compiled: one graph a structure, the same bits, and no further compilation.

The graphs are run by torch's own kernels (`without_inductor`), so they must compute the bits of the blocks as written.
Inductor itself, whose kernels round differently, is tested in tests/training/test_compile.py.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from dist_mem.contract.subject import require_same, total_loss
from dist_mem.memory.base import detach_state
from dist_mem.model import LMOutput, MemoryLM
from dist_mem.nn.layers import Dropout
from tests.support.compiled_blocks import TRACED, forget_graphs, num_graphs, without_inductor
from tests.support.contract_cases import CASES, case_params, subject
from tests.support.paths import PACKAGE

pytestmark = TRACED


@pytest.fixture(autouse=True, scope="module")
def _without_inductor() -> Iterator[None]:
    with without_inductor():
        yield


def model_of(case: str, *, is_compiled: bool, recomputed: str = "none", layers: int = 3) -> MemoryLM:
    of_size = replace(subject(case), size=subject(case).size._replace(layers=layers))
    model = of_size.model(dropout=0.2, checkpointing=recomputed)
    for block in model.blocks:
        block.is_compiled = is_compiled
    return model


def train(case: str, model: MemoryLM) -> list[LMOutput]:
    """Read whole segments in training, then two ragged ones, with a backward after each."""
    torch.manual_seed(3)
    outputs, made = [], subject(case)
    for output in made.read(model):
        total_loss(output).backward()
        outputs.append(output)
    for tokens, targets in made.segments(1)[:2]:
        outputs.append(model(tokens, targets, made.ragged_lengths(), state=detach_state(outputs[-1].state)))
        total_loss(outputs[-1]).backward()
    return outputs


@pytest.mark.parametrize("case", case_params())
def test_a_compiled_block_is_one_graph_and_computes_the_same_bits(case: str) -> None:
    """`fullgraph=True` raises where a graph would break; sticky sampling takes the block's index, at first by value."""
    forget_graphs()
    written = model_of(case, is_compiled=False)
    model = model_of(case, is_compiled=True)
    expected, found = train(case, written), train(case, model)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.nll, other.nll)
        for name, loss in one.aux.items():
            assert torch.equal(loss, other.aux[name])
        require_same(other.state, one.state, "compiled blocks leave another state")
    for (name, one), two in zip(written.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-5, atol=1e-6, msg=name)  # sums in another order
    structures = {str(block) for block in model.blocks}
    # Blocks that print alike may still differ: the last refreshes or reads nothing further.
    assert num_graphs() <= max(2, len(structures) + ("sticky" in str(CASES[case])))


@pytest.mark.parametrize("case", case_params(["infinite, sticky", "lamemo"]))
def test_layers_share_graphs_and_no_segment_after_the_second_compiles(case: str) -> None:
    """Sticky sampling draws by the layer's index."""
    model, graphs = model_of(case, is_compiled=True, layers=6), num_graphs()
    outputs = subject(case).read(model)
    for _ in range(2):
        total_loss(next(outputs)).backward()
    after_two = num_graphs()
    assert after_two - graphs <= 2
    for output in outputs:
        total_loss(output).backward()
    assert num_graphs() == after_two


@pytest.mark.parametrize("recomputed", ["blocks", "attention", "feed_forward"])
def test_what_is_recomputed_is_compiled_too_and_draws_the_same_dropout(recomputed: str) -> None:
    expected = train("transformer_xl", model_of("transformer_xl", is_compiled=False))
    model = model_of("transformer_xl", is_compiled=True, recomputed=recomputed)
    found = train("transformer_xl", model)
    assert all(torch.equal(one.nll, two.nll) for one, two in zip(expected, found, strict=True))
    plain = model_of("transformer_xl", is_compiled=False, recomputed=recomputed)
    train("transformer_xl", plain)
    for one, two in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-5, atol=1e-6)


def test_without_gradient_blocks_run_as_written() -> None:
    model, graphs = model_of("transformer_xl", is_compiled=True), num_graphs()
    with torch.no_grad():
        list(subject("transformer_xl").read(model))
    assert num_graphs() == graphs


def test_dropout_draws_the_words_of_torchs_generator() -> None:
    """The operation that the compiler can trace draws what `random_` draws, four elements a word."""
    x, dropout = torch.ones(3, 7), Dropout(0.25)
    torch.manual_seed(5)
    words = torch.empty(6, dtype=torch.int64).random_(-(2**63), None)
    kept = words.view(torch.int16)[:21].view(3, 7) < 0.75 * 2**16 - 2**15
    torch.manual_seed(5)
    assert torch.equal(dropout(x), kept / 0.75)
    assert dropout.eval()(x) is x and Dropout(0.0)(x) is x


@pytest.mark.parametrize("folder", ["memory", "nn"])
def test_no_memory_or_layer_calls_replace(folder: str) -> None:
    """`_replace` of named tuples, which torch 2.11 compiles wrongly."""
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert files and not [path for path in files if "._replace(" in path.read_text(encoding="utf-8")]


def test_torchs_compiler_is_not_imported_with_a_model() -> None:
    """It takes a second, which `dist-mem train --check` must not spend."""
    code = "import sys, dist_mem.model; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
