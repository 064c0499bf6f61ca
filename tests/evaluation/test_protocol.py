"""Lengths at test time and a text read before: weights stay, the memory is built anew; what cannot be names the key."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_mem.__main__ import main
from dist_mem.block import model_spec
from dist_mem.config import change_config
from dist_mem.config.memory_blocks import PER_BLOCK, memories_of
from dist_mem.data.shard import Index
from dist_mem.errors import EXIT_DONE, EXIT_USAGE
from dist_mem.evaluation.memory_file import read_memory_file
from dist_mem.evaluation.protocol import for_evaluation, protocol_of, tag_of
from dist_mem.evaluation.scores import Report, read_report
from dist_mem.evaluation.trained_model import TrainedModel, load_model
from dist_mem.generation.text_memory import Memory, read_text
from dist_mem.generation.text_scores import score as score_text
from dist_mem.memory import memory_class, memory_options
from dist_mem.model import MemoryLM
from dist_mem.tracking.log import METRICS_FILE, read_points
from tests.support.evaluated_runs import MEMORIES, asked, config_with, make_run
from tests.support.jobs import train_here, write_config
from tests.support.messages import refused
from tests.support.ranks import Pools
from tests.support.scored_library import (
    LENGTHS,
    MEM_LEN,
    SEG_LEN,
    TOKENIZER,
    assert_same,
    counts,
    make_config,
    make_document,
    save_weights,
    score,
)

pytestmark = pytest.mark.usefixtures("single_process")


WINDOWS = {"block_recurrent": "window", "memorizing": "cache_len"}


def score_built(index: Index, weights: MemoryLM, config: Any, *, mem_len: int, seg_len: int) -> Report:
    """The report of a model that was built with these lengths and has the same weights."""
    model = MemoryLM(model_spec(config, TOKENIZER.vocab_size)).eval()
    model.load_state_dict(weights.state_dict())
    return score(index, model, seg_len=seg_len, mem_len=mem_len)


@pytest.mark.parametrize("name", [name for name in MEMORIES if name not in ("infinite", "none", "infini")])
def test_another_memory_length_is_that_of_a_model_built_with_it(
    library: Path, index: Index, tmp_path: Path, name: str
) -> None:
    memory, length = MEMORIES[name], {"mem_len": 40}
    run_dir, model = make_run(tmp_path, library, memory)
    as_trained, longer = asked(run_dir), asked(run_dir, "eval.mem_len=40", "eval.seg_len=4")
    built = memory | ({"over": {**memory["over"], **length}} if "over" in memory else length)
    config = config_with(built, train={"seg_len": 4})
    assert longer == score_built(index, model, config, mem_len=40, seg_len=4)
    assert (longer.mem_len, longer.seg_len) == (40, 4)
    assert longer.nll != as_trained.nll
    assert asked(run_dir, f"eval.mem_len={MEM_LEN}") == as_trained


def test_blocks_that_were_trained_apart_stay_so_with_equal_lengths(library: Path, tmp_path: Path) -> None:
    """Blocks with equal memories share u and v, which a memory length of the evaluation does not change."""
    other = {"kind": "transformer_xl", "mem_len": 2 * MEM_LEN}
    memory = {"kind": PER_BLOCK, "default": MEMORIES["transformer_xl"], "1": other}
    config = config_with(memory, data={"path": str(library)})
    weights = MemoryLM(model_spec(config, TOKENIZER.vocab_size))
    save_weights(tmp_path / "apart", weights, config, step=3)
    model = load_model(tmp_path / "apart", f"eval.mem_len={2 * MEM_LEN}").model
    for name, weight in weights.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name


@pytest.mark.parametrize("name", ["block_recurrent", "memorizing"])
def test_other_segments_leave_the_windows_that_a_memory_was_trained_with(
    library: Path, index: Index, tmp_path: Path, name: str
) -> None:
    """Of T by default; written out, they are the same model."""
    memory, window = {"kind": name, **memory_class(name).small_options(SEG_LEN)}, WINDOWS[name]
    run_dir, model = make_run(tmp_path, library, memory | {window: None})
    config = config_with(memory | {window: SEG_LEN}, train={"seg_len": 2 * SEG_LEN})
    found = asked(run_dir, f"eval.seg_len={2 * SEG_LEN}")
    assert found == score_built(index, model, config, mem_len=found.mem_len, seg_len=2 * SEG_LEN)


@pytest.mark.parametrize(
    ("memory", "lengths"),
    [
        ({"default": {"kind": "transformer_xl", "mem_len": 8}, "1": {"kind": "memorizing", "mem_len": 64}}, [40, 64]),
        ({"kind": "memorizing", "mem_len": 64}, [40]),
        ({"default": {"kind": "rmt", "mem_len": 0}}, None),
        ({"default": {"kind": "rmt", "mem_len": 8}}, [40]),
    ],
)
def test_a_memory_length_is_that_of_short_term_memories(memory: dict[str, Any], lengths: list[int] | None) -> None:
    given = memory if "kind" in memory else {"kind": PER_BLOCK, **memory}
    config = change_config(config_with(memory_options(given)), {"eval.mem_len": 40})
    if lengths is None:
        with refused(ValueError, "eval.mem_len", "no short-term memory"):
            for_evaluation(config)
    else:
        built = memories_of(for_evaluation(config).memory).values()
        assert [block["mem_len"] for block in built] == lengths
        assert protocol_of(config).mem_len == 40


def test_clamped_distances_and_equal_reach_are_those_of_a_model_built_with_them(
    library: Path, index: Index, tmp_path: Path
) -> None:
    run_dir, weights = make_run(tmp_path, library, MEMORIES["transformer_xl"])
    found = asked(run_dir, "eval.clamp_len=5", "eval.same_length=true")
    config = make_config(model={"clamp_len": 5, "same_length": True})
    assert found == score_built(index, weights, config, mem_len=MEM_LEN, seg_len=SEG_LEN)
    assert len({found.nll, asked(run_dir).nll, asked(run_dir, "eval.clamp_len=5").nll}) == 3


def test_clamped_distances_of_the_training_can_be_switched_off(library: Path, index: Index, tmp_path: Path) -> None:
    run_dir, weights = make_run(tmp_path, library, MEMORIES["transformer_xl"], clamp_len=5)
    found = asked(run_dir, "eval.clamp_len=0")
    config = config_with(MEMORIES["transformer_xl"])
    assert found == score_built(index, weights, config, mem_len=MEM_LEN, seg_len=SEG_LEN)
    assert found.nll != asked(run_dir).nll == asked(run_dir, "eval.clamp_len=null").nll
    config = change_config(config, {"model.clamp_len": 5, "eval.clamp_len": 0})
    assert (protocol_of(config).clamp_len, tag_of(config)) == (None, "clamp0")
    config = change_config(config, {"model.clamp_len": None})
    assert tag_of(config) == ""


@pytest.mark.parametrize(
    ("name", "override", "key"),
    [
        ("none", "eval.mem_len=8", "memory.kind none"),
        ("infinite", "eval.mem_len=8", "memory.kind infinite"),
        ("none", "eval.same_length=true", "eval.same_length"),
        ("infini", "eval.same_length=true", "memory.kind infini"),
        ("infini", "eval.clamp_len=5", "memory.kind infini"),
        ("compressive", "eval.mem_len=20", "train.seg_len = 8"),
        ("infinite_over_lamemo", "eval.mem_len=20", "train.seg_len = 8"),
        ("infinite_over_compressive", "eval.seg_len=5", "memory.over.mem_len"),
    ],
)
def test_a_length_that_a_memory_cannot_have_is_named(
    library: Path, tmp_path: Path, name: str, override: str, key: str
) -> None:
    run_dir, _ = make_run(tmp_path, library, MEMORIES[name])
    with refused(ValueError, override.partition("=")[0], key):
        asked(run_dir, override)


def test_the_report_says_how_it_was_asked(library: Path, tmp_path: Path) -> None:
    run_dir, _ = make_run(tmp_path, library, MEMORIES["transformer_xl"])
    overrides = ["eval.mem_len=24", "eval.layout=stream", "eval.batch_size=3"]
    assert main(["evaluate", str(run_dir), "--split", "test", *overrides]) == EXIT_DONE
    written = json.loads((run_dir / "evaluations" / "test-step-00000003-M24-stream3.json").read_text())
    lengths = {"seg_len": SEG_LEN, "mem_len": 24, "clamp_len": None, "same_length": False, "max_document_len": None}
    others = {"layout": "stream", "lanes": 3, "blocks": False, "precision": "fp32", "without_memory": False}
    assert written["protocol"] == lengths | others


def test_the_protocol_and_its_name_say_what_differs_from_the_training() -> None:
    config = config_with(MEMORIES["infinite_over_lamemo"])
    assert tag_of(config) == ""
    assert str(protocol_of(config)) == "T 8, M 16, documents"
    config = change_config(config, {"eval.mem_len": 640, "eval.clamp_len": 400, "eval.same_length": True})
    config = change_config(config, {"eval.layout": "stream", "eval.batch_size": 10, "eval.seg_len": 64})
    assert tag_of(config) == "T64-M640-clamp400-same_length_true-stream10"
    assert str(protocol_of(config)) == "T 64, M 640, clamp_len 400, same_length, stream in 10 lanes"
    config = change_config(config, {"eval.max_document_len": 2000, "eval.precision": "bf16"})
    assert tag_of(config) == "T64-M640-clamp400-same_length_true-stream10-first2000-bf16"
    assert str(protocol_of(config)).endswith("stream in 10 lanes, first 2,000 tokens of each document, bf16")
    assert tag_of(make_config(eval={"mem_len": MEM_LEN, "seg_len": SEG_LEN, "same_length": False})) == ""


def test_evaluations_in_a_training_have_its_lengths(tmp_path: Path, books: Path, rank_pool: Pools) -> None:
    """Those of `eval` are for `dist-mem evaluate`."""
    found = []
    for name, lengths in {"trained": {}, "others": {"mem_len": 40, "same_length": True}}.items():
        changes = {"train": {"steps": 2}, "schedule": {"kind": "constant"}, "eval": {"every": 2, **lengths}}
        config = write_config(tmp_path / f"{name}.yaml", books, tmp_path / name, changes)
        assert rank_pool(1).run(train_here, config) == [0]
        points = [point.metrics for point in read_points(tmp_path / name / METRICS_FILE)]
        found.append(
            [point["validation/token_perplexity"] for point in points if "validation/token_perplexity" in point]
        )
    assert found[0] == found[1] and found[0]


KINDS = {**MEMORIES, "sticky": {**MEMORIES["infinite"], "sampling": "sticky"}}
REST = ["transformer_xl", "lamemo", "compressive", "infinite_over_compressive", "infinite"]
NAMES = ["infinite_over_lamemo", "sticky", "none", *(pytest.param(name, marks=pytest.mark.nightly) for name in REST)]
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom.\n"


def prepared(folder: Path, library: Path, name: str, num_tokens: int, *overrides: str) -> tuple[TrainedModel, Path]:
    """A run, and the memory file of a text of `num_tokens`."""
    run_dir, _ = make_run(folder, library, KINDS[name])
    trained = load_model(run_dir, *overrides)
    read_text(trained, TEXT[:num_tokens]).save(folder / "text.mem")
    return trained, folder / "text.mem"


def report_after(run_dir: Path, memory: Path, *overrides: str) -> Report:
    return asked(run_dir, *overrides, memory=read_memory_file(memory))


@pytest.mark.parametrize("num_tokens", [0, 3, SEG_LEN - 1, SEG_LEN, 5 * SEG_LEN + 2])
@pytest.mark.parametrize("name", [*NAMES, "transformer_xl in blocks"])
def test_every_document_is_scored_as_the_continuation_of_the_text(
    library: Path, tmp_path: Path, name: str, num_tokens: int
) -> None:
    """The same tokens as without a text; with blocks, the blocks are those of text and document together."""
    kind, _, in_blocks = name.partition(" in ")
    overrides = ["eval.blocks=true"] if in_blocks else []
    trained, path = prepared(tmp_path, library, kind, num_tokens, *overrides)
    report = report_after(tmp_path / "run", path, *overrides)
    for number, document in enumerate(report.documents):  # each scored alone after the text
        tokens = make_document(number, LENGTHS[number]).tokens.astype(np.int64)
        nll = score_text(trained, tokens, after=Memory.load(path).reading_of(trained)).nll
        assert document.nll == pytest.approx(math.fsum(nll[~nll.isnan()].tolist()), rel=1e-6)
    if num_tokens == 0 and name != "sticky":  # which draws by the number of a document
        assert_same(report, asked(tmp_path / "run", *overrides))
    if num_tokens == 3 and not in_blocks:
        assert counts(report) == counts(asked(tmp_path / "run"))


@pytest.mark.parametrize(
    "override", ["eval.batch_size=1", "eval.batch_size=9", "train.micro_batch_size=1", "train.micro_batch_size=99"]
)
def test_lanes_do_not_change_the_report_of_what_follows_a_text(library: Path, tmp_path: Path, override: str) -> None:
    _, path = prepared(tmp_path, library, "infinite_over_lamemo", 21)
    assert_same(report_after(tmp_path / "run", path, override), report_after(tmp_path / "run", path))


def test_a_document_cut_short_keeps_its_length_after_a_text(library: Path, tmp_path: Path) -> None:
    _, path = prepared(tmp_path, library, "transformer_xl", 21)
    report = report_after(tmp_path / "run", path, "eval.max_document_len=10")
    assert [document.num_scored for document in report.documents] == [min(length, 10) for length in LENGTHS]


def test_the_command_says_after_what_and_writes_apart(
    library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = prepared(tmp_path, library, "transformer_xl", 21)
    command = ["evaluate", str(tmp_path / "run"), "--split", "test", "eval.batch_size=3"]
    assert main(command) == EXIT_DONE
    assert main([*command, "--memory", str(path)]) == EXIT_DONE
    assert "documents, after text (21 tokens)" in capsys.readouterr().out
    name = f"test-step-00000003-{read_memory_file(path).tag}"
    written = tmp_path / "run" / "evaluations" / f"{name}.json"
    assert read_report(written) == report_after(tmp_path / "run", path)
    facts = json.loads(written.read_text())["memory_file"]
    assert facts["path"] == str(path) and facts["texts"][0]["num_tokens"] == 21
    assert main([*command, "--memory", str(path), "eval.layout=stream"]) == EXIT_USAGE
    assert "eval.layout is stream, whose lanes begin within documents: set eval.layout=documents" in (
        capsys.readouterr().err
    )
    assert main([*command, "--memory", str(path), "eval.seg_len=4"]) == EXIT_USAGE
    assert "give eval.seg_len=8, or read the text again" in capsys.readouterr().err
