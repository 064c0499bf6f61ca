"""RMT over GPT-2 and Llama against the authors' formulae (tests/golden/rmt_rows; README.md there) in float64."""

from typing import Any

import pytest

from dist_mem.hf.names import OWN, take_published
from dist_mem.model import MemoryLM
from tests.support import gpt2_models, llama_models
from tests.support.messages import refused
from tests.support.parity import assert_close
from tests.support.paths import GOLDEN
from tests.support.published import Vectors, check_segments, names_in

FOLDER = GOLDEN / "rmt_rows"
FIRST = f"{OWN}stem.first.start"


def model_of(golden: Vectors, name: str) -> MemoryLM:
    settings = golden.settings
    is_gpt2 = settings["base"] == "gpt2"
    over = {"kind": "causal" if is_gpt2 else "none"}
    memory = {"kind": "rmt_rows", "num_tokens": settings["num_mem_tokens"], "over": over}
    sizes = {"num_layers": 2, "d_model": 8, "num_heads": settings["heads"], "d_inner": settings["n_inner"]}
    own: dict[str, Any] = {"train": {"seg_len": settings["lengths"][0]}}
    if is_gpt2:
        own["model"] = {**sizes, "num_positions": settings["n_positions"]}
        config = gpt2_models.gpt2_config(memory, **own)
    else:
        heads = {"num_kv_heads": settings["kv_heads"], "d_head": settings["head_dim"], "norm_eps": settings["eps"]}
        own["model"] = {**sizes, **heads, "rope_theta": settings["theta"], "tie_embeddings": settings["tied"]}
        config = llama_models.llama_config(memory, **own)
    model = gpt2_models.build(config, settings["vocab"]).double()
    weights = {FIRST if key == "memory" else key: value.detach() for key, value in golden.weights.items()}
    assert take_published(model, weights, name) == []
    return model


@pytest.mark.parametrize("name", names_in(FOLDER))
def test_logits_rows_loss_and_gradients_are_those_of_the_published_model(name: str) -> None:
    golden = Vectors(FOLDER / f"{name}.npz")
    model = model_of(golden, name)
    assert bool(golden.tensor("attention_mask").all())
    found = check_segments(
        golden, model, lambda where, state: golden.assert_equal(state.stem.rows, f"{where}/memory_out")
    )
    for key in golden.weights:
        assert_close(found[FIRST if key == "memory" else key], golden.tensor(f"grad/{key}"), key, tolerance=1e-5)


def test_what_has_other_attention_or_too_few_positions_is_refused() -> None:
    def build(memory: dict[str, Any], make: Any = llama_models.llama_config, **blocks: Any) -> None:
        gpt2_models.build(make({"kind": "rmt_rows", **memory}, **blocks))

    with refused(ValueError, "memory.over is transformer_xl", "memory.over.kind"):
        build({"over": {"kind": "transformer_xl", "mem_len": llama_models.SEG_LEN}})
    with refused(ValueError, "model.num_positions", "train.seg_len", "memory.num_tokens"):
        build({"over": {"kind": "causal"}, "num_tokens": 60}, gpt2_models.gpt2_config)
    with refused(ValueError, "model.rope.kind is dynamic", "armt"):
        build({}, model={"rope": {"kind": "dynamic", "factor": 2.0}})
