"""Counting a micro-batch on tensors without values: short models and few lanes foretell long ones and many."""

from typing import Any

import pytest
import torch

from dist_mem.block import model_spec
from dist_mem.config import Config, OptimizerConfig
from dist_mem.config.schema import BY_SEGMENTS
from dist_mem.estimate.counting import Counts, MicroBatchCost, _count, count_micro_batch, mix_costs
from dist_mem.estimate.zero import sizes_of
from dist_mem.memory import memory_class, memory_kinds
from tests.support.configs import config_from
from tests.support.paths import ROOT

VOCAB_SIZE, SEG_LEN = 3_000, 128  # tensors without values may be large


def config(kind: str, model: dict[str, Any] | None = None, **train: Any) -> Config:
    model = {"num_layers": 4, "d_model": 128, "num_heads": 4, "d_inner": 512, **(model or {})}
    block = {"kind": kind, **memory_class(kind).small_options(SEG_LEN)}
    keys = {"model": model, "memory": block, "train": {"seg_len": SEG_LEN, "micro_batch_size": 4, **train}}
    merged: Any = config_from(keys)
    return merged


def totals(counted: MicroBatchCost) -> tuple[int, int, float, float]:
    flops = sum(number * work.flops for number, work in counted.kernels)
    return counted.peak, counted.kept, flops, sum(number * work.num_bytes for number, work in counted.kernels)


def check_same(predicted: MicroBatchCost, whole: MicroBatchCost) -> None:
    """The highest point may move from one operation to another."""
    assert totals(predicted)[1:] == totals(whole)[1:]
    assert predicted.peak == pytest.approx(whole.peak, rel=0.02)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("saves", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", memory_kinds())
def test_two_and_three_blocks_foretell_the_whole_model(kind: str, saves: bool, precision: str) -> None:
    asked = config(kind, activation_checkpointing="blocks" if saves else "none", precision=precision)
    whole = _count(model_spec(asked, VOCAB_SIZE), on_gpu=True, keeps_gradients=False, forward_in=None)
    check_same(count_micro_batch(model_spec(asked, VOCAB_SIZE)), whole)


def test_none_and_all_blocks_foretell_a_share_of_them() -> None:
    """LaMemo's last block, which is not recomputed, does and keeps less than the first ones."""
    keys: list[dict[str, Any]] = [{}, {"activation_checkpointing": "blocks"}]
    none, all_blocks = (count_micro_batch(model_spec(config("lamemo", **key), VOCAB_SIZE)) for key in keys)
    whole = count_micro_batch(model_spec(config("lamemo", **keys[1], activation_checkpointing_share=0.5), VOCAB_SIZE))
    predicted = mix_costs(none, all_blocks, 0.5)
    assert totals(predicted)[2] == pytest.approx(totals(whole)[2], rel=0.03)
    assert whole.kept <= predicted.kept <= 1.15 * whole.kept
    assert whole.peak <= predicted.peak <= 1.01 * (whole.peak + predicted.kept - whole.kept)


@pytest.mark.parametrize("kind", memory_kinds())
def test_two_and_three_lanes_foretell_more(kind: str) -> None:
    asked = config(kind)
    check_same(
        Counts(model_spec(asked, VOCAB_SIZE), on_gpu=True).at(4), count_micro_batch(model_spec(asked, VOCAB_SIZE))
    )


@pytest.mark.parametrize("kind", [kind for kind in memory_kinds() if memory_class(kind).carries_gradient])
def test_a_window_by_segments_needs_the_activations_of_one(kind: str) -> None:
    """And less work than a second forward of all: the first one is of the blocks alone."""

    def counted(num: int, recomputed: str) -> MicroBatchCost:
        asked = config(kind, segments_per_update=num, bptt_segments=num, activation_checkpointing=recomputed)
        return count_micro_batch(model_spec(asked, VOCAB_SIZE), keeps_gradients=True)

    one, whole, parts = counted(1, "none"), counted(4, "none"), counted(4, "segments")
    spec = model_spec(config(kind), VOCAB_SIZE)
    states = 4 * 4 * sizes_of(spec, torch.float32, OptimizerConfig()).lane_bytes
    assert parts.peak <= min(1.3 * one.peak + states, whole.peak)
    assert totals(whole)[2] < totals(parts)[2] < 1.2 * totals(whole)[2]


@pytest.mark.parametrize("num", [1, 8, pytest.param(64, marks=pytest.mark.nightly)])
def test_the_numbers_of_the_page_on_windows_are_those_of_the_count(num: int) -> None:
    page = (ROOT / "docs/howto/bptt.md").read_text(encoding="utf-8").split("| `activation_checkpointing` |")[1]
    lines = [line.strip("|").split("|") for line in page.partition("\n\n")[0].splitlines()]
    place = 1 + [cell.strip() for cell in lines[0]].index(f"K = {num}")
    sizes = {"num_layers": 8, "d_model": 512, "num_heads": 8, "d_inner": 2048}
    for name, shown in ((cells[0].strip("` "), cells[place].strip()) for cells in lines[2:]):
        recomputed = name if num > 1 else BY_SEGMENTS.get(name, name)
        windows = {"segments_per_update": num, "bptt_segments": num, "activation_checkpointing": recomputed}
        asked = config("infini", sizes, seg_len=256, micro_batch_size=2, precision="fp32", **windows)
        assert f"{count_micro_batch(model_spec(asked, 8_192)).peak / 2**20:,.0f}" == shown, name


# The fused kernels do not compute what they attend to, if anything.
OTHERS = ("lamemo", "linear", "titans", "block_recurrent")


@pytest.mark.parametrize("kind", [kind for kind in memory_kinds() if kind not in OTHERS])
@pytest.mark.parametrize("back_end", ["sdpa", "triton"])
def test_a_fused_kernel_counts_its_products_and_keeps_less(kind: str, back_end: str) -> None:
    """Its backward computes the scores again: at most one product more in seven."""
    simple, fused = (
        count_micro_batch(model_spec(config(kind, model={"attention": name}), VOCAB_SIZE))
        for name in ("simple", back_end)
    )
    assert fused.kept < simple.kept
    assert totals(simple)[2] < totals(fused)[2] < 8 / 7 * totals(simple)[2]


def test_the_plan_for_a_gpu_takes_the_back_end_that_the_gpu_will() -> None:
    """The tensors that are counted are on no GPU."""
    chosen, triton, chunked = (
        count_micro_batch(model_spec(config("transformer_xl", model={"attention": name}), VOCAB_SIZE))
        for name in ("auto", "triton", "chunked")
    )
    assert totals(chosen) == totals(triton) != totals(chunked)


def test_dropout_keeps_a_byte_an_element_on_a_gpu_and_a_number_elsewhere() -> None:
    model = {"dropout": 0.5}
    dropped = config_from(config("none").document, {"model": model})
    on_gpu, elsewhere = (
        count_micro_batch(model_spec(dropped, VOCAB_SIZE), on_gpu=on_gpu).kept for on_gpu in (True, False)
    )
    assert on_gpu < elsewhere


@pytest.mark.parametrize("forward_in", [None, "fp32"])
def test_an_adaptive_vocabulary_is_counted_with_the_rows_that_are_expected(forward_in: str | None) -> None:
    """Its later bins take few rows, so it needs less than a plain one."""
    plain = config("none")
    adaptive = config_from(plain.document, {"model": {"adaptive": {"cutoffs": [500, 1_000]}}})
    peaks = [
        count_micro_batch(model_spec(asked, VOCAB_SIZE), forward_in=forward_in).peak for asked in (adaptive, plain)
    ]
    assert 0 < peaks[0] < 1.1 * peaks[1]
