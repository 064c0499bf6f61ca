"""The pages as a site: every page is in its navigation, it builds without a warning, fits a phone, needs no network."""

import html
import json
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest

import dist_mem
from dist_mem.cli.parser import build_parser
from tests.support.chromium import Browser, running_chromium, why_not
from tests.support.paths import ROOT

pytestmark = pytest.mark.pages

WRITTEN = {"docs/reference/commands.md", "docs/reference/python.md"}  # by docs/site_pages.py
HOOKS = run_path(str(ROOT / "docs" / "site_hooks.py"))
PARSERS = build_parser()[1]


def test_every_page_is_in_the_navigation_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = re.findall(r"^ *- (\S+\.md)$", text.partition("\nnav:")[2], re.MULTILINE)
    pages = {path.relative_to(ROOT).as_posix() for path in HOOKS["pages"]()} | WRITTEN
    assert sorted(navigation) == sorted(name for name in pages if not name.startswith("docs/log/20"))


def test_the_address_of_the_repository_is_that_of_the_package() -> None:
    config = SimpleNamespace(site_name="dist_mem", repo_url=None)
    HOOKS["link_repository"](config, {})
    assert config.repo_url is None
    HOOKS["link_repository"](config, {"Repository": "https://h/x"})
    assert (config.repo_url, config.repo_name, config.edit_uri) == ("https://h/x", "dist_mem", "edit/main/")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    program = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if why_not():
        pytest.skip(str(why_not()))
    with running_chromium(tmp_path_factory.mktemp("browser")) as running:
        yield running


def helps(name: str, parser: ArgumentParser) -> dict[str, str]:
    """Return the help of a command and of its actions, by title."""
    found = {name: parser.format_help()}
    for action in parser._actions:
        if action.dest == "action" and isinstance(action.choices, dict):
            found.update({f"{name} {inner}": sub.format_help() for inner, sub in action.choices.items()})
    return found


def test_the_page_of_commands_is_the_help_of_all(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    page = (site / "docs" / "reference" / "commands.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    expected = {title: shown for name, parser in PARSERS.items() for title, shown in helps(name, parser).items()}
    assert {"train", "data build"} <= expected.keys()
    assert [title for title, shown in expected.items() if shown not in text] == []
    assert [title for title in expected if f'id="{title.replace(" ", "-")}"' not in page] == []


def test_the_page_of_python_has_every_public_name(site: Path) -> None:
    page = (site / "docs" / "reference" / "python.html").read_text(encoding="utf-8")
    assert [name for name in [*dist_mem.__all__, "Model.score"] if f'id="dist_mem.{name}"' not in page] == []
    assert "<blockquote" not in page, "an example of a docstring is shown as a quotation"


def test_the_picture_on_the_home_page_opens_a_report_of_the_shipped_model(site: Path) -> None:
    home = (site / "index.html").read_text(encoding="utf-8")
    link = re.search(r'<a class="picture" href="([^"]+)"><img [^>]*src="docs/images/report.gif"', home)
    assert link is not None and link[1] == "docs/example_report.html"
    assert ", read by demo</title>" in (site / link[1]).read_text(encoding="utf-8")


def test_a_mention_of_the_log_leads_to_its_entry(site: Path) -> None:
    links = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert sum(len(re.findall(r'href="[^"]*log/20[\w-]+\.html', text)) for text in links.values()) > 50
    assert [path for path, text in links.items() if re.search(r"[(;] ?log\)", text)] == []
    entries = {path.stem for path in (ROOT / "docs" / "log").glob("20*.md")}
    overview = (site / "docs" / "log" / "index.html").read_text(encoding="utf-8")
    assert set(re.findall(r'href="(20[\w-]+)\.html"', overview)) == entries
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert not any("docs/log/20" in entry["location"] for entry in index["docs"])


@pytest.mark.core
def test_pages_fit_every_screen_and_load_nothing_from_the_network(site: Path, browser: Browser) -> None:
    """The widths of a phone and of a small laptop: no page scrolls sideways, and pictures are whole.

    Of the entries of the log, which are half of all pages and look alike, those with a picture and each tenth.
    """
    pages = sorted(site.rglob("*.html"))
    entries = [path for path in pages if path.parent.name == "log" and path.stem != "index"]
    plain = [path for path in entries if "<img" not in path.read_text(encoding="utf-8").partition("<article")[2]]
    too_wide = []
    for path in sorted({*pages} - {*plain} | {*plain[::10]}):
        page = browser.open(path, width=1280, height=800)
        for width in (400, 1280):
            page.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
            bad = page.value(
                "[...document.querySelectorAll('.md-typeset img')].filter((picture) => !picture.naturalWidth"
                " || picture.getBoundingClientRect().right > innerWidth)"
                ".map((picture) => picture.src)"
            )
            if bad:
                too_wide.append((path.relative_to(site).as_posix(), width, bad))
            page.wait_for(f"document.documentElement.scrollWidth <= {width}")  # the search field slides into its place
        # 404.html is for a server: its addresses begin at the root.
        assert path.name == "404.html" or page.complaints() == [], path
        browser.events.clear()
        page.call("Page.close")
    assert too_wide == []


def test_the_filter_of_keys_keeps_rows_with_all_words_under_their_headings(site: Path, browser: Browser) -> None:
    page = browser.open(site / "docs" / "reference" / "config.html", width=1280, height=800)
    field = "document.querySelector('.keys-filter')"
    parts = "[...document.querySelectorAll('article :is(h2, h3, tbody tr)')].filter((part) => part.offsetParent)"
    shown = f"{parts}.map((part) => part.id || part.cells[0].textContent)"
    page.wait_for(f"{field} !== null")
    before = page.value(shown)
    for words, expected in (("CLIP global", ["train", "train.max_grad_norm"]), (" ", before)):
        page.value(f"{field}.value = '{words}', {field}.dispatchEvent(new Event('input'))")
        assert page.value(shown) == expected
    page.call("Page.close")


# A word or question -> the page that answers it, among the first two of the search.
SEARCHES = {
    "docs/start/install": ["install", "installation", "pip", "pyxis", "docker"],
    "docs/howto/resume": ["resume", "resuming", "checkpoints", "exact resume"],
    "docs/howto/performance": ["goodput", "throughput", "torch compile", "recompute activations"],
    "docs/reference/faults": ["out of memory", "CUDA OOM", "mlflow password"],
    "docs/howto/bptt": ["TBPTT", "stateful training", "initial_state", "detach state", "truncated backpropagation"],
    "docs/howto/cluster": ["nccl", "torchrun"],
    "launch/index": ["sbatch", "requeue", "preempted", "containers"],
    "docs/howto/tracking": ["mlflow", "wandb"],
    "docs/howto/trouble": ["hangs", "nan"],
    "docs/howto/llama": ["llama", "qwen", "mistral"],
    "docs/howto/lm_eval": ["lm-eval", "ruler"],
    "docs/howto/data": ["own corpus", "shards", "s3"],
    "docs/howto/muon": ["muon", "wsd"],
    "docs/howto/mixtures": ["mixture", "several datasets"],
    "docs/howto/estimate": ["estimate"],
    "docs/howto/model_sizes": ["which memory for my model", "model sizes"],
    "docs/howto/transformers": ["hugging face", "export"],
    "docs/howto/offline": ["offline", "apptainer"],
    "docs/howto/doctor": ["doctor"],
    "docs/howto/add_a_memory": ["own memory", "plugin"],
    "docs/memories/linear": ["mamba", "retnet"],
}


def test_the_search_works_from_the_disk(site: Path, browser: Browser, subtests: pytest.Subtests) -> None:
    """Whole words, plurals, questions and what other libraries call it: the page is one of the first two."""
    page = browser.open(site / "index.html", width=1280, height=800)
    field = "document.querySelector('[data-md-component=search-query]')"
    first = ".md-search-result__item:nth-child(-n + 2) > .md-search-result__link"
    page.value(f"{field}.focus()")
    for page_found, queries in SEARCHES.items():
        for query in queries:
            with subtests.test(query=query):
                for text, shown in (("", f"document.querySelector('{first}') === null"), (query, "")):
                    page.value(
                        f"{field}.value = '{text}', {field}.dispatchEvent(new Event('input', {{bubbles: true}})), 0"
                    )
                    page.value(f"{field}.dispatchEvent(new Event('keyup', {{bubbles: true}}))")
                    page.wait_for(shown or f"document.querySelector('{first}[href*=\"{page_found}.\"]') !== null")
    assert page.complaints() == []
