"""What memory changed, the counterfactual, and what memories show: over every memory, and as evaluations find it."""

import math
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

from dist_mem.config.memory_blocks import PER_BLOCK, kinds_of
from dist_mem.data.documents import Document, Documents
from dist_mem.data.shard import Index
from dist_mem.errors import UnusableError
from dist_mem.evaluation.trained_model import TrainedModel, init_state, load_model
from dist_mem.inspection.attended_passages import mass_by_span, mass_in, memory_rows
from dist_mem.inspection.counterfactual import TokenSpan, remove_passages
from dist_mem.inspection.reading import first_border, has_memory, read_document, text_document
from dist_mem.inspection.walk import losses_of, walk
from dist_mem.inspection.words import NAME, words_of
from dist_mem.memory import memory_class, memory_kinds
from dist_mem.memory.base import Inspectable, named_tensors
from dist_mem.memory.block_recurrent import BlockRecurrent
from dist_mem.memory.infini import Infini
from dist_mem.memory.infinite import Infinite
from dist_mem.memory.lamemo import LaMemo
from dist_mem.memory.none import NoMemory
from dist_mem.memory.parts.basis import Geometry, evaluate_basis, fit_matrices
from dist_mem.memory.parts.inspection import Inspection, Rows, Spans, of_tokens
from dist_mem.memory.parts.inspector import Inspector
from dist_mem.memory.parts.signal_places import append, shares, without_rows
from dist_mem.memory.rmt import RecurrentMemory
from dist_mem.memory.transformer_xl import TransformerXL
from dist_mem.papers.regression_error import attach_watches
from dist_mem.runtime.progress import Progress
from tests.support.contract_cases import LANES, fresh_state, full_lanes, random_segments, read, small_model
from tests.support.contract_cases import SEG_LEN as SHORT
from tests.support.evaluated_runs import MEMORIES, asked, make_run
from tests.support.messages import refused
from tests.support.plain_scores import emptied
from tests.support.scored_library import LENGTHS, SEG_LEN, TOKENIZER

KINDS: dict[str, dict[str, Any]] = {
    **{kind: {"kind": kind, **memory_class(kind).small_options(SEG_LEN)} for kind in memory_kinds()},
    **{name: memory for name, memory in MEMORIES.items() if "_over_" in name},
    "most_used": {**MEMORIES["compressive"], "compression": "most_used"},
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
    sizes: dict[str, Any] = {"kind": "gpt2", "num_positions": SEG_LEN} if kind.endswith("causal") else {}
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
        passage = TokenSpan(int(harm.begin[position]), int(harm.end[position]))
        assert torch.equal(found.without(passage)[position], harm.rise[position])


@pytest.mark.parametrize("subject", REFUSING, indirect=True)
def test_a_memory_that_cannot_forget_refuses_every_removal_and_says_why(subject: Subject) -> None:
    """Also under another memory, or in one block of several."""
    trained, document = subject
    (unable,) = UNFORGETTING & {used for _, used in kinds_of(trained.config.memory)}
    reason = f"{memory_class(unable).__name__} cannot forget a passage: {inspectable(unable).no_forget}"
    for passages in (None, [TokenSpan(8, 16)]):
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
    for kinds in reading.layers:
        for looked in kinds.values():
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
    with refused(UnusableError, "--empty-at 97"):
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
    with refused(UnusableError, "their tokens differ"):
        read_document(trained, document, other=other._replace(tokenizer=their_tokenizer))


def test_words_are_whole_where_characters_have_several_tokens(library: Path, tmp_path: Path) -> None:
    """A character belongs to the token that completes it; every byte is a token here."""
    text = "\u201cI don\u2019t know,\u201d said Zoë Müller. \u00a0Élan \u2014 naïve\u2003 Zoë\u2019s\u2026"
    trained = load_model(make_run(tmp_path, library, KINDS["transformer_xl"])[0])
    reading = read_document(trained, text_document(trained, text))
    assert "".join(reading.pieces) == text
    words = [word for word, _, _ in reading.words()]
    assert [(word.text, word.kind) for word in words] == [(word.text, word.kind) for word in words_of(text)]
    assert {"don\u2019t", "Zoë", "Müller", "Zoë\u2019s"} <= {word.text for word in words}
    assert [word.text for word in words if word.kind == NAME][:2] == ["Zoë", "Müller"]
    for word in words:
        assert TOKENIZER.decode(reading.document.tokens[word.first : word.end]).strip() == word.text
    cut = text_document(trained, text)._replace(tokens=reading.document.tokens[:-1])
    assert read_document(trained, cut).pieces[-1] == "\ufffd", "of a character without its end"


def test_blocks_leave_their_first_tokens_without_a_loss(library: Path, tmp_path: Path) -> None:
    run_dir, _ = make_run(tmp_path, library, KINDS["transformer_xl"])
    trained = load_model(run_dir, "eval.blocks=true")
    reading = read_document(trained, text_document(trained, "a text of some four segments"))
    unscored = reading.nll.isnan().nonzero().flatten().tolist()
    assert unscored == list(range(0, len(reading.pieces), SEG_LEN))
    is_predicted = ~reading.nll.isnan()
    is_predicted[:SEG_LEN] = False  # with an empty memory
    for columns in reading.layers[0]["memory"]:
        assert not columns[~is_predicted].any(), "all is 0 for a token that is not scored"
    assert torch.equal(reading.layers[0]["memory"].mass > 0.0, is_predicted)
    assert reading.without.isnan().nonzero().flatten().tolist() == unscored
    assert "".join(reading.pieces) == "a text of some four segments"
    assert math.isfinite(float(reading.gain.nansum()))


def test_only_some_passages_are_tried_where_the_reach_has_no_bound(library: Path, index: Index, tmp_path: Path) -> None:
    trained, document = opened(library, index, tmp_path, "infinite")
    every, some = remove_passages(trained, document), remove_passages(trained, document, most=4)
    assert max(len(removal.passages) for removal in remove_passages(trained, document, most=1).removals) == 1
    assert max(len(removal.passages) for removal in every.removals) == LENGTHS[LONGEST] // SEG_LEN
    last = some.removals[-1]
    assert len(last.passages) == 4
    assert last.passages[-2:] == every.removals[-1].passages[-2:], "the newest are among them"


FINE: dict[str, Any] = {"num_basis": 64, "basis_widths": [0.02, 0.05], "num_samples": 64, "tau": 0.8, "ridge": 1e-4}


@pytest.mark.parametrize("kind", ["infinite", "sticky", "gibbs", "infinite_over_lamemo", "infinite_over_compressive"])
def test_places_are_those_that_the_regression_error_follows(
    library: Path, index: Index, tmp_path: Path, kind: str
) -> None:
    """In order; and their shares of the signal sum to one."""
    trained, document = opened(library, index, tmp_path, kind)
    compared = 0
    with Inspector(trained.model.memories()) as inspector, attach_watches(trained.model) as watches:
        for step in walk(trained, document):
            if step.is_kept:
                inspector.commit()
                for trace, watch in zip(inspector.traces, watches, strict=True):
                    assert torch.equal(trace.places[0], watch.places)
                    compared += len(watch.places)
    assert compared
    for trace in inspector.traces:
        assert (trace.places[0].diff() >= 0).all()
        assert float(shares(trace.places[0]).sum()) == pytest.approx(1.0, abs=1e-12)


def test_the_signal_is_gone_where_it_is_forgotten_and_stays_elsewhere(
    library: Path, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of six segments: measured, a quarter of its norm is left, and the others change by a fifteenth.

    Rows next to each other are unrelated here, which is the hardest case for smooth functions.
    """
    monkeypatch.setitem(KINDS, "fine", {"kind": "infinite", "over": {"kind": "none"}, **FINE})
    trained, document = opened(library, index, tmp_path, "fine")
    with Inspector(trained.model.memories()) as inspector:
        for step in walk(trained, document.part(0, 7 * SEG_LEN)):
            inspector.commit()
            blocks = step.output.state.blocks
        begin, end = torch.tensor([-4 * SEG_LEN]), torch.tensor([-3 * SEG_LEN])
        forgotten = inspector.forget(blocks, begin, end)
    for memory, trace, before, after in zip(inspector.memories, inspector.traces, blocks, forgotten, strict=True):
        assert isinstance(memory, Infinite)
        places = trace.places[0]
        rows = torch.arange(-len(places), 0) - SEG_LEN  # the newest segment is not in the signal yet
        taken = (rows >= int(begin)) & (rows < int(end))
        assert int(taken.sum()) == SEG_LEN
        kept, left = (_signal(memory, state.coefficients[0], places) for state in (before, after))
        gone = (left[taken].norm() / kept[taken].norm()).item()
        changed = ((left - kept)[~taken].norm() / kept[~taken].norm()).item()
        assert gone < 0.4, f"left of the passage: {gone:.4f}"
        assert changed < 0.15, f"changed elsewhere: {changed:.4f}"


# The test above; the defaults for segments of 64; the published sorting. (num_basis, widths, ridge, tau, S, E, padding)
GEOMETRIES = {
    "fine": Geometry(64, (0.02, 0.05), 1e-4, 0.8, 64, 8, "published"),
    "defaults": Geometry(256, (0.005, 0.01), 0.5, 0.75, 256, 64, "published"),
    "sorting": Geometry(150, (0.01, 0.05), 1.0, 0.75, 150, 150, "published"),
}


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_what_is_left_is_what_smooth_functions_cannot_lack(name: str, correlation: float) -> None:
    """Less is left where the passage was than in a signal that it never entered, which is all of the rows beside it.

    And what is left there and changed elsewhere is at most twice the least that any signal of these functions has.
    """
    geometry, num_updates, passage = GEOMETRIES[name], 6, 2
    rows = _rows(num_updates * geometry.num_rows, correlation)
    whole, places = _read(rows, geometry)
    taken = torch.arange(len(rows)) // geometry.num_rows == passage
    never, _ = _read(rows.masked_fill(taken[:, None], 0.0), geometry)
    where = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    basis = evaluate_basis(where, widths=geometry.widths, num_basis=geometry.num_basis)
    is_taken = taken[torch.searchsorted((places[1:] + places[:-1]) / 2, where, right=True)]
    wanted = (basis @ whole).masked_fill(is_taken[:, None], 0.0)
    found = basis @ without_rows(whole, places, taken, geometry)
    least = basis @ torch.linalg.lstsq(basis, wanted, driver="gelsd").solution
    assert found[is_taken].norm() < (basis @ never)[is_taken].norm()
    assert (found - wanted).norm() < 2.0 * (least - wanted).norm()
    assert (least - wanted).norm() > 0.02 * wanted.norm(), "the functions can do it: then it should be done"


def _rows(number: int, correlation: float) -> Tensor:
    """Return unit-variance rows, each correlated with the one before, (P, 16) float64."""
    noise = torch.randn(number, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for row in range(1, number):
        noise[row] = correlation * noise[row - 1] + (1.0 - correlation**2) ** 0.5 * noise[row]
    return noise


def _read(rows: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return the coefficients (N, D) after updates with all rows, and the places of the rows."""
    fit = fit_matrices(geometry, device="cpu", dtype=torch.float64)
    first, *later = rows.split(geometry.num_rows)
    coefficients = fit.first @ first
    places = append(torch.empty(0), None, geometry.num_rows, geometry, is_first=True)
    for new in later:
        coefficients = fit.linear @ coefficients + fit.new @ new
        places = append(places, None, geometry.num_rows, geometry, is_first=False)
    return coefficients, places


def _signal(memory: Infinite, coefficients: Tensor, places: Tensor) -> Tensor:
    """Return the signal at places, (P, D)."""
    return evaluate_basis(places.to(coefficients), **memory.basis) @ coefficients


def inspected(case: str) -> list[list[Inspection]]:
    """What every layer of a small model read, by segment."""
    model = small_model(case)
    found = []
    with torch.no_grad(), Inspector(model.memories()) as inspector:
        for _ in read(model, random_segments(), fresh_state(model)):
            found.append(list(inspector.layers))
            inspector.commit()
    return found


@pytest.mark.parametrize("case", ["rmt, cache", "rmt, read cache", "rmt, not at end"])
def test_a_cached_row_is_that_of_its_token_or_of_all_before_its_place(case: str) -> None:
    """Against a list of all rows that the first block has read, each with its tokens."""
    model = small_model(case)
    memory = model.memories()[0]
    assert isinstance(memory, RecurrentMemory)
    num_tokens, mem_len, inputs = memory.options.num_tokens, memory.options.mem_len, list[Tensor]()
    memory.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    labels: list[tuple[int, int]] = []
    with torch.no_grad():
        for number, output in enumerate(read(model, random_segments(), fresh_state(model)), start=1):
            first, after = (number - 1) * SHORT, number * SHORT
            labels += [(0, first)] * num_tokens + [(token, token + 1) for token in range(first, after)]
            labels += [(0, after)] * memory.num_after
            cache, newest = output.state.blocks[0].cache, labels[-mem_len:]
            spans, of_token = memory.cache_spans(cache.length, torch.full((LANES,), after))
            assert torch.equal(cache.hidden[:, -len(newest) :], torch.cat(inputs, dim=1)[:, -mem_len:])
            found = torch.stack([part[:, -len(newest) :] + after for part in spans], dim=-1)
            held = [label if label[0] < label[1] else (label[1], label[1]) for label in newest]
            assert found.tolist() == [[list(label) for label in held]] * LANES
            assert (spans.begin == spans.end)[:, : -len(newest)].all()
            assert of_token[-len(newest) :].tolist() == [
                place % memory.num_rows in range(num_tokens, num_tokens + SHORT)
                for place in range(len(labels) - len(newest), len(labels))
            ]


@pytest.mark.parametrize("case", ["rmt", "infini"])
def test_a_summary_is_of_all_tokens_before_the_segment(case: str) -> None:
    for number, layers in enumerate(inspected(case)):
        for layer in layers:
            weights, (begin, end) = layer.rows["summary"]
            assert (begin == -number * SHORT).all() and (end == 0).all()
            assert bool(weights.any()) == (number > 0), "learned first rows, or an empty matrix, are of no token"


def test_the_weight_of_a_matrix_is_the_gate_of_the_forward() -> None:
    memory = small_model("infini").memories()[0]
    assert isinstance(memory, Infini)
    share = memory.beta.detach().sigmoid()
    for layers in inspected("infini")[1:]:
        weights = layers[0].rows["summary"].weights
        torch.testing.assert_close(weights, share[:, None, None, None].expand_as(weights))


@pytest.mark.parametrize("row", range(SHORT // 2))
def test_a_kept_row_has_weight_for_the_queries_whose_output_it_changes(row: int) -> None:
    """In the first window, whose tokens read the states as they were before it."""
    model = small_model("block_recurrent")
    *_, output = read(model, random_segments(), fresh_state(model))
    memory, state = model.memories()[0], output.state.blocks[0]
    assert isinstance(memory, BlockRecurrent)
    x = torch.randn(LANES, SHORT, 12, generator=torch.Generator().manual_seed(0))
    values = state.values.clone()
    values[:, :, row] += 1.0
    with torch.no_grad():
        before, after = (memory(x, each, full_lanes()).y for each in (state, state._replace(values=values)))
        weights, spans = memory.inspect(x, state, full_lanes()).rows["memory"]
    changed, window = (before != after).any(-1), slice(0, memory.window)
    assert torch.equal(changed[:, window], (weights[..., row] > 0).any(0)[:, window])
    assert (spans.begin[:, row] == row - memory.window).all()


def test_what_is_read_of_no_token_is_left_out_of_the_shares() -> None:
    weights = torch.tensor([[[[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]]])
    spans = Spans(torch.tensor([[0, -2, -1]]), torch.tensor([[0, -1, 0]]))
    found = of_tokens({"memory": Rows(weights, spans)})["memory"].weights
    assert torch.equal(found, torch.tensor([[[[0.0, 0.375, 0.625], [0.0, 0.0, 0.0]]]]))
