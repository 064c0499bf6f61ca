"""Transformer-XL with the weights and inputs of the authors' code (tests/golden/txl)."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dist_mem.block import model_spec
from dist_mem.config import AdaptiveConfig, Config, ModelConfig, TrainConfig
from dist_mem.model import LMOutput, LMState, MemoryLM
from tests.support import parity, paths
from tests.support.published import Vectors

GOLDEN = paths.GOLDEN / "txl"
TOLERANCE = 2e-5  # golden README: on losses, hiddens and memories; relative on gradients
LAYER_NAMES = {
    "dec_attn.o_net.weight": "memory.attention.output.weight",
    "dec_attn.r_net.weight": "memory.attention.position.weight",
    "pos_ff.CoreNet.0.weight": "feed_forward.expand.weight",
    "pos_ff.CoreNet.0.bias": "feed_forward.expand.bias",
    "pos_ff.CoreNet.3.weight": "feed_forward.contract.weight",
    "pos_ff.CoreNet.3.bias": "feed_forward.contract.bias",
    "pos_ff.layer_norm.weight": "feed_forward_norm.weight",
    "pos_ff.layer_norm.bias": "feed_forward_norm.bias",
}
HEAD_NAMES = {
    "r_w_bias": "blocks.0.memory.attention.content_bias",
    "r_r_bias": "blocks.0.memory.attention.position_bias",
    "crit.cluster_weight": "head.bins.0.cluster_weight",
    "crit.cluster_bias": "head.bins.0.cluster_bias",
}


class Golden(Vectors):
    """A file of reference vectors of a whole model."""

    folder = GOLDEN

    def __init__(self, name: str) -> None:
        super().__init__(self.folder / f"{name}.npz")

    def tensor(self, key: str) -> Tensor:
        """Float64 or int64, lanes first where the array has a time axis."""
        value = super().tensor(key)
        is_sequence = key.startswith(("seg", "eval", "stream")) and "/grad/" not in key
        return value.transpose(0, 1) if is_sequence else value

    def parameters(self, prefix: str) -> dict[str, Tensor]:
        """Arrays under `prefix`, by our names."""
        found = {}
        for key in self.arrays:
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name != "pos_emb.inv_freq":
                found.update(our_parameters(name, self.tensor(key), pre_norm=self.settings["pre_lnorm"]))
        return found

    def config(self, **model_changes: Any) -> Config:
        given = {"cutoffs": [], "clamp_len": -1, "same_length": False, "tie_weight": True, **self.settings}
        model = ModelConfig(
            num_layers=given["n_layer"],
            d_model=given["d_model"],
            num_heads=given["n_head"],
            d_head=given["d_head"],
            d_inner=given["d_inner"],
            dropout=0.0,
            norm="pre" if given["pre_lnorm"] else "post",
            final_norm=False,
            tie_embeddings=given["tie_weight"],
            clamp_len=given["clamp_len"] if given["clamp_len"] > 0 else None,
            same_length=given["same_length"],
        )
        if given["cutoffs"]:
            adaptive = AdaptiveConfig(given["cutoffs"], given["div_val"], given.get("tie_projs"))
            model = replace(model, adaptive=adaptive)
        memory = {"kind": "transformer_xl", "mem_len": given["mem_len"]} if given["mem_len"] else {"kind": "none"}
        return Config(model=replace(model, **model_changes), memory=memory, train=TrainConfig(seg_len=given["tgt_len"]))

    def model(self, config: Config | None = None) -> MemoryLM:
        model = MemoryLM(model_spec(config or self.config(), self.settings["V"])).double()
        missing, unexpected = model.load_state_dict(self.parameters("param/"), strict=False)
        shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
            name for name, _ in model.named_parameters()
        }
        assert not unexpected and set(missing) <= shared
        return model


def our_parameters(name: str, value: Tensor, *, pre_norm: bool) -> dict[str, Tensor]:
    """A published parameter under our name; the joint query-key-value matrix becomes two."""
    if name in HEAD_NAMES:
        return {HEAD_NAMES[name]: value}
    parts = name.split(".")
    if parts[0] == "word_emb":
        return {f"embedding.bins.{parts[2]}.{'weight' if parts[1] == 'emb_layers' else 'projection'}": value}
    if parts[0] == "crit":
        return {f"head.bins.{parts[2]}.{parts[3] if parts[1] == 'out_layers' else 'projection'}": value}
    block, rest = f"blocks.{parts[1]}", ".".join(parts[2:])
    if rest == "dec_attn.qkv_net.weight":
        query, key, val = value.chunk(3)
        attention = f"{block}.memory.attention"
        return {f"{attention}.query.weight": query, f"{attention}.key_value.weight": torch.cat([key, val])}
    if rest.startswith("dec_attn.layer_norm"):
        norm = "memory.norm" if pre_norm else "attention_norm"
        return {f"{block}.{norm}.{parts[-1]}": value}
    return {f"{block}.{LAYER_NAMES[rest]}": value}


def run_segment(model: MemoryLM, tokens: Tensor, targets: Tensor, state: LMState) -> tuple[LMOutput, list[Tensor]]:
    """One complete segment of every lane, and the output of every block."""
    outputs: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, out: outputs.append(out.y)) for block in model.blocks]
    valid_len = torch.full((tokens.shape[0],), tokens.shape[1])
    result = model(tokens, targets, valid_len, state=state)
    for hook in hooks:
        hook.remove()
    return result, outputs


def empty_state(model: MemoryLM, num_lanes: int = 2) -> LMState:
    return model.init_state(torch.arange(num_lanes), "cpu", torch.float64)


def assert_close(ours: Tensor, golden: Tensor, tolerance: float = TOLERANCE, kind: str = "outputs") -> None:
    """Absolute, as the golden README has it."""
    parity.assert_close(ours, golden, kind, tolerance=tolerance, floor=math.inf)


def assert_gradients(model: MemoryLM, golden: Golden, prefix: str) -> None:
    expected = golden.parameters(prefix)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        want = expected.pop(name, torch.zeros_like(parameter))
        parity.assert_close(parameter.grad, want, f"gradient of {name}", tolerance=TOLERANCE, floor=1e-3)
    assert not expected, f"published gradients of unknown parameters: {sorted(expected)}"
