"""What memory changed, and the counterfactual: properties over every memory, and equality with the evaluations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from dist_mem.config.memory_blocks import PER_BLOCK, kinds_of
from dist_mem.data.documents import Document, Documents
from dist_mem.data.shard import Index
from dist_mem.errors import UnusableError
from dist_mem.evaluation.trained_model import TrainedModel, init_state, load_model
from dist_mem.inspection.counterfactual import Passage, remove_passages
from dist_mem.inspection.looked import mass_by_span, mass_in, memory_rows
from dist_mem.inspection.reading import first_border, has_memory, read_document, text_document
from dist_mem.inspection.walk import losses_of, walk
from dist_mem.memory import memory_class, memory_kinds
from dist_mem.memory.base import Inspectable, named_tensors
from dist_mem.memory.lamemo import LaMemo
from dist_mem.memory.none import NoMemory
from dist_mem.memory.parts.inspector import Inspector
from dist_mem.memory.transformer_xl import TransformerXL
from dist_mem.tracking.progress import Progress
from tests.evaluation.test_protocol import MEMORIES, asked, make_run
from tests.evaluation.test_without_memory import emptied
from tests.support.messages import refused
from tests.support.scored_library import LENGTHS, SEG_LEN, TOKENIZER

KINDS: dict[str, dict[str, Any]] = {
    **{kind: {"kind": kind, **memory_class(kind).small_options(SEG_LEN)} for kind in memory_kinds()},
    **{name: memory for name, memory in MEMORIES.items() if "_over_" in name},
    "sticky": {**MEMORIES["infinite"], "sampling": "sticky"},
    "gibbs": {**MEMORIES["infinite"], "density": "gibbs", "sampling": "sticky"},
    "infinite_over_causal": {**MEMORIES["infinite"], "over": {"kind": "causal"}},  # the papers' dialogue model
    "infinite_over_infini": {**MEMORIES["infinite"], "over": {"kind": "infini"}},
    "per_block": {"kind": PER_BLOCK, "default": MEMORIES["transformer_xl"], "1": MEMORIES["infinite"]},
    "per_block_with_infini": {"kind": PER_BLOCK, "default": MEMORIES["transformer_xl"], "1": {"kind": "infini"}},
}


def inspectable(kind: str) -> type[Inspectable]:
    found = memory_class(kind)
    assert issubclass(found, Inspectable)
    return found


UNFORGETTING = {kind for kind in memory_kinds() if inspectable(kind).forget is Inspectable.forget}
REFUSING = [kind for kind, block in KINDS.items() if UNFORGETTING & {used for _, used in kinds_of(block)}]
FORGETTING = [kind for kind in KINDS if kind not in REFUSING]
Subject: TypeAlias = tuple[TrainedModel, Document]
LONGEST = 0  # number of the document of 100 tokens: 12 segments and a half


def opened(library: Path, index: Index, folder: Path, kind: str) -> tuple[TrainedModel, Document]:
    """Return a model with this memory, and the longest document."""
    sizes = {"kind": "gpt2", "num_positions": SEG_LEN} if kind.endswith("causal") else {}
    run_dir, _ = make_run(folder, library, KINDS[kind], **sizes)
    documents = Documents(index, np.array(LENGTHS), bos_id=TOKENIZER.bos_id)
    return load_model(run_dir), documents.open(LONGEST)


@pytest.fixture(params=KINDS)
def subject(request: pytest.FixtureRequest, library: Path, index: Index, tmp_path: Path) -> Subject:
    return opened(library, index, tmp_path, request.param)


def test_reading_is_evaluating_bit_for_bit(subject: Subject) -> None:
    """In one lane, as the model scores it without anybody looking."""
    trained, document = subject
    reading = read_document(trained, document)
    with Progress(100, "reading") as progress:
        assert torch.equal(reading.nll, losses_of(trained, document, progress))


def test_the_gains_sum_to_the_difference_of_two_evaluations(subject: Subject) -> None:
    trained, document = subject
    reading = read_document(trained, document)
    run_dir = trained.checkpoint.run_dir
    with_memory, without = (report.documents[LONGEST] for report in (asked(run_dir), emptied(run_dir)))
    assert len(reading.gain) == with_memory.num_scored == LENGTHS[LONGEST]
    gain = (reading.without.double() - reading.nll.double()).sum()
    assert float(gain) == pytest.approx(without.nll - with_memory.nll, rel=1e-6, abs=1e-4)
    assert float(reading.nll.double().sum()) == pytest.approx(with_memory.nll, rel=1e-6)


@torch.no_grad()
def test_gains_are_over_a_model_without_memory_that_has_half_a_segment_of_context(subject: Subject) -> None:
    """The loss of every token, in a window of the text that begins as late as it may, read with an empty memory."""
    trained, document = subject
    reading, num_tokens = read_document(trained, document), len(document.tokens)
    if not has_memory(trained):
        assert torch.equal(reading.windowed, reading.nll), "what does not exist gains nothing"
        return
    whole = torch.from_numpy(np.concatenate(([TOKENIZER.bos_id], document.tokens)).astype(np.int64))
    for position in range(num_tokens):
        place = position % SEG_LEN
        begin = position - place - (SEG_LEN // 2 if place < SEG_LEN // 2 and position >= SEG_LEN else 0)
        inputs, targets = (whole[begin + shift : begin + shift + SEG_LEN] for shift in (0, 1))
        length = len(targets)
        padded = (torch.nn.functional.pad(part[:length], (0, SEG_LEN - length))[None] for part in (inputs, targets))
        state = init_state(trained, [document.number])
        nll = trained.model(*padded, torch.tensor([length]), state=state).nll[0, position - begin]
        torch.testing.assert_close(reading.windowed[position], nll, rtol=0, atol=1e-5)
        assert position - begin >= SEG_LEN // 2 or not begin
    assert torch.equal(reading.gain, reading.windowed.double() - reading.nll.double())


@torch.no_grad()
@pytest.mark.parametrize("subject", FORGETTING, indirect=True)
@pytest.mark.parametrize("span", [(0, 0), (-3, -3), (-(2**20), -(2**20) + 1)], ids=["newest", "inside", "before"])
def test_removing_nothing_changes_nothing(subject: Subject, span: tuple[int, int]) -> None:
    """Neither does a range of no tokens, nor one before the document, in any segment."""
    trained, document = subject
    begin, end = (torch.tensor([position]) for position in span)
    with Inspector(trained.model.memories()) as inspector:
        for step in walk(trained, document):
            state = step.state._replace(blocks=inspector.forget(step.state.blocks, begin, end))
            again = trained.model(step.batch.tokens, step.batch.targets, step.batch.valid_len, state=state)
            assert torch.equal(again.nll, step.output.nll)
            if step.is_kept:
                inspector.commit()


@pytest.mark.parametrize("subject", FORGETTING, indirect=True)
def test_a_passage_is_removed_where_it_is_in_the_memory_and_only_there(subject: Subject) -> None:
    trained, document = subject
    found = remove_passages(trained, document)
    for removal in found.removals:
        assert all(passage.end <= removal.first for passage in removal.passages), "it is not of the past"
        assert len(removal.passages) == len(set(removal.passages))
    harm = found.most_harmful()
    carries = bool(named_tensors(init_state(trained, [document.number]).blocks))
    assert bool(found.removals) == any(read_document(trained, document).layers) == carries
    assert (float(harm.rise.nan_to_num(0.0).abs().max()) > 0.0) == carries, "a removal changes something"
    for position in (~harm.rise.isnan()).nonzero().flatten().tolist():
        passage = Passage(int(harm.begin[position]), int(harm.end[position]))
        assert torch.equal(found.without(passage)[position], harm.rise[position])


@pytest.mark.parametrize("subject", REFUSING, indirect=True)
def test_a_memory_that_cannot_forget_refuses_every_removal_and_says_why(subject: Subject) -> None:
    """Also under another memory, or in one block of several."""
    trained, document = subject
    (unable,) = UNFORGETTING & {used for _, used in kinds_of(trained.config.memory)}
    reason = f"{memory_class(unable).__name__} cannot forget a passage: {inspectable(unable).no_forget}"
    for passages in (None, [Passage(8, 16)]):
        with refused(UnusableError, "memory.kind", unable, reason):
            remove_passages(trained, document, passages)
    assert inspectable(unable).no_forget != Inspectable.no_forget, "the reason is its own"


@pytest.mark.parametrize("subject", ["transformer_xl", "none"], indirect=True)
def test_a_memory_that_does_not_say_where_a_passage_is_refuses_removals(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would ever be found in it, and nothing removed; without a state there is nothing to forget."""
    monkeypatch.setattr(TransformerXL, "inspect", Inspectable.inspect)
    monkeypatch.setattr(NoMemory, "forget", Inspectable.forget)
    if subject[0].config.memory["kind"] == "none":
        assert remove_passages(*subject).removals == []
        return
    with refused(UnusableError, "memory.kind", "transformer_xl"):
        remove_passages(*subject)


@pytest.mark.parametrize("subject", FORGETTING, indirect=True)
def test_lanes_do_not_change_what_a_removal_finds(subject: Subject) -> None:
    trained, document = subject
    together, alone = (remove_passages(trained, document, lanes=lanes) for lanes in (16, 1))
    for one, other in zip(together.removals, alone.removals, strict=True):
        assert one.passages == other.passages
        torch.testing.assert_close(one.rise, other.rise, rtol=0, atol=2e-5, equal_nan=True)


def test_where_a_layer_looked_is_its_mass_on_the_memory(subject: Subject) -> None:
    """Split by distance, it sums to the whole, and the passages that are kept are a part of it."""
    trained, document = subject
    reading = read_document(trained, document)
    edges = torch.tensor([-(2**20), -40, -24, -16, -8, 0])
    with Inspector(trained.model.memories()) as inspector:
        for step in walk(trained, document):
            for number, layer in enumerate(inspector.layers):
                for kind, rows in memory_rows(layer).items():
                    mass, spans = mass_by_span(rows, step.num_inputs, step.first_input)
                    begin, end = edges[:-1] + step.first_input, edges[1:] + step.first_input
                    by_distance = mass_in(mass, spans, begin, end)
                    looked = reading.layers[number][kind]
                    here = slice(step.begin, step.end)
                    torch.testing.assert_close(by_distance.sum(dim=1), looked.mass[here], rtol=0, atol=1e-5)
                    assert (looked.shares[here].sum(dim=1) <= looked.mass[here] + 1e-5).all()
            if step.is_kept:
                inspector.commit()
    for layer in reading.layers:
        for looked in layer.values():
            is_there = looked.shares > 0.0
            assert (looked.begin[is_there] < looked.end[is_there]).all()
            assert (looked.begin >= -1).all() and (looked.mass <= 1.0 + 1e-5).all()
            assert (looked.end <= torch.arange(len(looked.end))[:, None]).all(), "of the past"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "lamemo" in kind])
def test_alpha_is_a_share_and_that_of_the_forward(
    library: Path, index: Index, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers whose rows are refreshed have it; each forward attends once more than its inspection."""
    trained, document = opened(library, index, tmp_path, kind)
    found: list[torch.Tensor] = []
    attend = LaMemo.attend

    def recorded(memory: LaMemo, *given: Any, weights: bool) -> Any:
        attended, refreshed = attend(memory, *given, weights=weights)
        found.extend([refreshed.alpha] if refreshed else [])
        return attended, refreshed

    monkeypatch.setattr(LaMemo, "attend", recorded)
    num_compared = 0
    with Inspector(trained.model.memories()) as inspector:
        for step in walk(trained, document):
            alphas = [layer.values["alpha"] for layer in inspector.layers if "alpha" in layer.values]
            for alpha in alphas:
                assert alpha.min() >= 0.0 and alpha.max() <= 1.0
                assert sum(torch.equal(alpha, other.permute(1, 0, 2)) for other in found) >= 2
                num_compared += 1
            found.clear()
            if step.is_kept:
                inspector.commit()
    assert num_compared


def test_emptying_at_a_place_changes_nothing_before_it(library: Path, index: Index, tmp_path: Path) -> None:
    trained, document = opened(library, index, tmp_path, "transformer_xl")
    place = first_border(trained, document, 41)
    assert place == 48
    reading = read_document(trained, document, empty_at=41)
    assert reading.emptied is not None
    assert torch.equal(reading.emptied[:place], reading.nll[:place])
    assert torch.equal(reading.emptied[place : place + SEG_LEN], reading.without[place : place + SEG_LEN])
    assert not torch.equal(reading.emptied[place + SEG_LEN :], reading.without[place + SEG_LEN :])
    with refused(UnusableError):
        first_border(trained, document, 97)


def test_another_run_reads_the_same_tokens(library: Path, index: Index, tmp_path: Path) -> None:
    trained, document = opened(library, index, tmp_path / "one", "transformer_xl")
    other, _ = opened(library, index, tmp_path / "other", "none")
    reading, alone = read_document(trained, document, other=other), read_document(other, document)
    assert reading.other is not None
    assert torch.equal(reading.other, alone.nll)
    assert float(alone.gain.abs().sum()) == 0.0
    their_tokenizer = type(TOKENIZER)()
    their_tokenizer.fingerprint = "f" * 64
    with refused(UnusableError):
        read_document(trained, document, other=other._replace(tokenizer=their_tokenizer))


def test_blocks_leave_their_first_tokens_without_a_loss(library: Path, tmp_path: Path) -> None:
    run_dir, _ = make_run(tmp_path, library, KINDS["transformer_xl"])
    trained = load_model(run_dir, "eval.blocks=true")
    reading = read_document(trained, text_document(trained, "a text of some four segments"))
    unscored = reading.nll.isnan().nonzero().flatten().tolist()
    assert unscored == list(range(0, len(reading.pieces), SEG_LEN))
    assert reading.without.isnan().nonzero().flatten().tolist() == unscored
    assert "".join(reading.pieces) == "a text of some four segments"
    assert math.isfinite(float(reading.gain.nansum()))


def test_only_some_passages_are_tried_where_the_reach_has_no_bound(library: Path, index: Index, tmp_path: Path) -> None:
    trained, document = opened(library, index, tmp_path, "infinite")
    every, some = remove_passages(trained, document), remove_passages(trained, document, most=4)
    assert max(len(removal.passages) for removal in every.removals) == LENGTHS[LONGEST] // SEG_LEN
    last = some.removals[-1]
    assert len(last.passages) == 4
    assert last.passages[-2:] == every.removals[-1].passages[-2:], "the newest are among them"
