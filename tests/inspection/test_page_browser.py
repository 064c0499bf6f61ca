"""The page in a headless Chromium, at a desk's and at a phone's width: clicks, keys, the theme; no complaint."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_mem.inspection.counterfactual import Counterfactual, Removals, TokenSpan
from dist_mem.inspection.page.assemble import assemble
from dist_mem.inspection.page.book import encode_book
from dist_mem.inspection.page.markup import Markup, table
from tests.support.books import make_book
from tests.support.chromium import Browser, Page, running_chromium, why_not

pytestmark = [pytest.mark.servers, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
NUM_TOKENS = 1300  # three pages
HOSTILE = b"</script><img src=x onerror=alert(1)>"
WIDTHS = [1280, 400]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running_chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with a book, of which token 100 gains 5 nats, most of it from the passage of tokens 20 to 35."""
    book = make_book(NUM_TOKENS)
    nll, without = book.reading.nll, book.reading.windowed
    without[:] = nll
    without[100], without[700] = nll[100] + 5.0, nll[700] - 2.0
    rise = torch.zeros(2, 16)
    rise[1, 4] = 4.5
    removed = Counterfactual(NUM_TOKENS, [Removals(96, [TokenSpan(3, 19), TokenSpan(19, 35)], rise)])
    pieces = [HOSTILE, *book.pieces[1:]]
    tokens = np.random.default_rng(0).integers(5, len(pieces), NUM_TOKENS).astype(np.uint16)
    tokens[22], tokens[100], tokens[3:5] = 0, 7, [2, 3]  # the two bytes of one character
    reading = book.reading._replace(document=book.reading.document._replace(tokens=tokens))
    stored = encode_book(book._replace(pieces=pieces, reading=reading, removed=removed), room=10**6)
    summary = table("A wide table", ["run", *(f"column {number}" for number in range(20))], [["run", *["1.0"] * 20]])
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(assemble("A run", summary, stored, Markup(), footer=""), encoding="utf-8")
    return path


def opened(browser: Browser, file: Path, width: int, *, dark: bool = False) -> Page:
    browser.events.clear()
    page = browser.open(file, width=width, height=800, dark=dark)
    page.wait_for("!document.getElementById('reader').hidden")
    return page


def chosen(page: Page) -> int:
    return int(page.value("document.querySelector('.chosen').dataset.token"))


def details(page: Page) -> str:
    return str(page.value("document.getElementById('details').innerText"))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_click_on_a_token_shows_its_details(browser: Browser, file: Path, width: int) -> None:
    page = opened(browser, file, width)
    page.click("#t100")
    shown = details(page)
    assert chosen(page) == 100
    assert page.value("document.documentElement.scrollWidth") <= width
    for text in ("“␣w2”", "token 100; the book has 0 to 1,299", "+5.00", "Layer 1, memory", "+4.50, 81 back"):
        assert text in shown, shown
    assert HOSTILE.decode() in shown, "the text of the passage stands there as text"
    page.click("#removed details summary")
    page.wait_for("document.querySelectorAll('#removed details[open] li').length === 1")
    assert "+4.50 nats" in details(page)
    page.click("#removed li:first-child button")
    assert chosen(page) == 19
    page.click("#t90")
    assert page.value("document.querySelectorAll('#text .seen').length") > 0
    assert page.complaints() == []


def test_a_summary_of_all_the_past_names_no_passage_and_no_removal_says_why(browser: Browser, tmp_path: Path) -> None:
    book = make_book(NUM_TOKENS)
    layers = ({"summary": book.reading.layers[0]["memory"]},)
    stored = encode_book(
        book._replace(reading=book.reading._replace(layers=layers), not_removed="it sums up"), room=10**6
    )
    path = tmp_path / "page.html"
    path.write_text(assemble("A run", Markup(), stored, Markup(), footer=""), encoding="utf-8")
    page = opened(browser, path, 1280)
    page.click("#t100")
    shown = details(page)
    assert "Layer 1, summary" in shown and "something of all that precedes the segment" in shown and "back" not in shown
    assert page.value("document.querySelectorAll('#text .seen').length") == 0
    assert "No passage was removed: it sums up." in str(page.value("document.getElementById('book-sum').innerText"))
    assert page.complaints() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_the_keys_move_through_the_book(browser: Browser, file: Path, width: int) -> None:
    page = opened(browser, file, width)
    while page.value("document.activeElement.id") != "text":
        page.press("Tab")
    assert chosen(page) == 100, "the greatest gain of the first page"
    assert "+5.00" in details(page)
    for key, expected in [
        ("ArrowRight", 101),
        ("ArrowLeft", 100),
        ("Home", 0),
        ("n", 100),
        ("n", 100),
        ("N", 700),
        ("p", 100),
        ("PageDown", 600),
    ]:
        page.press(key)
        assert chosen(page) == expected, key
    assert page.value("document.getElementById('page').value") == "2"
    page.press("ArrowDown")
    below = chosen(page)
    assert below > 601
    page.press("ArrowUp")
    assert chosen(page) < below
    for _ in range(3):
        page.press("PageDown")
    assert chosen(page) == NUM_TOKENS - 1
    box = page.value("(({top, bottom}) => [top, bottom])(document.querySelector('.chosen').getBoundingClientRect())")
    assert box[0] >= 0 and box[1] <= 800, "the chosen token is seen"
    assert page.complaints() == []


@pytest.mark.parametrize("dark", [False, True])
def test_the_theme_is_that_of_the_system_until_it_is_switched(browser: Browser, file: Path, dark: bool) -> None:
    page = opened(browser, file, 400, dark=dark)

    def is_dark() -> bool:
        colour = page.value("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour[4:-1].split(",")) < 3 * 128

    assert is_dark() == dark
    page.click("#theme")
    assert is_dark() != dark
    page.click("#theme")
    assert is_dark() == dark


def test_the_page_adds_up_the_gains_and_joins_cut_characters(browser: Browser, file: Path) -> None:
    page = opened(browser, file, 1280)
    assert page.value("document.getElementById('sum').textContent") == "3.00"
    difference = page.value("(({sum, total}) => sum - total)(document.getElementById('sum').dataset)")
    assert abs(difference) < 1e-6
    assert page.value("[3, 4].map((token) => document.getElementById(`t${token}`).textContent)") == ["", "é"]
    assert page.complaints() == []


def test_the_address_of_the_page_is_that_of_the_chosen_token(browser: Browser, file: Path) -> None:
    page = opened(browser, file, 1280)
    page.value("location.hash = '#t=700'")
    page.wait_for("document.querySelector('.chosen').dataset.token === '700'")
    assert "\u22122.00" in details(page)
    page.click("#previous")
    page.wait_for("location.hash === '#t=100'")
    page.load("Page.reload")
    page.wait_for("document.querySelector('.chosen')?.dataset.token === '100'")
    page.wait_for("document.getElementById('details')?.innerText.includes('+5.00')")
    assert page.complaints() == []


def test_the_buttons_turn_pages(browser: Browser, file: Path) -> None:
    page = opened(browser, file, 400)
    assert page.value("document.getElementById('back').disabled")
    page.click("#on")
    page.click("#on")
    assert page.value("document.getElementById('on').disabled")
    assert page.value("document.getElementById('text').children.length") == NUM_TOKENS - 1000
    page.click("#strip")
    assert chosen(page) == NUM_TOKENS // 2
    page.click("#details .close")
    assert page.value("getComputedStyle(document.getElementById('details')).display") == "none"
    assert page.complaints() == []
