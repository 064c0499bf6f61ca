"""The passage that every evaluation of a training reads: its figures, and that they change nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.block import model_spec
from dist_mem.config import change_config, load_config
from dist_mem.data.batch import IGNORE, Batch
from dist_mem.data.shard import Index, read_index
from dist_mem.data.tokenizers.registry import load_tokenizer
from dist_mem.evaluation.probe import BANDS, PREFIX, open_passage, passage_metrics, state_metrics
from dist_mem.evaluation.protocol import protocol_of
from dist_mem.evaluation.scoring import score_split
from dist_mem.memory import memory_kinds
from dist_mem.model import LMState, MemoryLM
from dist_mem.tracking.log import METRICS_FILE, read_points
from tests.support.contract_cases import CASES
from tests.support.jobs import losses, train_here, write_config
from tests.support.ranks import Pools
from tests.support.run_memories import small_memory
from tests.support.scored_library import ALONE

SEGMENTS, GAIN = 6, "memory/gain"
FULL_OR_NOT = ("compressive", "lamemo", "transformer_xl")  # memories that hold the newest tokens


@pytest.fixture
def validation(books: Path) -> Index:
    return read_index(books / "validation")


def model_of(case: str, tmp_path: Path, books: Path) -> tuple[Any, MemoryLM]:
    path = write_config(tmp_path / "run.yaml", books, tmp_path / "run")
    config = load_config([str(path), "train.seg_len=4", f"eval.passage={SEGMENTS}"])
    config = change_config(config, {"memory": CASES[case]})
    config = change_config(config, {"model.init_std": 0.3})
    torch.manual_seed(1)
    return config, MemoryLM(model_spec(config, load_tokenizer(books).vocab_size)).eval()


def init_of(model: MemoryLM) -> Callable[[Tensor], LMState]:
    return lambda document_ids: model.init_state(document_ids, "cpu", torch.float32)


def figures_of(model: MemoryLM, config: Any, index: Index, books: Path) -> dict[str, float]:
    bos_id = load_tokenizer(books).bos_id
    passage = open_passage(index, protocol_of(config), num_segments=config.eval.passage, bos_id=bos_id)
    return passage_metrics(model, init_of(model), model.memories(), passage, torch.device("cpu")).metrics


SUMMARISING = ("infini", "rmt", "rmt_rows")  # they read rows that hold something of all earlier tokens
NO_ROWS = ("none", "causal", "linear", "armt", *SUMMARISING)  # of tokens in the memory, nor a signal


@pytest.mark.parametrize("kind", [*memory_kinds(), "infinite over transformer_xl", "infinite over compressive"])
def test_shares_are_shares_and_bands_sum_to_the_whole(
    kind: str, tmp_path: Path, books: Path, validation: Index
) -> None:
    config, model = model_of(kind, tmp_path, books)
    found = figures_of(model, config, validation, books)
    for name in ("attention", "signal"):
        if PREFIX + name in found:
            assert 0.0 < found[PREFIX + name] <= 1.0
            total = sum(found[f"{PREFIX}{name}_{band}"] for band, _, _ in BANDS)
            assert total == pytest.approx(found[PREFIX + name], abs=1e-6)
    assert ("memory/attention" in found) == (kind not in ("infinite", *NO_ROWS))
    assert ("memory/summary" in found) == (kind in SUMMARISING) and 0.0 < found.get("memory/summary", 0.5) < 1.0
    assert ("memory/signal" in found) == kind.startswith("infinite")
    assert ("memory/alpha" in found) == (kind == "lamemo") and 0.0 <= found.get("memory/alpha", 0.0) <= 1.0
    assert ("memory/compression_loss" in found) == ("compressive" in kind)
    assert ("memory/regression_error" in found) == kind.startswith("infinite")
    assert (found["memory/gain"] == 0.0) == (kind in ("none", "causal"))
    if kind not in ("none", "causal"):
        assert found["memory/state_norm"] > 0.0 and 1.0 <= found["memory/effective_rank"] <= config.model.d_model + 1e-3


@pytest.mark.parametrize(("rows_dim", "rank"), [(-2, 1), (-2, 4), (1, 4)])
def test_rows_are_those_of_each_head_and_the_rank_is_that_of_its_matrix(rows_dim: int, rank: int) -> None:
    """Matrices of a known rank, with an empty row, in either order of heads and rows."""
    generator = torch.Generator().manual_seed(0)
    bases = torch.linalg.qr(torch.randn(2, 6, 6, generator=generator)).Q[:, :rank]  # of equal singular values
    heads = torch.cat([bases, torch.zeros(2, 1, 6)], dim=1)  # (H, rows, K)
    rows = heads if rows_dim == -2 else heads.transpose(0, 1)
    found = state_metrics([((rows[None], torch.zeros(1)), rows_dim)])
    assert found == {"state_norm": pytest.approx(1.0), "effective_rank": pytest.approx(rank)}


def test_gain_is_the_difference_of_two_evaluations(tmp_path: Path, books: Path, validation: Index) -> None:
    """Of the one document that the passage is of; a passage of no segments has none."""
    config, model = model_of("transformer_xl", tmp_path, books)
    found = figures_of(model, config, validation, books)
    config = change_config(config, {"eval.max_document_len": SEGMENTS * 4})
    given: dict[str, Any] = {"config": config, "index": validation, "tokenizer": load_tokenizer(books), "world": ALONE}
    reports = [score_split(model, init_of(model), **given, without_memory=without) for without in (False, True)]
    gain = reports[1].documents[0].nll - reports[0].documents[0].nll
    assert found["memory/gain"] == pytest.approx(gain / (SEGMENTS * 4), abs=1e-6)
    config = change_config(config, {"eval.passage": 0})
    assert figures_of(model, config, validation, books) == {}


def test_the_gain_is_per_scored_token_and_none_where_none_is_scored(tmp_path: Path, books: Path) -> None:
    """As of a recall task, whose document begins with what is asked for at its end."""
    config, model = model_of("transformer_xl", tmp_path, books)
    index, bos_id = read_index(books / "validation"), load_tokenizer(books).bos_id
    passage = open_passage(index, protocol_of(config), num_segments=SEGMENTS, bos_id=bos_id)

    def metrics_of(batches: list[Batch]) -> dict[str, float]:
        return passage_metrics(model, init_of(model), model.memories(), batches, torch.device("cpu")).metrics

    whole = metrics_of(passage)[GAIN]
    silent = [batch._replace(targets=torch.full_like(batch.targets, IGNORE)) for batch in passage]
    assert GAIN not in metrics_of(silent)
    first = metrics_of([*passage[:3], *silent[3:]])[GAIN]
    last = metrics_of([*silent[:3], *passage[3:]])[GAIN]
    assert (first + last) / 2 == pytest.approx(whole, rel=1e-4, abs=1e-7)


def test_idle_lanes_are_no_lanes_whose_memory_is_not_full(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    """Five lanes on two ranks are six, or three twice; an emptied memory is not full either."""
    found = {}
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", {"train": {"steps": 2}, "eval": {"every": 2}})
    cases = {"one": (1, ["train.micro_batch_size=5"]), "two": (2, []), "reset": (2, ["train.reset=segment"])}
    for name, (ranks, changes) in cases.items():
        changed = [f"run_dir={tmp_path / name}", "train.global_batch_size=5", *changes]
        assert rank_pool(ranks).run(train_here, config, changed) == [0] * ranks
        points = [point.metrics for point in read_points(tmp_path / name / METRICS_FILE) if GAIN in point.metrics]
        found[name] = [point.get("memory/full_lanes") for point in points]
    assert found["one"] == found["two"] != [0.0] and found["reset"] == [None]


@pytest.mark.parametrize("kind", memory_kinds())
def test_training_logs_them_and_is_the_same_without_at_every_stage(
    kind: str, tmp_path: Path, books: Path, rank_pool: Pools
) -> None:
    config = write_config(tmp_path / "run.yaml", books, tmp_path / "run", memory=small_memory(kind))
    points = {}
    for stage, passage in ((0, 4), (3, 4), (3, 0)):
        run_dir = tmp_path / f"stage-{stage}-{passage}"
        changes = [f"run_dir={run_dir}", "eval.every=2", "eval.max_document_len=64", "train.steps=4"]
        changes += [f"eval.passage={passage}", "eval.figures=true", f"deepspeed.zero_optimization.stage={stage}"]
        assert rank_pool(2).run(train_here, config, changes) == [0, 0]
        logged = [dict(point.metrics) for point in read_points(run_dir / METRICS_FILE)]
        points[stage, passage] = losses(run_dir), [point for point in logged if "memory/gain" in point]
        drawn = sorted(path.name for path in run_dir.glob("figures/*.svg"))
        has_picture = passage > 0 and kind not in NO_ROWS
        assert drawn == ["passage-step-00000002.svg", "passage-step-00000004.svg"] * has_picture
    assert points[3, 4][0] == points[3, 0][0]
    assert points[3, 0][1] == [] and len(points[3, 4][1]) == 2
    assert all(("memory/full_lanes" in point) == (kind in FULL_OR_NOT) for point in points[3, 4][1])
    for first, other in zip(points[0, 4][1], points[3, 4][1], strict=True):
        assert first == pytest.approx(other, rel=1e-4, abs=1e-5)
