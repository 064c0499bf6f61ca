"""PG-19 as shards: its layout, the choice of documents, official word counts, and the download."""

import csv
import io
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_mem.data.remote import fetch as remote
from dist_mem.data.shard import read_index
from dist_mem.data.tokenizers.registry import load_tokenizer
from dist_mem.data.verify import verify_dataset
from dist_mem.datasets import bucket_download
from dist_mem.datasets.recipes import pg19
from tests.support.bucket import LISTING, Bucket
from tests.support.data_builders import build_data, build_refused, documents_of
from tests.support.messages import said
from tests.support.paths import ROOT

pytestmark = pytest.mark.servers

TRAIN_IDS = ["2", "10", "9", "100", "30"]
METADATA = """100,"A Title, with a comma by Somebody",1859,http://www.gutenberg.org/ebooks/100
9,Nine,1800,http://9
2,Two,,http://2
7,Seven,1901,http://7
10,Ten,1910,http://10
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A PG-19 of seven documents; "30" is not in metadata.csv, which in turn names "7", which is not there."""
    source = tmp_path / "source"
    for split, ids in (("train", TRAIN_IDS), ("validation", ["1"]), ("test", ["4"])):
        (source / split).mkdir(parents=True)
        for document_id in ids:
            (source / split / f"{document_id}.txt").write_bytes(f"Text of {document_id}.\r\n".encode())
    (source / "metadata.csv").write_text(METADATA, encoding="utf-8")
    return source


def build(source: Path, out: Path, *options: str) -> int:
    return build_data("pg19", "--source", source, "--out", out, "--tokenizer", "bytes", *options)


def train_ids(out: Path) -> list[str]:
    return [entry.id for entry in read_index(out / "train").documents]


def test_all_splits_are_built_with_titles_and_years(source: Path, tmp_path: Path) -> None:
    assert build(source, tmp_path / "out") == 0
    found = documents_of(tmp_path / "out")
    assert [(document.entry.title, document.entry.year) for document in found] == [
        ("Two", None),
        ("Nine", 1800),
        ("Ten", 1910),
        ("30", None),
        ("A Title, with a comma by Somebody", 1859),
    ]
    assert found[0].text == "Text of 2.\n"
    assert verify_dataset(tmp_path / "out") == []
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["test", "tokenizer.json", "train", "validation"]


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ("", ["2", "9", "10", "30", "100"]),
        ("--order text", ["10", "100", "2", "30", "9"]),
        ("--order metadata", ["100", "9", "2", "10", "30"]),
        ("--first 2", ["2", "9"]),
        ("--first 2 --order text", ["10", "100"]),
        ("--first 2 --order metadata", ["100", "9"]),
        ("--limit 3 --first 4", ["2", "9", "10"]),
        ("--limit 1", ["2"]),
    ],
)
def test_documents_are_chosen_and_ordered(source: Path, tmp_path: Path, options: str, ids: list[str]) -> None:
    (source / "test" / "5.txt").write_text("another")
    assert build(source, tmp_path / "out", *options.split()) == 0
    assert train_ids(tmp_path / "out") == ids
    assert len(read_index(tmp_path / "out" / "test").documents) == (1 if "limit 1" in options else 2)


def test_a_corpus_of_ones_own_needs_no_metadata(tmp_path: Path) -> None:
    (tmp_path / "mine" / "train").mkdir(parents=True)
    for name in ("War and Peace", "12", "notes-2"):
        (tmp_path / "mine" / "train" / f"{name}.txt").write_text("word word\n")
    assert build(tmp_path / "mine", tmp_path / "out", "--name", "mine") == 0
    assert [(entry.id, entry.title) for entry in read_index(tmp_path / "out" / "train").documents] == [
        (name, name) for name in ("12", "War and Peace", "notes-2")
    ]


def test_a_complete_official_split_uses_the_official_words(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = pg19.digest_ids(TRAIN_IDS)
    monkeypatch.setitem(pg19.OFFICIAL_SPLITS, "train", pg19.OfficialSplit(5, 1_000_000, ids))
    assert build(source, tmp_path / "whole") == 0
    index = read_index(tmp_path / "whole" / "train")
    assert (index.num_words, index.counted_words) == (1_000_000, 15)
    assert read_index(tmp_path / "whole" / "test").num_words == 3
    assert build(source, tmp_path / "part", "--limit", "4") == 0
    assert read_index(tmp_path / "part" / "train").num_words == 12


def test_the_official_ids_are_those_of_the_published_lists(shared_data: Path) -> None:
    for split, official in pg19.OFFICIAL_SPLITS.items():
        ids = (shared_data / "data" / "pg19_meta" / f"{split}_ids.txt").read_text().split()
        assert len(ids) == official.num_documents
        assert pg19.digest_ids(ids) == official.ids_sha256
    metadata = pg19.read_metadata(shared_data / "data" / "pg19_meta" / "metadata.csv")
    assert len(metadata) == 28_752
    assert pg19.digest_ids(metadata) == pg19.OFFICIAL_METADATA


def test_the_texts_of_pg19_itself_are_not_compared(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take minutes."""
    metadata = pg19.read_metadata(source / "metadata.csv")
    splits = {
        split: [pg19.SourceDocument(name, name, source / split / f"{name}.txt") for name in names]
        for split, names in (("train", ["2", "9"]), ("test", ["100"]))
    }
    monkeypatch.setattr(pg19, "OFFICIAL_METADATA", pg19.digest_ids(metadata))
    monkeypatch.setattr(pg19, "read_text", None)
    pg19.refuse_shared_books(splits, metadata)


def test_the_example_in_the_readme_reads_a_book(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build(source, tmp_path / "data" / "pg19") == 0
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "shards" / "README.md").read_text(), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example, names)
    assert load_tokenizer(tmp_path / "data" / "pg19").decode(names["tokens"]) == "Text of 4.\n"


TITLES = st.text(st.sampled_from("ab \",;'=\u00e9"), max_size=6)


@given(titles=st.lists(TITLES, min_size=2, max_size=4), mark=st.sampled_from('",\n'), place=st.integers(0, 200))
def test_no_title_takes_in_the_rows_after_it_whatever_character_is_wrong(
    tmp_path_factory: pytest.TempPathFactory, titles: list[str], mark: str, place: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "metadata.csv"
    rows = [[str(number), title, "1900", "u"] for number, title in enumerate(titles)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    whole = text.getvalue()
    path.write_text(whole, encoding="utf-8")
    assert [known.title for known in pg19.read_metadata(path).values()] == titles
    place %= len(whole)
    for damaged in (whole[:place] + mark + whole[place:], whole[:place] + whole[place + 1 :]):
        path.write_text(damaged, encoding="utf-8")
        try:
            found = pg19.read_metadata(path)
        except ValueError as error:
            assert re.search(r"metadata\.csv, row \d+: ", str(error)), error
        else:
            assert len(found) == len(rows)


MISTAKES: dict[str, Callable[[Path], object]] = {
    "quotation": lambda source: (source / "metadata.csv").write_text('0,"A,1801,u\n1,B,1802,u\n2,"C",1803,u\n'),
    "quoted line end": lambda source: (source / "metadata.csv").write_text('0,"A,1801,u\n1,B",1802,u\n'),
    "long field": lambda source: (source / "metadata.csv").write_text('0,"A,1801,u\n' + "1,B,1802,u\n" * 20_000),
    "year": lambda source: (source / "metadata.csv").write_text("1,T,old,u\n"),
    "a dash for a year": lambda source: (source / "metadata.csv").write_text("1,T,-,u\n"),
    "empty split": lambda source: (source / "test" / "4.txt").unlink(),
    "no metadata to order by": lambda source: (source / "metadata.csv").unlink(),
    "no source": lambda source: source.rename(source.parent / "moved"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_answered_with_one_line(source: Path, tmp_path: Path, mistake: str) -> None:
    MISTAKES[mistake](source)
    order, named = (["--order", "metadata"], "--source") if "order" in mistake else ([], source)
    build_refused("pg19", "--source", source, "--out", tmp_path / "out", *order, named=(named,))


def test_ctrl_c_is_answered_with_the_way_on(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pg19, "build_dataset", interrupted)
    assert build(source, tmp_path / "out") == 130
    said(capsys.readouterr().err, "stopped by SIGINT")


@pytest.fixture
def bucket(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr(remote, "RETRY_PAUSES", (0.01, 0.01, 0.01))
    (source / "train" / "README.md").write_text("not a document")
    with closing(Bucket(source)) as server:
        yield server


def build_download(bucket: Bucket, tmp_path: Path, *options: str) -> int:
    return build(tmp_path / "copy", tmp_path / "out", "--download", "--base-url", bucket.url, *options)


def test_a_download_is_what_the_bucket_holds_and_a_second_one_fetches_what_is_missing_or_damaged(
    bucket: Bucket, tmp_path: Path
) -> None:
    copy = tmp_path / "copy" / "train"
    assert build_download(bucket, tmp_path) == 0
    for path in bucket.root.rglob("*.txt"):
        assert (tmp_path / "copy" / path.relative_to(bucket.root)).read_bytes() == path.read_bytes()
    assert not (copy / "README.md").exists()
    assert train_ids(tmp_path / "out") == ["2", "9", "10", "30", "100"]
    bucket.asked.clear()
    (copy / "9.txt").unlink()
    (copy / "2.txt").write_bytes(b"cut")
    (copy / "10.txt").write_bytes((copy / "10.txt").read_bytes().upper())  # the same size
    assert build_download(bucket, tmp_path, "--overwrite") == 0
    fetched = {path for path in bucket.asked if path.endswith(".txt")}
    assert fetched == {"/books/train/9.txt", "/books/train/2.txt", "/books/train/10.txt"}


def test_without_checksums_a_book_that_is_newer_in_the_bucket_is_fetched_again(bucket: Bucket, tmp_path: Path) -> None:
    bucket.has_md5 = False
    assert build_download(bucket, tmp_path) == 0
    book = next((bucket.root / "test").glob("*.txt"))
    book.write_bytes(book.read_bytes().swapcase())  # of the same size
    os.utime(book, (time.time() + 60, time.time() + 60))
    bucket.asked.clear()
    assert build_download(bucket, tmp_path, "--overwrite") == 0
    assert [path for path in bucket.asked if path.endswith(".txt")] == [f"/books/test/{book.name}"]


def test_a_second_download_into_a_folder_is_refused_while_the_first_goes_on(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--source", tmp_path / "copy", "--out", tmp_path / "other", "--download", "--base-url", bucket.url)
    second = list[str]()

    def list_files(base_url: str, prefix: str) -> list[bucket_download.RemoteFile]:
        second.append(prefix)
        if len(second) == 1:
            build_refused("pg19", *given, named=(f"--source {tmp_path / 'copy'}", f"process {os.getpid()} on "))
        return bucket_download.list_files(base_url, prefix)

    monkeypatch.setattr(pg19, "list_files", list_files)
    assert build_download(bucket, tmp_path) == 0
    assert second == ["train/", "validation/", "test/"]
    assert not list((tmp_path / "copy").rglob(".*"))


def test_a_folder_that_a_download_cannot_write_is_named_with_its_option(bucket: Bucket, tmp_path: Path) -> None:
    given = ("--source", tmp_path / "copy", "--out", tmp_path / "out", "--download", "--base-url", bucket.url)
    (tmp_path / "copy" / "metadata.csv").mkdir(parents=True)
    build_refused("pg19", *given, named=(tmp_path / "copy", "--source"), unnamed="data.cache")
    (tmp_path / "copy" / "metadata.csv").rmdir()
    (tmp_path / "copy" / "train").touch()
    build_refused("pg19", *given, named=(tmp_path / "copy" / "train", "--source"), unnamed="data.cache")


def test_only_the_chosen_documents_are_downloaded(bucket: Bucket, tmp_path: Path) -> None:
    assert build_download(bucket, tmp_path, "--first", "2", "--order", "metadata") == 0
    assert train_ids(tmp_path / "out") == ["100", "9"]
    assert sorted(path.name for path in (tmp_path / "copy" / "train").iterdir()) == ["100.txt", "9.txt"]


def test_failures_that_pass_are_tried_again(bucket: Bucket, tmp_path: Path) -> None:
    bucket.failures = {"/books/train/9.txt": [503, 500, 429], LISTING: [502]}
    assert build_download(bucket, tmp_path) == 0
    assert bucket.asked["/books/train/9.txt"] == 4


@pytest.mark.parametrize(
    ("path", "failures", "altered", "code"),
    [
        ("/books/train/9.txt", [503] * 9, None, 1),
        ("/books/train/9.txt", [404], None, 2),
        ("/books/train/9.txt", [], b"Text of 8.\r\n", 2),
        ("/books/train/9.txt", [], bytes(2**20), 2),
        (LISTING, [404], None, 2),
        (LISTING, [503] * 9, None, 1),
        (LISTING, [], b"<html>Welcome!</html>", 2),
        (LISTING, [], b"[]", 2),
        (LISTING, [], b"[" * 10**5, 2),
        (LISTING, [], b'{"items": [0]}', 2),
        ("/books/metadata.csv", None, None, 1),
        ("/books/metadata.csv", [403], None, 2),
    ],
)
def test_a_failed_download_says_which_file_and_keeps_the_others_out_of_the_build(
    bucket: Bucket, tmp_path: Path, path: str, failures: list[int] | None, altered: bytes | None, code: int
) -> None:
    bucket.failures = {path: failures or []}
    bucket.altered = {} if altered is None else {path: altered}
    if failures is None:
        bucket.server_close()  # it cannot be reached at all
    url = f"{bucket.url.replace('//', '//ada:s3cret@')}"
    given = ("--source", tmp_path / "copy", "--out", tmp_path / "out", "--download", "--base-url", url)
    build_refused("pg19", *given, code=code, named=(path.removeprefix("/books/"),), unnamed="s3cret")
    assert not (tmp_path / "copy" / "train" / "9.txt").exists()
    assert not (tmp_path / "out").exists()


def test_the_first_file_that_fails_for_good_ends_the_others_at_once(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "STALL_SECONDS", 0.5)
    bucket.failures = {"/books/train/9.txt": [404]}
    bucket.silent = {"/books/train/10.txt"}
    given = ("--source", tmp_path / "copy", "--out", tmp_path / "out", "--download", "--base-url", bucket.url)
    build_refused("pg19", *given, named=(f"{bucket.url}/train/9.txt",))
    assert bucket.asked["/books/train/10.txt"] <= 1


def test_a_login_page_does_not_replace_the_metadata_of_an_earlier_download(bucket: Bucket, tmp_path: Path) -> None:
    assert build_download(bucket, tmp_path) == 0
    bucket.altered = {"/books/metadata.csv": b"<html>Please log in.</html>\n"}
    given = ("--source", tmp_path / "copy", "--out", tmp_path / "out", "--download", "--base-url", bucket.url)
    build_refused("pg19", *given, named=(f"{bucket.url}/metadata.csv",))
    assert (tmp_path / "copy" / "metadata.csv").read_text() == METADATA
