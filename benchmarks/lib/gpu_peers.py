"""The peers of gpu.sh: models of other programs with as many parameters, on the same card in the same run.

A plain GPT-2 in 60 lines of torch shows what this card reaches with nothing of ours; transformers' Llama is the peer of
models with rotary positions. Both compute in bfloat16 by autocast with weights in float32, and a fused AdamW.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lib.common import seconds
from torch import Tensor, nn

PEER = "peer "  # names of the cases begin so
PEAK_SECONDS = 4.0  # of timed updates
Loss = Callable[[Tensor, Tensor], Tensor]  # of tokens and targets (B, T)


class Sizes(NamedTuple):
    num_layers: int
    d_model: int
    num_heads: int
    vocab: int
    seg_len: int
    lanes: int


SMALL = Sizes(12, 768, 12, 50_304, 1024, 16)  # 50,304: the vocabulary of GPT-2, padded to a multiple of 64
TINY = Sizes(2, 32, 2, 512, 16, 4)


class Layer(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, inner = sizes.d_model, 4 * sizes.d_model
        self.num_heads = sizes.num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.rows, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = self.rows(self.norms[0](hidden)).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = rows
        read = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.output(read.transpose(1, 2).flatten(2))
        widened: Tensor = self.expand(self.norms[1](hidden))
        output: Tensor = hidden + self.contract(F.gelu(widened, approximate="tanh"))
        return output


class PlainGPT2(nn.Module):
    """GPT-2 with tied embeddings."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens, self.places = (
            nn.Embedding(sizes.vocab, sizes.d_model),
            nn.Embedding(sizes.seg_len, sizes.d_model),
        )
        self.layers = nn.Sequential(*(Layer(sizes) for _ in range(sizes.num_layers)))
        self.norm, self.head = nn.LayerNorm(sizes.d_model), nn.Linear(sizes.d_model, sizes.vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.layers(self.tokens(tokens) + self.places.weight)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1).float(), targets.flatten())


def _compiled(function: Loss, device: str) -> Loss:
    """Compile; without a GPU only up to the kernels, of which those of the CPU would show nothing."""
    return torch.compile(function, backend="inductor" if device == "cuda" else "aot_eager")


def gpt2(sizes: Sizes) -> tuple[nn.Module, Loss]:
    """Return the plain GPT-2 and its loss."""
    model = PlainGPT2(sizes)
    return model, model


def llama(sizes: Sizes) -> tuple[nn.Module, Loss]:
    """Return transformers' Llama and its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=sizes.vocab,
            hidden_size=sizes.d_model,
            intermediate_size=8 * sizes.d_model // 3,  # three matrices: as many parameters as two of 4 D
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).logits.flatten(0, 1).float(), targets.flatten())

    return model, loss


_GPT2, _LLAMA = "plain torch GPT-2", "transformers' Llama"
CASES = {
    f"{name}{', compiled' if compiles else ''}": (name, compiles) for name in (_GPT2, _LLAMA) for compiles in (0, 1)
}


def measure(name: str, device: str, *, tiny: bool) -> dict[str, Any]:
    """Return tokens/s of updates: forward, backward, clipped gradients, AdamW."""
    kind, compiles = CASES[name.removeprefix(PEER)]
    if kind == _LLAMA and not find_spec("transformers"):
        return {"status": "not installed"}
    sizes = TINY if tiny else SMALL
    torch.manual_seed(0)
    model, loss = (gpt2 if kind == _GPT2 else llama)(sizes)
    model.to(device)
    loss = _compiled(loss, device) if compiles else loss
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    tokens = torch.randint(sizes.vocab, (sizes.lanes, sizes.seg_len + 1), device=device)

    def update() -> None:
        with torch.autocast(device, torch.bfloat16):
            found = loss(tokens[:, :-1], tokens[:, 1:])
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()

    first = seconds(update)
    for _ in range(3):
        update()
    times: list[float] = []
    while len(times) < 3 or (len(times) < (3 if tiny else 20) and sum(times) < PEAK_SECONDS):
        times.append(seconds(update))
    median = statistics.median(times)
    return {
        "status": "done",
        "tokens_per_second": sizes.lanes * sizes.seg_len / median,
        "step_seconds": median,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "start_seconds": first,
    }


def names() -> list[str]:
    """Return the names of all cases."""
    return [f"{PEER}{name}" for name in CASES]
