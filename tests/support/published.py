"""Files of reference vectors (tests/golden), layers by themselves, and what parity tests compare."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_mem.data.batch import IGNORE
from dist_mem.hf.names import to_published
from dist_mem.model import LMState, MemoryLM
from dist_mem.nn.layer_spec import LayerSpec
from tests.support import parity


def names_in(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.stem for path in folder.glob(f"{pattern}.npz"))


def layer_spec(**sizes: Any) -> LayerSpec:
    """Return the specification of one layer without dropout; with `norm: post` it has no norm of its own."""
    given: dict[str, Any] = {
        "layer_index": 0, "num_layers": 1, "dropout": 0.0, "attention_dropout": 0.0, "norm": "post",
        "clamp_len": None, "same_length": False, "seed": 0,
    }  # fmt: skip
    return LayerSpec(**given | sizes)


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], gain, 1e-6)


class Vectors:
    """One file of reference vectors; its weights are the leaves that gradients are asked of."""

    def __init__(self, path: Path) -> None:
        self.arrays = dict(np.load(path))
        self.settings: dict[str, Any] = json.loads(str(self.arrays.get("config_json", "{}")))
        prefix = "param/"
        self.weights = {
            key.removeprefix(prefix): self.tensor(key).requires_grad_() for key in self.arrays if key.startswith(prefix)
        }

    def tensor(self, key: str) -> Tensor:
        value = torch.from_numpy(self.arrays[key])
        return value.double() if value.is_floating_point() else value

    def assert_equal(self, ours: Tensor, key: str) -> None:
        parity.assert_close(ours, self.tensor(key), key)

    def gradients(self, loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients; a leaf that has no part in the loss has zeros."""
        found = torch.autograd.grad(
            loss, list(leaves.values()), allow_unused=True, materialize_grads=True, retain_graph=True
        )
        return dict(zip(leaves, found, strict=True))

    def assert_gradients(self, loss: Tensor, prefix: str) -> None:
        """Compare the gradients of all weights with those of the file; where it has none they are zero."""
        for name, gradient in self.gradients(loss, self.weights).items():
            if f"{prefix}/{name}" in self.arrays:
                self.assert_equal(gradient, f"{prefix}/{name}")
            else:
                assert not gradient.any(), name

    def depths(self) -> list[tuple[str, int, int]]:
        """Return (prefix, segment, earlier segments that its loss flows through) of the file's gradients."""
        prefixes = sorted({"/".join(key.split("/")[:2]) for key in self.arrays if "/gradK" in key})
        return [
            (prefix, int(prefix.split("/")[0].removeprefix("seg")), int(prefix.partition("gradK")[2]))
            for prefix in prefixes
        ]


def check_segments(golden: Vectors, model: MemoryLM, check_state: Callable[[str, LMState], None]) -> dict[str, Tensor]:
    """Compare logits, states and the loss with the file's; return the gradients, which replace the weights."""
    ids, seg_len = golden.tensor("ids"), golden.settings["lengths"][0]
    targets = F.pad(ids[:, 1:], (0, 1), value=IGNORE)
    state, total = model.init_state(torch.arange(len(ids)), "cpu", torch.float64), torch.zeros(())
    full = torch.full((len(ids),), seg_len)
    for number, (tokens, wanted) in enumerate(zip(ids.split(seg_len, 1), targets.split(seg_len, 1), strict=True)):
        log_probs, _ = model.log_probs(tokens, full, state=state)  # in float32
        expected = golden.tensor(f"seg{number}/logits").log_softmax(-1)
        parity.assert_close(log_probs.double(), expected, f"seg{number}/logits", tolerance=1e-6)
        output = model(tokens, wanted, full, state=state)
        state, total = output.state, total + output.nll.sum()
        check_state(f"seg{number}", state)
    loss = total / (targets != IGNORE).sum()
    parity.assert_close(loss, golden.tensor("loss"), "loss", tolerance=1e-6)
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    return to_published(model)
