"""The book of the page: losses exactly, the rest as far as there is room, and never more than there is."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dist_mem.data.documents import Document
from dist_mem.inspection.counterfactual import Counterfactual, Passage, Removals
from dist_mem.inspection.looked import Looked
from dist_mem.inspection.page.assemble import assembled
from dist_mem.inspection.page.book import NO_PASSAGE, Book, encoded
from dist_mem.inspection.page.columns import column, numbers
from dist_mem.inspection.page.markup import Markup
from dist_mem.inspection.reading import DocumentReading
from tests.support.messages import refused

PIECES = [b" word", b"\n", b"\xc3", b"\xa9", b"</script>", *(f" w{number}".encode() for number in range(1000))]


def make_book(num_tokens: int, *, num_layers: int = 1, seg_len: int = 16) -> Book:
    """A book of random losses and looks, in which the first of every 16 tokens is not scored."""
    draw = torch.Generator().manual_seed(3)
    nll = torch.empty(num_tokens).exponential_(0.3, generator=draw)
    without = nll + 0.5 * torch.randn(num_tokens, generator=draw)
    nll[::16], without[::16] = torch.nan, torch.nan

    def look() -> Looked:
        back = torch.randint(1, 600, (num_tokens, 3), generator=draw)
        begin = (torch.arange(num_tokens)[:, None] - back).clamp(min=-1).int()
        mass = torch.rand(num_tokens, 3, generator=draw) / 3
        return Looked(mass.sum(dim=1), begin, begin + 1, mass)

    tokens = np.random.default_rng(3).integers(0, len(PIECES), num_tokens).astype(np.uint16)
    layers = tuple({"memory": look()} for _ in range(num_layers))
    reading = DocumentReading(Document(0, tokens, None, None), [], nll, without, without, None, None, None, layers)
    return Book("A book", "run", PIECES, reading, None, np.arange(0, num_tokens, seg_len))


@given(
    st.sampled_from(["u1", "u2", "u4", "i2", "f4"]).flatmap(
        lambda kind: st.tuples(st.just(kind), st.lists(st.integers(0, 127), max_size=40))
    )
)
def test_a_column_comes_back(case: tuple[str, list[int]]) -> None:
    kind, values = case
    assert numbers(column(np.array(values), kind)).tolist() == values


def test_a_number_that_does_not_fit_is_an_error() -> None:
    for kind, value in (("u1", 256), ("u2", -1), ("i2", 2**15), ("u4", 2**32)):
        with refused(ValueError, kind):
            column(np.array([value]), kind)


def test_details_are_kept_of_the_tokens_that_memory_changed_most() -> None:
    book = make_book(4000)
    everything = encoded(book, room=10**7)
    room = len(json.dumps(everything)) * 2 // 3
    stored = encoded(book, room=room)
    assert len(json.dumps(stored)) <= room
    kept = np.cumsum(numbers(stored["detailed"]))
    change = book.reading.gain.abs().numpy()
    others = np.setdiff1d(np.arange(4000), kept)
    assert 0 < len(kept) < np.count_nonzero(~np.isnan(change))
    assert change[kept].min() >= np.nanmax(change[others])
    looked, layer = book.reading.layers[0]["memory"], stored["looked"][0]
    begin = kept[:, None] - numbers(layer["back"]).reshape(-1, 3).astype(np.int64)
    assert np.array_equal(begin, looked.begin.numpy()[kept])
    assert np.abs(numbers(layer["shares"]).reshape(-1, 3) / 255 - looked.shares.numpy()[kept]).max() <= 1 / 510
    assert len(np.cumsum(numbers(encoded(book, room=0)["detailed"]))) == 0


def test_a_token_names_the_passages_whose_removal_is_worst() -> None:
    book = make_book(64)
    passages = [Passage(-1, 15), Passage(15, 31), Passage(31, 47), Passage(3, 9)]
    rise = torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
    rise[:, 3] = torch.nan  # not scored
    one_only = Removals(16, [Passage(-1, 15)], torch.full((1, 16), 0.25))
    removed = Counterfactual(64, [one_only, Removals(48, passages, rise)])
    stored = encoded(book._replace(removed=removed), room=10**6)["removed"]
    begin, end = (numbers(stored[name]).astype(np.int64) - 1 for name in ("begin", "end"))
    assert [Passage(*pair) for pair in zip(begin.tolist(), end.tolist(), strict=True)] == sorted(passages)
    kept = np.cumsum(numbers(encoded(book, room=10**6)["detailed"])).tolist()
    place, rises = (numbers(stored[name]).reshape(-1, 3) for name in ("place", "rise"))
    for row, token in enumerate(kept):
        found = [Passage(int(begin[p]), int(end[p])) for p in place[row].tolist() if p != NO_PASSAGE]
        if token >= 48 and token != 51:
            worst = rise[:, token - 48].argsort(descending=True)[:3].tolist()
            assert found == [passages[number] for number in worst]
            assert rises[row] / 1000 == pytest.approx(rise[worst, token - 48].numpy(), abs=5.1e-4)
        else:
            assert found == ([Passage(-1, 15)] if 16 <= token < 32 else [])


def test_a_book_of_500_000_tokens_is_under_10_mb() -> None:
    book = make_book(500_000, num_layers=3, seg_len=512)
    page = assembled("A long book", Markup(), encoded(book, room=9_000_000), Markup(), footer="")
    assert len(page.encode()) < 10_000_000


def test_text_and_losses_are_stored_exactly() -> None:
    book = make_book(1000)
    stored = encoded(book, room=10**6)
    for name, losses in (("nll", book.reading.nll), ("without", book.reading.windowed)):
        assert torch.equal(torch.from_numpy(numbers(stored[name])).nan_to_num(-1), losses.nan_to_num(-1))
    gains = (numbers(stored["without"]).astype(np.float64) - numbers(stored["nll"])).tolist()
    total = math.fsum(gain for gain in gains if not math.isnan(gain))
    assert total == pytest.approx(stored["total"]["without"] - stored["total"]["nll"], abs=1e-9)
    assert stored["num_scored"] == int((~book.reading.nll.isnan()).sum())
    pieces = [stored["pieces"][number].encode("latin-1") for number in numbers(stored["ids"]).tolist()]
    assert pieces == [PIECES[token] for token in book.reading.document.tokens.tolist()]
    assert len(set(stored["pieces"])) == len(stored["pieces"])
