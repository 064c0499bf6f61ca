"""ARMT against the authors' formulae (tests/golden/armt; README.md there) in float64, alone and in GPT-2 and Llama."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dist_mem.hf.names import OWN, take_published
from dist_mem.memory import none
from dist_mem.memory.armt import ArmtState, AssociativeMemory
from dist_mem.model import LMState, MemoryLM
from tests.support import gpt2_models, llama_models
from tests.support.messages import refused
from tests.support.parity import assert_close
from tests.support.paths import GOLDEN
from tests.support.published import Vectors, check_segments, layer_spec, names_in

FOLDER = GOLDEN / "armt"
NAMES = {"query": "W_mq", "key": "W_mk", "value": "W_mv", "strength": "W_mb"}
GRADIENTS = 1e-9


def options_of(settings: dict[str, Any], name: str) -> dict[str, Any]:
    forms = ("first_release", "paper")
    return {
        "num_tokens": settings["num_mem_tokens"],
        "d_key": settings["d_mem"],
        "num_heads": settings["mem_heads"],
        "nu": settings["nu"],
        "gating": settings["gating"],
        "variant": next((form for form in forms if name.endswith(form)), "published"),
    }


@pytest.mark.parametrize("name", names_in(FOLDER, "layer_*"))
def test_readings_matrices_and_gradients_are_the_published_ones(name: str) -> None:
    golden = Vectors(FOLDER / f"{name}.npz")
    spec = layer_spec(d_model=8, num_heads=2, d_head=4, seg_len=4)
    over = none.NoMemory(spec, none.NoMemory.Options())
    memory = AssociativeMemory(
        spec, AssociativeMemory.Options(**options_of(golden.settings, name), value_init=1.0), over
    )
    memory.double().load_state_dict(
        {f"{ours}.{kind}": golden.weights[f"{theirs}.{kind}"] for ours, theirs, kind in parameters()}, strict=False
    )
    state, objective = memory.init_state(torch.arange(2), "cpu", torch.float64), torch.zeros((), dtype=torch.float64)
    leaves: dict[str, Tensor] = {}
    for number in range(golden.settings["segments"]):
        where = f"seg{number}"
        x, rows = (golden.tensor(f"{where}/{part}").requires_grad_() for part in ("x", "mem_out"))
        leaves |= {f"{where}/x": x, f"{where}/mem_out": rows}
        matrix = memory.write_pending(state, x.dtype)
        found = memory.read(x, matrix)
        golden.assert_equal(found, f"{where}/read")
        state = ArmtState(matrix, rows, torch.ones(2, dtype=torch.bool))
        golden.assert_equal(memory.new_share(memory.features(memory.key(rows), matrix), matrix), f"{where}/gamma")
        after = memory.write_pending(state, x.dtype)
        golden.assert_equal(after.sums, f"{where}/A")
        golden.assert_equal(after.norm, f"{where}/z")
        objective = objective + (found * golden.tensor(f"weight/{where}/w")).sum()
    objective = objective + (after.sums * golden.tensor("weight/u")).sum()
    objective = objective + (after.norm * golden.tensor("weight/uz")).sum()
    golden.assert_equal(objective, "objective")
    leaves |= {f"{theirs}.{kind}": getattr(getattr(memory, ours), kind) for ours, theirs, kind in parameters()}
    for key, gradient in golden.gradients(objective, leaves).items():
        assert_close(gradient, golden.tensor(f"grad/{key}"), key, tolerance=GRADIENTS)


def parameters() -> Iterator[tuple[str, str, str]]:
    for ours, theirs in NAMES.items():
        yield from ((ours, theirs, kind) for kind in (("weight", "bias") if ours == "strength" else ("weight",)))


def model_of(golden: Vectors, name: str) -> MemoryLM:
    """Our model with the weights of the file; GPT-2's memory rows contain their positions."""
    settings = golden.settings
    is_gpt2 = name.startswith("gpt2")
    over = {"kind": "causal" if is_gpt2 else "none"}
    memory = {"kind": "armt", **options_of(settings, name), "over": over}
    sizes = {"num_layers": 2, "d_model": 8, "num_heads": settings["heads"], "d_inner": settings["n_inner"]}
    train = {"seg_len": settings["lengths"][0]}
    if is_gpt2:
        model = gpt2_models.build(
            gpt2_models.gpt2_config(memory, model={**sizes, "num_positions": 16}, train=train), settings["vocab"]
        )
    else:
        heads = {"num_kv_heads": settings["kv_heads"], "d_head": settings["head_dim"], "norm_eps": settings["eps"]}
        is_tied = "lm_head.weight" not in golden.weights
        keys = {**sizes, **heads, "rope_theta": settings["theta"], "tie_embeddings": is_tied}
        model = gpt2_models.build(llama_models.llama_config(memory, model=keys, train=train), settings["vocab"])
    weights = {our_name(key): value.detach() for key, value in golden.weights.items()}
    if is_gpt2:
        positions = weights["transformer.wpe.weight"][train["seg_len"] :][: settings["num_mem_tokens"]]
        weights[f"{OWN}stem.rows"] = weights[f"{OWN}stem.rows"] + positions
    assert take_published(model.double(), weights, name) == []
    return model


def our_name(theirs: str) -> str:
    """The name in an export of what the file calls `transformer.h.0.W_mq.weight` or `memory`."""
    if theirs == "memory":
        return f"{OWN}stem.rows"
    for ours, part in NAMES.items():
        if f".{part}." in theirs:
            block = next(piece for piece in theirs.split(".") if piece.isdecimal())
            return f"{OWN}blocks.{block}.memory.{ours}.{theirs.rpartition('.')[2]}"
    return theirs


@pytest.mark.parametrize("name", ["gpt2_nu3", "llama_nu1_gated_heads2"])
def test_a_model_with_it_computes_what_the_published_one_does(name: str) -> None:
    golden = Vectors(FOLDER / f"{name}.npz")
    model = model_of(golden, name)

    def check_state(where: str, state: LMState) -> None:
        for index, (memory, part) in enumerate(zip(model.memories(), state.blocks, strict=True)):
            matrix = cast(AssociativeMemory, memory).write_pending(part, torch.float64)
            golden.assert_equal(matrix.sums, f"{where}/A{index}")
            golden.assert_equal(matrix.norm, f"{where}/z{index}")

    found, seg_len = check_segments(golden, model, check_state), golden.settings["lengths"][0]
    for key in golden.weights:
        ours, theirs = found[our_name(key)], golden.tensor(f"grad/{key}")
        if key.endswith("wpe.weight"):
            ours, theirs = ours[:seg_len], theirs[:seg_len]
        assert_close(ours, theirs, key, tolerance=1e-5)


def test_a_memory_over_it_must_pass_on_what_the_block_made(tmp_path: Path) -> None:
    """Else nothing would ever be written, and nobody would notice."""
    program = "from dist_mem.memory.infinite import Infinite\nfrom dist_mem.memory.base import Memory\n"
    program += "class Deaf(Infinite):\n    after_block = Memory.after_block\n"
    (tmp_path / "deaf.py").write_text(program, encoding="utf-8")
    block = {**llama_models.LTM, "kind": f"{tmp_path / 'deaf.py'}:Deaf"}
    gpt2_models.build(llama_models.llama_config({**block, "over": {"kind": "none"}}))
    with refused(ValueError, "memory.over", "after_block"):
        gpt2_models.build(llama_models.llama_config({**block, "over": {"kind": "armt"}}))
    below = {**llama_models.LTM, "over": {"kind": "none"}}  # which has nothing to pass on
    gpt2_models.build(llama_models.llama_config({"kind": "linear", "over": below}))


def test_only_attention_without_memory_may_be_below() -> None:
    memory = {"kind": "armt", "over": {"kind": "transformer_xl", "mem_len": llama_models.SEG_LEN}}
    with refused(ValueError, "memory.over is transformer_xl", "memory.over.kind"):
        gpt2_models.build(llama_models.llama_config(memory))
