"""GPT-2 against Hugging Face's, and with long-term memories against the authors' code (tests/golden/infinite).

Two layers read seven segments of 512 tokens in float64; after 2048 tokens the published code forgets everything.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dist_mem.hf.names import take_published, to_published
from dist_mem.model import LMOutput, MemoryLM
from tests.support import paths
from tests.support.gpt2_models import SEG_LEN, VOCAB, build, fresh, gpt2_config, save_random_gpt2
from tests.support.published_infinite import WEIGHTS, assert_close, ours, theirs

GOLDEN = paths.GOLDEN / "infinite"
NUM_LAYERS, LENGTH = 2, 512
TOLERANCE = 2e-5  # golden README, with our own matrices
PUBLISHED_MEMORY = {
    "kind": "infinite",
    "over": {"kind": "causal"},
    "num_basis": 128,
    "num_samples": 512,
    "basis_widths": [0.005, 0.01],
    "tau": 0.5,
    "prior_mean": -1.0,
    "kl_weight": 0.01,
    "memory_threshold": 2048,
}


@pytest.fixture(scope="module")
def arrays() -> dict[str, Tensor]:
    names = ("model_gpt2_weights", "model_gpt2_tiny", "model_gpt2_gradients")
    found: dict[str, Any] = {}
    for name in names:
        found |= np.load(GOLDEN / f"{name}.npz")
    loaded = {key: torch.from_numpy(value) for key, value in found.items()}
    return {key: value.double() if value.is_floating_point() else value.long() for key, value in loaded.items()}


def published_name(own_name: str, layer: int) -> str:
    """Of a long-term memory's weights in the authors' GPT-2."""
    (name,) = (name for name, own in WEIGHTS.items() if own == own_name)
    short = name.replace("_weight", ".weight").replace("_bias", ".bias")
    return f"transformer.h.{layer}.attn.long_term_attention.{short}"


def published_model(arrays: dict[str, Tensor]) -> MemoryLM:
    sizes = {"num_layers": NUM_LAYERS, "d_model": 24, "num_heads": 3, "d_inner": 96, "num_positions": LENGTH}
    config = gpt2_config(PUBLISHED_MEMORY, model=sizes, train={"seg_len": LENGTH})
    model = build(config, 60).double()
    weights = {key.removeprefix("w_"): value for key, value in arrays.items() if key.startswith("w_")}
    plain = {name: tensor for name, tensor in weights.items() if "long_term" not in name}
    left = take_published(model, plain, "golden")
    assert len(left) == NUM_LAYERS * 6, "the long-term memories, and nothing else"
    for layer, memory in enumerate(model.memories()):
        for own_name in WEIGHTS.values():
            memory.get_parameter(own_name).data = weights[published_name(own_name, layer)]
        prefix = f"transformer.h.{layer}.attn.long_term_attention"
        networks = torch.cat([weights[f"{prefix}.mu.weight"], weights[f"{prefix}.sigma.weight"]])
        memory.get_parameter("densities").data = ours(networks, 1)
    return model


def read(model: MemoryLM, arrays: dict[str, Tensor], state: Any, number: int) -> tuple[LMOutput, Tensor, list[Tensor]]:
    """A segment: loss and state, log-probabilities, block inputs."""
    tokens, full = arrays[f"s{number}_ids"], torch.tensor([LENGTH])
    targets = torch.cat([tokens[:, 1:], torch.full((1, 1), -100)], dim=1)
    inputs: list[Tensor] = []
    hooks = [block.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for block in model.blocks]
    output = model(tokens, targets, full, state=state)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        log_probs, _ = model.log_probs(tokens, full, state=state)
    return output, log_probs, inputs


def test_seven_segments_of_the_published_infinity_former(arrays: dict[str, Tensor]) -> None:
    """Logits, losses, block inputs, coefficients, divergences, the wipe, and every gradient in the third segment."""
    model = published_model(arrays)
    state = fresh(model, 1, torch.float64)
    for number in range(7):
        output, log_probs, inputs = read(model, arrays, state, number)
        state = output.state
        loss, kl = output.nll.sum() / (LENGTH - 1), output.aux["kl"].sum()
        assert_close(loss, arrays[f"s{number}_loss"], TOLERANCE)
        assert_close(log_probs[:, ::64], arrays[f"s{number}_logits"].log_softmax(-1), TOLERANCE)
        assert_close(inputs[1][:, ::32], arrays[f"s{number}_mem1"], TOLERANCE)
        for index, block in enumerate(state.blocks):
            assert block.num_tokens.item() == arrays[f"s{number}_count{index}"].item()
            if number:
                assert_close(theirs(block.coefficients, 1)[:, ::8], arrays[f"s{number}_B{index}"], TOLERANCE, "states")
        assert_close(kl, 0.01 * arrays.get(f"s{number}_kl_mean", torch.zeros(()).double()), TOLERANCE)
        if number == 2:
            (loss + kl).backward()
            assert_gradients(model, arrays)


def assert_gradients(model: MemoryLM, arrays: dict[str, Tensor]) -> None:
    """Of all parameters; GPT-2's are carried to their published names by the code that carries weights."""
    gradients = copy.deepcopy(model)
    for parameter, other in zip(model.parameters(), gradients.parameters(), strict=True):
        assert parameter.grad is not None
        other.data = parameter.grad
    expected = {key.removeprefix("s2_grad_"): value for key, value in arrays.items() if "grad_" in key}
    for name, gradient in to_published(gradients).items():
        if not name.startswith("memory."):
            found = gradient[::32] if name.endswith("wpe.weight") else gradient
            assert_close(found, expected.pop(name), TOLERANCE, "gradients")
    for layer, memory in enumerate(gradients.memories()):
        for own_name in WEIGHTS.values():
            found = memory.get_parameter(own_name)
            assert_close(found, expected.pop(published_name(own_name, layer)), TOLERANCE, "gradients")
        networks = theirs(memory.get_parameter("densities"), 1)
        for row, name in enumerate(("mu", "sigma")):
            prefix = f"transformer.h.{layer}.attn.long_term_attention"
            assert_close(networks[row : row + 1], expected.pop(f"{prefix}.{name}.weight"), TOLERANCE, "gradients")
    assert not expected, f"no gradient of {list(expected)}"


def test_logits_equal_those_of_transformers(tmp_path: Path) -> None:
    """A randomly initialised GPT2LMHeadModel, in the file that `save_pretrained` writes."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    theirs_model = save_random_gpt2(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    tokens = torch.randint(0, VOCAB, (3, SEG_LEN), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs_model(tokens).logits.log_softmax(-1)
    assert expected.std() > 1, "weights large enough that a mistake would show"
    for prefix in ("transformer.", ""):
        model = build(gpt2_config())
        renamed = {prefix + name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
        renamed[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 16, 16)  # old files hold the causal mask
        assert take_published(model, renamed, "file") == []
        found, _ = model.log_probs(tokens, torch.full((3,), SEG_LEN), state=fresh(model, 3))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
