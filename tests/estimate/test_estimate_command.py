"""`dist-mem estimate`: what fits, what does not and why, and other devices."""

import importlib
import json
import re
from types import ModuleType
from typing import Any

import pytest

from dist_mem.__main__ import main
from dist_mem.config import load_config
from dist_mem.estimate.job_estimate import JobEstimate
from dist_mem.estimate.memory import training_parts
from dist_mem.estimate.search import Candidate, Cluster
from dist_mem.estimate.step_time import CheckpointCost, StepTime
from dist_mem.estimate.vocabulary import vocab_size_of
from dist_mem.estimate.zero import job_of, sizes_of
from dist_mem.memory import memory_options
from dist_mem.nn.layers import DTYPES
from dist_mem.runtime.devices import device_named
from tests.support.messages import said
from tests.support.paths import ROOT

STAGE_0 = "deepspeed.zero_optimization.stage=0"
SMALL = [str(ROOT / "configs" / "demo.yaml"), "model.num_layers=3", "train.global_batch_size=64", "train.steps=200"]


def plan(*arguments: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the plan as JSON."""
    assert main(["estimate", *SMALL, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def refusal(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error of a plan that ends with exit code 2."""
    assert main(["estimate", *SMALL, *arguments]) == 2
    return capsys.readouterr().err


def test_a_plan_adds_up_and_more_ranks_need_less_memory(capsys: pytest.CaptureFixture[str]) -> None:
    one, eight = (plan("--gpu", "h100-80gb", "--gpus", number, capsys=capsys) for number in ("1", "8"))
    choices = {tuple(each["settings"].values())[1:3] for each in one["settings"]}
    assert {("feed_forward", 1.0), ("blocks", 0.5)} < choices
    for found in (one, eight):
        memory, update = found["memory"], found["update"]
        assert memory["fits"] and sum(memory["parts"].values()) == memory["total"]
        spent = sum(update["fused"].values()) + sum(
            update[part] for part in ("products", "streams", "update", "exposed")
        )
        assert spent == pytest.approx(update["total"]) and 0 < found["mfu_bound"] < 1
    assert eight["memory"]["total"] < one["memory"]["total"]


def test_a_proposal_changes_something() -> None:
    """`faster with : 18.2 GiB`: the same settings, counted with another attention."""
    time = StepTime(0.5, {}, 0.3, 0.2, 0.0, 0.0)
    same = Candidate({"train.micro_batch_size": 1}, {}, [], time._replace(products=0.1))
    cluster, cost = Cluster(device_named("h100-80gb"), 1, 1), CheckpointCost(1, 1.0, 1.0)
    job = JobEstimate("one", cluster, [], time, None, None, 1, 0.3, cost, [same])
    assert job.proposal is None


def test_the_lanes_of_evaluations_are_counted_as_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    """200,000 lanes on three ranks, of which the start counts the most that one has."""
    words = ["eval.every=100", "eval.batch_size=200000"]
    found = plan(*words, "--gpu", "h100-80gb", "--gpus", "3", capsys=capsys)["memory"]
    config = load_config([*SMALL, *words], memory_options=memory_options)
    job = job_of(config, vocab_size_of(config.data, config.model), world_size=3, on_gpu=True)
    parts = training_parts(job, config.eval, eval_lanes=200_000)
    lane_bytes = sizes_of(job.spec, DTYPES[config.train.precision]).lane_bytes
    assert parts[-1].num_bytes == 66_667 * lane_bytes
    assert found["parts"] == {part.what: part.num_bytes for part in parts}


def test_no_setting_loses_the_sums_of_gradients_in_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    """Stages 0 and 1 add up gradients in bf16; with one backward, or in fp32, they lose nothing."""

    def stages(*words: str) -> set[int]:
        small = ["--gpu", "h100-80gb", "model.num_layers=1", "memory.kind=none"]
        found = plan(*small, *words, capsys=capsys)["settings"]
        same = [one["settings"] for one in found if "train.micro_batch_size" not in one["changes"]]
        return {one["deepspeed.zero_optimization.stage"] for one in same}

    assert stages("train.precision=bf16") == {2, 3}
    assert stages("train.precision=fp32") == {0, 1, 2, 3}
    one = ["train.global_batch_size=2", "train.micro_batch_size=2"]
    assert stages("train.precision=fp16", *one) == {1, 2, 3}
    sums = "deepspeed.data_types.grad_accum_dtype=fp32"
    assert stages("train.precision=bf16", sums, *one) == {0, 2, 3}, "the start refuses stage 1"
    said(refusal("train.precision=fp16", STAGE_0, "--gpu", "h100-80gb", capsys=capsys), "train.precision")


def test_three_settings_are_shown_and_every_one_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for more in ([], ["--all"]):
        assert main(["estimate", *SMALL, "--gpu", "cpu", *more]) == 0
        shown[len(more)] = capsys.readouterr().out
    settings = [len(re.findall(r"^[0-3] +[a-z]", shown[number], re.MULTILINE)) for number in (0, 1)]
    assert settings == [3, 10]  # at stages 2 and 3, which add up gradients in fp32
    assert "per process" in shown[0] and "GPU" not in shown[0]


def test_gpus_without_a_lane_are_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *SMALL, "train.micro_batch_size=32", "--gpu", "h100-80gb", "--gpus", "8"]) == 0
    warning = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("warning"))
    assert "6 of 8 GPUs have no lane: 192 idle lanes" in warning


def test_what_does_not_fit_is_refused_with_the_nearest_change_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    large = ["train.micro_batch_size=64", "train.seg_len=512", "memory.mem_len=512", "model.num_layers=8"]
    large += ["model.d_model=2048", "model.d_inner=8192"]
    error = refusal(*large, "--gpu", "rtx-4090", capsys=capsys)
    assert "it fits with train.micro_batch_size=" in error and "the largest part is" in error
    assert "train.seg_len = 512" in error
    huge = ["model.d_model=16384", "model.d_inner=65536", "train.precision=fp16"]
    assert "use more GPUs or a smaller model" in refusal(*huge, "--gpu", "v100-16gb", capsys=capsys)


def test_a_device_without_the_precision_and_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, named in (
        (["train.precision=bf16", "--gpu", "v100-32gb"], "'bf16'"),
        (["--gpu", "abacus"], "abacus"),
        (["--gpu", "cpu", "--disk", "0"], "--disk"),
    ):
        said(refusal(*arguments, capsys=capsys), named)


@pytest.mark.parametrize(
    ("site", "on_node"),
    [([str(ROOT / "launch" / "sites" / "cpu.yaml")], 4), (["launch.directives=['--gres=gpu:a100:2']"], 2)],
)
def test_a_node_has_the_ranks_that_the_job_starts_on_it(
    site: list[str], on_node: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(*site, "model.num_layers=1", "--gpu", "cpu", "--gpus", "4", capsys=capsys)
    assert found["gpus_per_node"] == on_node


def test_gpus_per_node_that_no_job_can_have_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said(refusal("launch.gpus_per_node=a100", "--gpu", "h100-80gb", capsys=capsys), "launch.gpus_per_node")


MEMORIES = ["none", "causal", "transformer_xl", "compressive", "lamemo", "infinite"]
MEMORIES += ["infinite over transformer_xl", "infinite over causal", "memorizing"]
MEMORIES += ["infini", "linear", "rmt", "titans", "block_recurrent"]
SETTINGS = ["fp32", "bf16", "bf16, checkpointing"]
TRAININGS = [f"{memory}, {setting}" for memory in MEMORIES for setting in SETTINGS]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/estimate.py."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return importlib.import_module("estimate")


@pytest.mark.parametrize("case", TRAININGS)
def test_the_prediction_is_within_15_percent_of_a_training(case: str, benchmark: ModuleType) -> None:
    """DeepSpeed's own run in its own process, in fp32 and bf16, with and without activation checkpointing."""
    cases = benchmark.cases("memories")
    assert sorted(cases) == sorted(TRAININGS)
    num_ranks, keys = cases[case]
    settings = [*benchmark.BASE, *keys, "model.num_layers=3"]
    used = benchmark.measured(num_ranks, settings, "allocated")
    assert benchmark.predicted(num_ranks, settings) == pytest.approx(used, rel=0.15)
