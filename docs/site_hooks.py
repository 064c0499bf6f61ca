"""Hooks of mkdocs.yml: the site has the paths of the repository, so that every link between pages holds in both.

Pages outside docs/ are added, those for contributors left out (`NO_PAGES`); docs/site_pages.py writes the pages of
commands and of the Python API. A link to a file that is no page becomes a link into the repository, or text if
pyproject.toml names none.
"""

from __future__ import annotations

import re
import tomllib
from itertools import cycle
from pathlib import Path
from posixpath import dirname, join, normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from dist_mem.version import __version__
from docs.site_pages import commands_page, example_report, python_page

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "launch/*.md", "shards/*.md", "docs/**/*.md")
NO_PAGES = ("CONTRIBUTING.md", "docs/README.md", "docs/dev/*")
LOG = "docs/log/"  # entries are pages that links lead to; a search does not find them
# They name everything: a search shows pages that explain first.
LISTS = (
    "docs/reference/commands.md",
    "docs/reference/python.md",
    "docs/reference/config.md",
    "docs/reference/names.md",
)
BESIDE = ("docs/images/*.svg", "docs/images/*.png", "docs/images/*.gif", "docs/*.css", "docs/*.js")
LINK = re.compile(r"(?<!!)\[([^][]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")

TABLE = re.compile(r"<table\b.*?</table>", re.DOTALL)
CELL = re.compile(r"<td\b[^>]*>(.*?)</td>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
PICTURE = re.compile(r'(<img\b[^>]*\bsrc="([^"]+)"[^>]*>)(?!\s*</a>)')
REPORT_PICTURE = re.compile(r"(\[!\[[^]]*\]\(docs/images/report\.gif\)\])\([^)]*\)")
EXAMPLE_REPORT = "docs/example_report.html"  # a report page to click through, which exists on the site only
LONG_TEXT = 60  # characters of a cell; a table without such cells scrolls sideways on a phone, if it is too wide


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give headings the anchors that GitHub gives them, and set the version and the repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.copyright = f"dist_mem {__version__}, {project['license']}"
    link_repository(config, project.get("urls", {}))
    config.mdx_configs["toc"]["slugify"] = lambda text, separator: re.sub(r"[^\w\- ]", "", text.lower()).replace(
        " ", separator
    )
    return config


def link_repository(config: MkDocsConfig, urls: dict[str, str]) -> None:
    """Link every page to the repository, and to its own source, if `urls` of pyproject.toml has the address."""
    if address := urls.get("Repository"):
        config.repo_url, config.repo_name, config.edit_uri = address, config.site_name, "edit/main/"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the repository, under their paths there, and add the written pages."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in [*pages(), *(path for place in BESIDE for path in ROOT.glob(place))]:
        files.append(File(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, config.use_directory_urls))
    for name, content in {"commands": commands_page(), "python": python_page()}.items():
        files.append(File.generated(config, f"docs/reference/{name}.md", content=content))
    files.append(File.generated(config, EXAMPLE_REPORT, content=example_report()))
    return files


def pages() -> list[Path]:
    """Return the files that become pages."""
    left_out = {path for place in NO_PAGES for path in ROOT.glob(place)}
    return [path for place in PAGES for path in ROOT.glob(place) if path not in left_out]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change the links to files that are no pages; on the home page, the picture of a report opens one."""
    if page.file.src_uri == "README.md":
        markdown = REPORT_PICTURE.sub(rf"\1({EXAMPLE_REPORT}){{ .picture }}", markdown, count=1)
    if page.file.src_uri.startswith(LOG):
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri in LISTS:
        page.meta["search"] = {"boost": 0.3}
    if page.file.src_uri == f"{LOG}README.md":
        markdown += log_entries(files)
    return outside_links(markdown, page.file.src_uri, set(files.src_uris), config.repo_url)


def log_entries(files: Files) -> str:
    """Return the list of the log's entries, the newest first."""
    paths = sorted((ROOT / path for path in files.src_uris if path.startswith(f"{LOG}20")), reverse=True)
    titles = [path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for path in paths]
    return "".join(f"\n- [{title}]({path.name})" for path, title in zip(paths, titles, strict=True))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Prepare tables and pictures for narrow screens (site.css)."""
    return opened_pictures(TABLE.sub(lambda found: with_labels(found[0]), html))


def with_labels(table: str) -> str:
    """Mark a table with long texts, and give its cells the name of their column: a phone shows rows as cards."""
    names = [TAG.sub("", name) for name in re.findall(r"<th\b[^>]*>(.*?)</th>", table, re.DOTALL)]
    longest = max((len(TAG.sub("", cell)) for cell in CELL.findall(table)), default=0)
    if len(names) < 3 or longest < LONG_TEXT:
        return table
    labels = cycle(names)
    labelled = re.sub(r"<td\b", lambda _: f'<td data-label="{next(labels)}"', table)
    return labelled.replace("<table", "<table data-cards", 1)


def opened_pictures(html: str) -> str:
    """Make every picture a link to itself: a phone shows it small, and opens it at its size."""
    return PICTURE.sub(r'<a class="picture" href="\2">\1</a>', html)


def outside_links(markdown: str, source: str, known: set[str], repo_url: str | None) -> str:
    """Return a page whose links to files of the repository other than `known` lead to `repo_url`, or are plain text."""

    def changed(link: re.Match[str]) -> str:
        path = normpath(join(dirname(source), link[2]))
        if path in known or not (ROOT / path).exists():  # of a missing one, mkdocs warns
            return link[0]
        return f"[{link[1]}]({repo_url.rstrip('/')}/blob/HEAD/{path}{link[3] or ''})" if repo_url else link[1]

    return LINK.sub(changed, markdown)
