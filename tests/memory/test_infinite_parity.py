"""The infinity-former's memory against the authors' code (tests/golden/infinite), in float64.

With the stored regression matrices to 1e-9; with our own to 2e-5, because the published positions are float32 numbers.
Theirs orders basis functions by centre, then width; ours by width, then centre.
"""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_mem.memory.infinite import Infinite
from dist_mem.memory.parts import basis
from dist_mem.memory.parts.basis import Fit, evaluate_basis, expected_basis
from dist_mem.memory.parts.signal import SignalState
from tests.support import paths
from tests.support.published_infinite import WEIGHTS, GivenQueries, assert_close, layer_spec, ours, theirs

GOLDEN = paths.GOLDEN / "infinite"
INJECTED, RECOMPUTED = 1e-9, 2e-5  # golden README
PUBLISHED = {
    "gpt2": {"basis_widths": [0.005, 0.01], "prior_mean": -1.0},
    "sort": {"basis_widths": [0.01, 0.05], "variance_floor": 1e-6},
}


class Golden:
    """One module-level file, and our module with its weights."""

    def __init__(self, name: str) -> None:
        self.arrays = dict(np.load(GOLDEN / f"{name}.npz"))
        if name == "gpt2_geom512_linear":
            self.arrays |= np.load(GOLDEN / "gpt2_geom512_rows.npz")
        self.variant = name.split("_")[0]
        sizes = self.arrays["meta_L_N_M_e_H_batch_qlen_calls"].tolist()
        self.num_rows, self.num_basis, self.num_samples, self.d_model, self.num_heads = sizes[:5]
        self.num_lanes, self.num_queries, self.num_calls = sizes[5:]
        self.tau, self.ridge = self.arrays["meta_tau_ridge"].tolist()

    def __getitem__(self, key: str) -> Tensor:
        value = torch.from_numpy(self.arrays[key])
        return value.double() if value.is_floating_point() else value

    def module(self, **changes: Any) -> Infinite:
        sizes = {"num_basis": self.num_basis, "num_samples": self.num_samples, "tau": self.tau, "ridge": self.ridge}
        options = Infinite.Options(kl_weight=0.01, **sizes, **{**PUBLISHED[self.variant], **changes})
        spec = layer_spec(
            d_model=self.d_model, num_heads=self.num_heads, d_head=self.d_model // self.num_heads, seg_len=self.num_rows
        )
        module = Infinite(spec, options, GivenQueries(spec, object())).double()
        densities = ours(torch.cat([self["w_mu_weight"], self["w_sigma_weight"]]), 1)
        module.load_state_dict({"densities": densities} | {WEIGHTS[name]: self[f"w_{name}"] for name in WEIGHTS})
        return module

    def stored_fit(self) -> Fit:
        first, update = ours(self[f"G_first_{self.num_rows}"], 1).T, ours(self["G_inf"], 1).T
        past, new = update.split([self.num_samples, self.num_rows], dim=1)
        return Fit(first, past, new, past @ ours(self["samples_psi"], 1))


class Call:
    """One call of our module on the inputs of call `number`, with gradients."""

    def __init__(self, golden: Golden, module: Infinite, state: SignalState, number: int) -> None:
        prefix = f"c{number}"
        self.rows = golden[f"{prefix}_k"].requires_grad_()
        self.query = golden[f"{prefix}_q"].requires_grad_()
        below = module.over
        assert isinstance(below, GivenQueries)
        below.query = self.query.transpose(0, 1)
        pending = state._replace(pending=self.rows, has_pending=torch.ones(golden.num_lanes, dtype=torch.bool))
        self.signal, _ = module.append_pending(pending, torch.float64)
        readable = module.project_signal(self.signal, torch.float64)
        self.mu, self.variance = module.density(below.query, readable.keys).moments()
        contexts: list[Tensor] = []
        hook = module.output.register_forward_pre_hook(lambda _, inputs: contexts.append(inputs[0]))
        x = torch.zeros(golden.num_lanes, golden.num_queries, golden.d_model, dtype=torch.float64)
        self.output = module(x, pending, torch.full((golden.num_lanes,), golden.num_queries))
        hook.remove()
        self.context = contexts[0]
        loss = (self.output.y * golden[f"{prefix}_lossw"]).sum() + self.output.aux["kl"].mean()
        module.zero_grad()
        loss.backward()


def assert_call(golden: Golden, module: Infinite, call: Call, number: int, tolerance: float) -> None:
    prefix, stride = f"c{number}", -(-golden.num_basis // golden[f"c{number}_B"].shape[1])
    assert_close(theirs(call.signal, 1)[:, ::stride], golden[f"{prefix}_B"], tolerance, "states")
    assert torch.equal(call.output.state.coefficients, call.signal)
    assert_close(call.mu.transpose(0, 1), golden[f"{prefix}_mu"], tolerance)
    assert_close(call.variance.transpose(0, 1), golden[f"{prefix}_sigma_sq"], tolerance)
    assert_close(call.context, golden[f"{prefix}_ctx_heads"], tolerance)
    assert_close(call.output.y, golden[f"{prefix}_out"], tolerance)
    assert_close(call.output.aux["kl"], 0.01 * golden[f"{prefix}_kl"].mean((1, 2)), tolerance)
    if f"{prefix}_Epsi" in golden.arrays:
        expected = expected_basis(golden[f"{prefix}_mu"], golden[f"{prefix}_sigma_sq"], **module.basis)
        assert_close(theirs(expected, -1), golden[f"{prefix}_Epsi"], INJECTED)
    if f"{prefix}_grad_k" in golden.arrays:
        assert_gradients(golden, module, call, prefix, tolerance)


def assert_gradients(golden: Golden, module: Infinite, call: Call, prefix: str, tolerance: float) -> None:
    for name, own_name in WEIGHTS.items():
        parameter = module.get_parameter(own_name)
        assert parameter.grad is not None
        assert_close(parameter.grad, golden[f"{prefix}_grad_{name}"], tolerance, "gradients")
    assert module.densities.grad is not None
    for row, name in enumerate(("mu", "sigma")):
        expected = golden[f"{prefix}_grad_{name}_weight"]
        assert_close(theirs(module.densities.grad, 1)[row : row + 1], expected, tolerance, "gradients")
    assert call.query.grad is not None and call.rows.grad is not None
    assert_close(call.query.grad, golden[f"{prefix}_grad_q"], tolerance, "gradients")
    expected = golden[f"{prefix}_grad_k"]
    assert_close(call.rows.grad[:, :: -(-golden.num_rows // expected.shape[1])], expected, tolerance, "gradients")


def run(golden: Golden, module: Infinite, tolerance: float) -> None:
    state = module.init_state(torch.arange(golden.num_lanes), "cpu", torch.float64)
    for number in range(golden.num_calls):
        histogram, key = state.histogram, f"c{number}_sticky_ts"
        injected = mock.patch.object(module, "positions", lambda _, key=key: golden[key])
        if key in golden.arrays:
            masses = histogram / histogram.sum(1, keepdim=True)
            assert_close(masses, golden[f"c{number}_sticky_p"], tolerance, "states")
            with injected:
                call = Call(golden, module, state, number)
        else:
            call = Call(golden, module, state, number)
        assert_call(golden, module, call, number, tolerance)
        state = call.output.state


@pytest.mark.parametrize("name", ["gpt2_tiny_linear", "gpt2_tiny_sticky", "sort_tiny", "gpt2_geom512_linear"])
def test_the_module_with_our_and_with_the_stored_matrices(name: str) -> None:
    """The published geometry, L = N = M = 512, too: there the condition number is 5e5, and no matrices are stored."""
    golden = Golden(name)
    module = golden.module(sampling="sticky" if name.endswith("sticky") else "linear")
    run(golden, module, RECOMPUTED)
    if name != "gpt2_geom512_linear":
        stored = {(module.geometry, torch.device("cpu"), torch.float64): golden.stored_fit()}
        with mock.patch.dict(basis._SOLVED, stored):
            run(golden, module, INJECTED)


def test_basis_functions_their_expectations_and_gradients() -> None:
    """Theirs are gradients with respect to mu / v and -1 / (2 v)."""
    arrays = {key: torch.from_numpy(value).double() for key, value in np.load(GOLDEN / "basis.npz").items()}
    settings: dict[str, Any] = {"widths": (0.005, 0.01), "num_basis": len(arrays["basis_mu"])}
    assert_close(theirs(evaluate_basis(arrays["t"], **settings), 1), arrays["psi_t"], INJECTED)
    theta = arrays["theta"].requires_grad_()
    mu, variance = -0.5 * theta[:, 0] / theta[:, 1], -0.5 / theta[:, 1]
    expected = theirs(expected_basis(mu, variance, **settings), 1)
    assert_close(expected, arrays["Epsi"], INJECTED)
    (gradient,) = torch.autograd.grad((expected * arrays["upstream"]).sum(), theta)
    assert_close(gradient, arrays["grad_theta"], INJECTED, "gradients")
