"""FLOPs counted on meta tensors: equal to what torch counts in real steps, and to arithmetic without this code."""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from dist_mem.block import model_spec
from dist_mem.config import AdaptiveConfig, Config, change_config
from dist_mem.engine.optimizer import freeze
from dist_mem.estimate.counting import FlopCounter, Flops, NotCountedError, flops_per_token, operations_per_token
from dist_mem.model import MemoryLM
from dist_mem.nn.convolution import convolve
from tests.support.contract_cases import CASES, subject
from tests.support.counted_flops import check_small, torchs_count
from tests.support.messages import refused
from tests.support.paths import ROOT
from tests.support.tiny import tiny_config

REALISTIC = {
    "model": {"num_layers": 3, "d_model": 96, "num_heads": 4, "d_head": 20, "d_inner": 256, "dropout": 0.1},
    "train": {"seg_len": 48},
}
REALISTIC_CASES: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "transformer_xl": {"kind": "transformer_xl", "mem_len": 100},
    "compressive": {"kind": "compressive", "mem_len": 96, "cmem_len": 40, "compression_rate": 5},
    "lamemo": {"kind": "lamemo", "mem_len": 110},
    "block_recurrent": {"kind": "block_recurrent", "num_states": 20, "window": 16},
    "block_recurrent, lstm": {"kind": "block_recurrent", "num_states": 20, "gate": "lstm", "cell": "dual"},
    "infinite": {"kind": "infinite", "num_basis": 64, "num_samples": 80, "sampling": "sticky"},
    "infinite, moments": {"kind": "infinite", "num_basis": 64, "num_samples": 80, "density": "softmax_moments"},
    "infinite, gibbs": {"kind": "infinite", "num_basis": 64, "num_samples": 80, "density": "gibbs"},
    "infinite, no gate": {"kind": "infinite", "num_basis": 64, "gate": False},
    "infinite over lamemo": {"kind": "infinite", "num_basis": 64, "over": {"kind": "lamemo", "mem_len": 96}},
}
VOCAB = 512
OUTSIDE = {"kind": f"{ROOT}/examples/averages.py:Averages", "num_means": 2}
BRANCHES = """
from dist_mem.memory.transformer_xl import TransformerXL

class Branches(TransformerXL):
    def forward(self, x, state, valid_len):
        return super().forward(x if valid_len.sum().item() else 0 * x, state, valid_len)
"""


def realistic(memory: dict[str, Any], **model_keys: Any) -> Any:
    config = tiny_config(REALISTIC, {"model": model_keys})
    return change_config(config, {"memory": memory})


@pytest.mark.parametrize(("case", "norm"), list(product(CASES, ["pre", "post"])))
def test_the_count_equals_torchs_of_real_steps(case: str, norm: str) -> None:
    check_small(subject(case, norm))


def check_realistic(config: Config) -> None:
    assert flops_per_token(model_spec(config, VOCAB), num_lanes=1) == torchs_count(
        MemoryLM(model_spec(config, VOCAB)), 1, 48
    )


@pytest.mark.parametrize("case", REALISTIC_CASES)
def test_the_count_equals_torchs_at_other_widths(case: str) -> None:
    check_realistic(realistic(REALISTIC_CASES[case]))


def test_an_adaptive_vocabulary_counts_its_first_bin_and_a_memory_from_outside_is_counted_too() -> None:
    check_realistic(realistic({"kind": "none"}, adaptive=AdaptiveConfig([100, 300], div_val=2)))
    check_realistic(realistic(OUTSIDE))


def test_a_memory_that_branches_on_data_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BRANCHES, encoding="utf-8")
    with refused(NotCountedError, "memory.kind", "mine.py"):
        flops_per_token(model_spec(realistic({"kind": f"{tmp_path}/mine.py:Branches"}), VOCAB))


@pytest.mark.parametrize(("kind", "mem_len"), [("none", 0), ("transformer_xl", 100)])
def test_the_count_equals_plain_arithmetic(kind: str, mem_len: int) -> None:
    """Multiplications a token: weights met once a row, rows of the memory too, and three passes over the keys."""
    memory = {"kind": kind} | ({"mem_len": mem_len} if mem_len else {})
    per_row, keys_values, seg_len, num_keys = 4 * 96 * 80 + 2 * 96 * 256, 2 * 96 * 80, 48, 48 + mem_len
    layer = per_row + keys_values * mem_len / seg_len + 3 * num_keys * 80 + 96 * 80 * num_keys / seg_len
    found = flops_per_token(model_spec(realistic(memory), VOCAB), num_lanes=1)
    assert found.scoring == pytest.approx(2 * (3 * layer + 96 * VOCAB), rel=5e-3)
    assert 2.7 < found.training / found.scoring <= 3


def memory_of(path: Path) -> Any:
    return OmegaConf.to_container(OmegaConf.load(path).memory)


LINEAR = {
    path.stem: block
    for path in sorted((ROOT / "configs" / "memory").glob("*.yaml"))
    if isinstance(block := memory_of(path), dict) and block["kind"] == "linear"
}


def test_gradients_of_frozen_weights_are_not_counted() -> None:
    """Nor of rows below the first trained weight: with frozen blocks the output layer has the only two products."""
    config = realistic({"kind": "none"})

    def count(frozen: str) -> Flops:
        groups = [{"param_regex": frozen, "trainable": False}]
        return flops_per_token(model_spec(change_config(config, {"optimizer.groups": groups}), VOCAB))

    everything, feed_forward, blocks = count("^$"), count("feed_forward"), count("^(embedding|blocks)")
    assert everything.training - feed_forward.training == 3 * 2 * (2 * 96 * 256)
    assert blocks.training - blocks.scoring == 2 * (2 * 96 * VOCAB)
    assert everything.scoring == feed_forward.scoring == blocks.scoring


@pytest.mark.parametrize("frozen", [r"^blocks\.2\.", r"^(?!blocks\.3\.)", "^(?!embedding)"])
def test_blocks_that_are_frozen_differently_are_counted_one_by_one(frozen: str) -> None:
    groups = [{"param_regex": frozen, "trainable": False}]
    config = change_config(realistic({"kind": "none"}, num_layers=4), {"optimizer.groups": groups})
    model = MemoryLM(model_spec(config, VOCAB))
    freeze(model, config.optimizer.groups)
    assert flops_per_token(model_spec(config, VOCAB), num_lanes=1) == torchs_count(model, 1, 48)


@pytest.mark.parametrize("preset", LINEAR)
def test_the_count_of_linear_memories_equals_plain_arithmetic(preset: str) -> None:
    """A token writes S and reads it, and meets C tokens: their keys, and what they write; by the delta rule twice."""
    config = realistic({**LINEAR[preset], "chunk_len": 16})
    memory: Any = MemoryLM(model_spec(config, VOCAB)).memories()[0]
    weights = sum(part.numel() for name, part in memory.named_parameters() if part.dim() == 2 and name != "taps")
    matrix, keys, values = memory.d_key * memory.d_value, 16 * memory.d_key, 16 * memory.d_value
    rule = 2 * matrix + keys + values + (matrix + keys if memory.options.delta else 0)
    layer = weights + 4 * rule + 2 * 96 * 256
    assert flops_per_token(model_spec(config, VOCAB), num_lanes=1).scoring == 2 * (3 * layer + 96 * VOCAB)


@pytest.mark.parametrize("preset", LINEAR)
def test_short_convolutions_and_triangular_systems_are_counted(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of k rows k products and k - 1 sums; in row i of a system of C tokens i products and as many sums."""
    block = {**LINEAR[preset], "chunk_len": 16}

    def scoring(**keys: Any) -> int:
        return operations_per_token(model_spec(realistic({**block, **keys}), VOCAB), num_lanes=1).all.scoring

    memory: Any = MemoryLM(model_spec(realistic(block), VOCAB)).memories()[0]
    kernel, num_layers = memory.options.kernel, 3
    convolution = (2 * kernel - 1) * sum(memory.widths) if kernel else 0
    assert scoring() - scoring(kernel=None) == num_layers * convolution
    whole = scoring()
    monkeypatch.setattr(torch.linalg, "solve_triangular", lambda lower, right, **_: right)
    system = memory.num_heads * memory.d_value * (16 - 1) if memory.options.delta else 0
    assert whole - scoring() == num_layers * system


def counted(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> FlopCounter:
    """Return the count of a forward and a backward."""
    given = [torch.empty(shape, device="meta", requires_grad=True) for shape in shapes]
    with FlopCounter() as count:
        function(*given).sum().backward()
    return count


def test_the_same_arithmetic_counts_the_same_however_it_is_computed() -> None:
    """Forward and both gradients. Of k terms a product counts k additions, not k - 1; autograd scales some terms."""
    size, others, kernel = 4096, 64, 32
    left, right, rows, taps = (size, others), (others, size), (2, size + kernel - 1, 8), (8, kernel)
    wide = partial(torch.conv1d, groups=8)
    for one, other, shapes in (
        (torch.mm, lambda x, y: (x[:, :, None] * y).sum(1), (left, right)),
        (lambda x, y: wide(x.mT, y[:, None]), convolve, (rows, taps)),
    ):
        products, elements = counted(one, *shapes), counted(other, *shapes)
        assert elements.products == 0 and products.others < products.products / 20
        assert elements.others == pytest.approx(products.products, rel=0.2)
    length = 16
    lower = partial(torch.linalg.solve_triangular, upper=False, unitriangular=True)
    found = counted(lower, (2, length, length), (2, length, 5))
    assert found.products == 2 * 2 * length * length * 5  # the gradient of the matrix
    assert found.others == 2 * (2 * length * (length - 1) * 5) + 2 * length * 5 - 1  # and the sum of `counted`


def test_logits_that_are_computed_twice_count_once() -> None:
    """Of so many tokens, the logits do not stay in memory until the backward."""
    few, many = (flops_per_token(model_spec(realistic({"kind": "none"}), 2**18), num_lanes=lanes) for lanes in (1, 64))
    assert many.training == pytest.approx(few.training, rel=1e-3)
