"""The papers' settings for language modelling: together they load and build, and have the published sizes."""

from typing import Any

import pytest

from dist_mem.block import model_spec
from dist_mem.config import as_tree, load_config
from dist_mem.config.memory_blocks import memory_of
from dist_mem.memory import memory_options
from dist_mem.model import describe
from tests.support.paths import ROOT

NUM_WORDS = 267_735  # of WikiText-103, with <eos> and <unk>
TRANSFORMER_XL = 151_106_305  # parameters, as the published code makes it with those words and a full softmax
ROW = 410 + 1  # a row of embedding and softmax, and its bias
WORDS, LAMEMO = "wikitext103_words.yaml", "wikitext103_lamemo.yaml"
CHARACTERS = ["papers/enwik8.yaml", "papers/enwik8_lamemo.yaml"]


def load(*names: str) -> Any:
    return load_config([str(ROOT / "configs" / name) for name in names], memory_options=memory_options)


@pytest.mark.parametrize(
    ("overlays", "num_parameters"),
    [
        ([], TRANSFORMER_XL),
        (["papers/wikitext103_transformer_xl.yaml"], TRANSFORMER_XL),
        ([f"papers/{WORDS}"], TRANSFORMER_XL + 3 * ROW),  # and a row for each cluster
        ([f"papers/{WORDS}", "papers/wikitext103_rmt.yaml"], 151_107_538 + 10 * 410),  # published; and the first rows
        ([f"papers/{LAMEMO}"], TRANSFORMER_XL + 410),  # and a bias of positions for keys to the right
        ([f"papers/{WORDS}", f"papers/{LAMEMO}", "code/wikitext103_lamemo.yaml"], TRANSFORMER_XL + 410),
    ],
)
def test_wikitext_103_has_the_published_number_of_parameters(overlays: list[str], num_parameters: int) -> None:
    config = load("papers/wikitext103.yaml", *overlays)
    bos = ROW  # which the published code has not
    assert describe(model_spec(config, NUM_WORDS + 1))["num_parameters"] == num_parameters + bos


@pytest.mark.parametrize(
    ("names", "lanes", "steps", "memory"),
    [
        (CHARACTERS[:1], 22, 400_000, "transformer_xl"),
        (CHARACTERS, 40, 100_000, "lamemo"),
        ([*CHARACTERS, "papers/text8.yaml"], 40, 100_000, "lamemo"),
        ([*CHARACTERS, "code/enwik8_lamemo.yaml"], 40, 50_000, "lamemo"),
        (["papers/enwik8.yaml", "papers/enwik8_compressive.yaml"], 22, 100_000, "compressive"),
    ],
)
def test_characters_are_read_as_published(names: list[str], lanes: int, steps: int, memory: str) -> None:
    config = load(*names)
    assert (config.train.global_batch_size, config.train.steps, config.memory["kind"]) == (lanes, steps, memory)
    assert config.data.layout == config.eval.layout == "stream"
    assert config.memory["mem_len"] == config.train.seg_len
    assert config.data.path.removeprefix("data/") == config.name
    assert describe(model_spec(config, 257))["num_parameters"] > 40e6


WIDE = {"num_layers": 12, "d_model": 1024, "num_heads": 8, "d_head": 128, "d_inner": 4096, "dropout": 0.05}
GATED = {"num_layers": 16, "d_model": 2400, "num_heads": 9, "d_head": 200}
PUBLISHED_SIZES = {
    "titans_340m": {"num_parameters": 340e6},
    "pg19_infini": {"state_bytes_per_lane": 4 * 12 * 8 * 128 * 129},  # "1.6M"
    "gated_deltanet_1.3b": {"num_parameters": 1.3e9},
}
STATES = {"kind": "block_recurrent", "num_states": 512, "window": 512, "gate": "fixed", "cell": "skip"}


@pytest.mark.parametrize(
    ("name", "model", "block", "memory", "steps", "tokens", "window"),
    [
        ("pg19_memorizing", WIDE, 8, {"kind": "memorizing", "mem_len": 8192, "neighbors": 32}, 500_000, 2**17, 512),
        ("pg19_block_recurrent", WIDE, 9, STATES, 500_000, 2**17, 4096),
        ("titans_340m", {"dropout": 0.0}, 0, {"kind": "titans", "variant": "gate"}, 15e9 / 2**19, 2**19, 4096),
        ("pg19_infini", WIDE | {"dropout": 0.0}, 0, {"kind": "infini", "rule": "linear"}, 30_000, 2**21, 2**15),
        ("gated_deltanet_1.3b", GATED, 0, {"kind": "linear"}, 1e11 / 2**19, 2**19, 4096),
    ],
)
def test_newer_memories_have_the_published_sizes(
    name: str, model: dict[str, Any], block: int, memory: dict[str, Any], steps: float, tokens: int, window: int
) -> None:
    """`window`: the tokens through which gradients flow."""
    config = load(f"papers/{name}.yaml")
    train = config.train
    assert as_tree(config.model).items() >= model.items()
    assert dict(memory_of(config.memory, block)[1]).items() >= memory.items()
    if block:
        assert memory_of(config.memory, 0)[1] == memory_options({"kind": "transformer_xl", "mem_len": 512})
    sizes = describe(model_spec(config, 32_000))
    for key, published in PUBLISHED_SIZES.get(name, {}).items():
        assert sizes[key] == pytest.approx(published, rel=0.02), key
    assert train.steps == pytest.approx(steps, rel=1e-3)
    assert train.global_batch_size * train.seg_len * train.segments_per_update == tokens
    assert train.seg_len * train.bptt_segments == window
