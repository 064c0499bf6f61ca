"""How much an infinite memory has kept: the measure, against cases whose answer is known."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_mem.errors import UnusableError
from dist_mem.memory import memory_class
from dist_mem.memory.infinite import Infinite
from dist_mem.memory.parts import signal_inspection
from dist_mem.memory.parts.signal_places import append
from dist_mem.papers.regression_error import Errors, Watch, run
from dist_mem.runtime import progress
from dist_mem.runtime.locks import hold_file
from tests.support.evaluated_runs import make_run
from tests.support.infinite_memories import SEG_LEN, WIDTH, memory_of, smooth
from tests.support.messages import refused
from tests.support.scored_library import write_other

FINE: dict[str, Any] = {
    **{"num_basis": 64, "basis_widths": [0.02, 0.05], "num_samples": 64, "tau": 0.8, "ridge": 1e-4},
    "gate": False,
}


def errors_of(memory: Infinite, segments: list[Tensor], documents: int = 1) -> Errors:
    watch = Watch(memory)
    hook = memory.register_forward_hook(watch)
    for document in range(documents):
        state = memory.init_state(torch.tensor([document]), "cpu", torch.float64)
        for x in segments:
            state = memory(x, state, torch.full((1,), SEG_LEN)).state
        watch.end_document()
    hook.remove()
    return watch.errors()


def random_segments(number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, SEG_LEN, WIDTH, generator=generator, dtype=torch.float64) for _ in range(number)]


def slow_segments(number: int) -> list[Tensor]:
    """One slowly changing signal, cut into segments."""
    places = torch.arange(number * SEG_LEN, dtype=torch.float64) / (number * SEG_LEN)
    return list(smooth(places).repeat(1, WIDTH // 2)[None].split(SEG_LEN, dim=1))


def test_few_rows_under_many_functions_are_kept_whole() -> None:
    found = errors_of(memory_of(**FINE), random_segments(2))  # the second segment reads the first
    assert found.all_rows < 1e-6
    assert found.newest == found.all_rows


def test_a_stiff_ridge_keeps_nothing() -> None:
    assert errors_of(memory_of(**{**FINE, "ridge": 1e9}), random_segments(4)).all_rows > 0.999


def test_more_functions_keep_more() -> None:
    def error(num_basis: int) -> float:
        options = {**FINE, "ridge": 0.1, "num_basis": num_basis, "basis_widths": [1.0 / num_basis, 2.0 / num_basis]}
        return errors_of(memory_of(**options), random_segments(6)).all_rows

    few, some, many = error(8), error(16), error(64)
    assert many < some < few < 1.0


@pytest.mark.parametrize("sampling", ["linear", "stratified"])
def test_rows_are_looked_for_where_the_contractions_have_moved_them(
    sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow signal is given back after three contractions, there and not elsewhere."""
    memory = memory_of(**{**FINE, "sampling": sampling, "num_samples": 256})
    assert errors_of(memory, slow_segments(5)).all_rows < 0.1

    def leave(places: Tensor, *update: Any, is_first: bool) -> Tensor:
        return torch.cat([places, append(places, *update, is_first=is_first)[len(places) :]])

    monkeypatch.setattr(signal_inspection, "append", leave)
    assert errors_of(memory, slow_segments(5)).all_rows > 0.3


def test_a_memory_that_forgets_is_asked_for_what_came_after() -> None:
    forgetful = errors_of(memory_of(**FINE, memory_threshold=SEG_LEN), random_segments(4))
    assert forgetful.all_rows < 1e-6  # of the last rows only: those before have been given up, not lost
    assert errors_of(memory_of(**FINE), random_segments(4)).all_rows > 1e-3


def test_documents_are_apart() -> None:
    memory = memory_of(**FINE)
    once, thrice = (errors_of(memory, random_segments(4), documents) for documents in (1, 3))
    assert thrice.num_documents == 3
    assert thrice[:2] == pytest.approx(once[:2])


@pytest.mark.usefixtures("single_process")
def test_what_another_protocol_limit_or_other_data_give_does_not_take_the_place_of_the_runs_own(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    memory = {"kind": "infinite", "num_basis": 16, "basis_widths": [0.1, 0.2], "num_samples": 24}
    make_run(tmp_path, library, {**memory, "over": {"kind": "none"}})
    folder = tmp_path / "run" / "evaluations"
    other, other_tag = write_other(tmp_path / "other")
    # documents are read whatever the layout
    names = {"": "", "eval.seg_len=4": "-T4", "eval.layout=stream": "", f"data.path={other}": other_tag}
    for override, tag in names.items():
        assert run(tmp_path / "run", split="test", overrides=[override] if override else []) == 0
        found = json.loads((folder / f"inspect-test-step-00000003{tag}.json").read_text(encoding="utf-8"))
        assert found["protocol"]["seg_len"] == (4 if tag == "-T4" else 8)
        assert found["protocol"]["lanes"] is None
    assert run(tmp_path / "run", split="test", limit=1) == 0
    limits = {path.stem.rpartition("-")[2]: json.loads(path.read_text())["limit"] for path in folder.glob("*.json")}
    assert len(limits) == 4
    assert limits["limit1"] == 1
    with hold_file(folder / "inspect-test-step-00000003-limit1.json"), refused(UnusableError, "limit1.json"):
        run(tmp_path / "run", split="test", limit=1)
    assert "reading test: 260 of 260 tokens" in capsys.readouterr().err


@pytest.mark.usefixtures("single_process")
def test_errors_are_of_the_blocks_that_have_such_a_memory(library: Path, tmp_path: Path) -> None:
    infinite = {"kind": "infinite", **memory_class("infinite").small_options(8), "over": {"kind": "none"}}
    make_run(tmp_path / "one", library, {"kind": "per_block", "default": {"kind": "none"}, "1": infinite})
    assert run(tmp_path / "one" / "run", split="test") == 0
    (report,) = (tmp_path / "one" / "run" / "evaluations").glob("*.json")
    assert [layer["layer_index"] for layer in json.loads(report.read_text())["layers"]] == [1]
    longer = {**infinite, "over": {"kind": "transformer_xl", "mem_len": 1024}}  # nothing leaves the memory below
    make_run(tmp_path / "two", library, {"kind": "per_block", "default": infinite, "1": longer})
    with refused(ValueError, "block 1", "longer documents"):
        run(tmp_path / "two" / "run", split="test")
