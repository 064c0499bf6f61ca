"""RMT over GPT-2 and Llama against the authors' formulae (tests/golden/rmt_rows; README.md there) in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.data.batch import IGNORE
from dist_mem.hf.names import OWN, take_published, to_published
from dist_mem.model import MemoryLM
from tests.support import gpt2_models, llama_models
from tests.support.messages import refused
from tests.support.parity import assert_close
from tests.support.paths import GOLDEN
from tests.support.published import Vectors, names_in

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
    ids, seg_len = golden.tensor("ids"), golden.settings["lengths"][0]
    assert bool(golden.tensor("attention_mask").all())
    targets = torch.full_like(ids, IGNORE)
    targets[:, :-1] = ids[:, 1:]
    state, losses = model.init_state(torch.arange(len(ids)), "cpu", torch.float64), list[Tensor]()
    full = torch.full((len(ids),), seg_len)
    for number, (tokens, wanted) in enumerate(zip(ids.split(seg_len, 1), targets.split(seg_len, 1), strict=True)):
        log_probs, _ = model.log_probs(tokens, full, state=state)
        golden_logits = golden.tensor(f"seg{number}/logits").log_softmax(-1)
        assert_close(log_probs.double(), golden_logits, f"seg{number}/logits", tolerance=1e-6)  # ours are in float32
        output = model(tokens, wanted, full, state=state)
        state = output.state
        losses.append(output.nll.sum())
        golden.assert_equal(state.stem.rows, f"seg{number}/memory_out")
    loss = torch.stack(losses).sum() / (targets != IGNORE).sum()
    assert_close(loss, golden.tensor("loss"), "loss", tolerance=1e-6)
    loss.backward()
    of_gradients = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), of_gradients.parameters(), strict=True):
            assert parameter.grad is not None
            other.copy_(parameter.grad)
    found = to_published(of_gradients)
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
