"""Building a data directory: the same bytes whatever the workers and interruptions; recall in tokens; faults."""

import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_mem.data.shard import read_index
from dist_mem.data.tar import MAX_TOKENS, TokenizedDocument, document_arrays
from dist_mem.data.tokenizers.registry import read_tokenizer_metadata
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.data.verify import verify_dataset
from dist_mem.datasets import builder as build
from dist_mem.datasets.source import SourceDocument, recall_distances
from dist_mem.runtime import progress
from dist_mem.runtime.workers import WorkerKilledError
from tests.support.data_builders import build_data, build_refused, documents_of
from tests.support.faults import remount, small_disk
from tests.support.messages import refused, said, said_line
from tests.support.paths import ROOT
from tests.support.small_builds import build_tiny, contents, kill_documents, make_documents, make_splits, make_texts


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return build_tiny(tmp_path_factory.mktemp("expected"))


def test_the_result_is_what_the_format_says_and_decodes_to_the_texts(tmp_path: Path) -> None:
    found = build_tiny(tmp_path)
    tars = [name for name in found if name.endswith(".tar")]
    tables = {
        f"{split}/{name}"
        for split in ("train", "test")
        for name in ("index.json", "documents.safetensors", "build.json")
    }
    assert set(found) == {"tokenizer.json", "tokenizer.model", *tables, *tars}
    assert len(tars) > 3
    assert all(name.split("/")[1].startswith(f"tiny-{name.split('/')[0]}-0000") for name in tars)
    for split, documents in make_splits().items():
        for document, (entry, text, *_) in zip(documents, documents_of(tmp_path, split), strict=True):
            assert text == document.source
            assert (entry.id, entry.title, entry.year) == (document.id, document.title, document.year)
            assert (entry.words, entry.bytes) == (len(text.split()), len(text.encode()))
    assert verify_dataset(tmp_path) == []


@pytest.mark.parametrize("options", [{"workers": 2}, {"workers": 2, "piece_bytes": 1}, {"piece_bytes": 2**20}])
def test_the_bytes_do_not_depend_on_workers_and_pieces(
    tmp_path: Path, expected: dict[str, bytes], options: dict[str, Any]
) -> None:
    assert build_tiny(tmp_path, **options) == expected


def test_a_finished_build_is_kept_but_for_a_tar_that_is_missing_or_cut(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tiny(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(build, "encode_piece", None)
        patch.setattr(build, "train_sentencepiece", None)
        assert build_tiny(tmp_path) == expected
    tars = sorted((tmp_path / "train").glob("*.tar"))
    for harm in (tars[0].unlink, lambda: tars[1].write_bytes(b"cut")):
        harm()
        assert build_tiny(tmp_path) == expected


def test_each_array_of_a_piece_is_read_once(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of short rows have 100,000 documents."""
    read, get = Counter[tuple[object, str]](), np.lib.npyio.NpzFile.__getitem__

    def count(arrays: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
        read[arrays.zip, name] += 1
        return get(arrays, name)

    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", count)
    assert build_tiny(tmp_path, piece_bytes=2**20) == expected
    assert set(read.values()) == {1} and len(read) > 12


KILLED_BUILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.support.small_builds import build_tiny, kill_documents
build_tiny(Path(sys.argv[2]), kill_documents(Path(sys.argv[3])), tokenizer_kind="bytes", workers=2)
"""


def test_a_killed_build_ends_its_workers_and_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    source, out = tmp_path / "fifo", tmp_path / "out"
    source.parent.mkdir(exist_ok=True)
    subprocess.run(["mkfifo", source], check=True)
    command = [sys.executable, "-c", KILLED_BUILD, str(ROOT), str(out), str(source)]
    builder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with source.open("wb"):  # opens once a worker reads it, in the last piece of the split
        builder.send_signal(signal.SIGKILL)
        builder.communicate()  # returns once no worker holds the pipe any more, though one still waits for its text
    assert builder.returncode == -signal.SIGKILL
    assert not list(out.glob("*/index.json"))
    finished = len(list(out.glob(".build/*.npz")))
    assert finished > 0
    source.unlink()
    source.write_text("The end.\n")
    resumed = build_tiny(out, kill_documents(source), tokenizer_kind="bytes")
    assert resumed == build_tiny(tmp_path / "straight", kill_documents(source), tokenizer_kind="bytes", workers=2)


def test_a_killed_worker_is_reported_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "encode_piece", die)
    with refused(WorkerKilledError, "fewer workers"):
        build_tiny(tmp_path, tokenizer_kind="bytes", workers=2)


def die(piece: build.Piece) -> int:
    signal.raise_signal(signal.SIGKILL)
    return piece.num_bytes


def test_an_edited_document_is_encoded_again_after_a_failure(tmp_path: Path) -> None:
    texts = [tmp_path / name for name in ("good.txt", "bad.txt")]
    texts[0].write_text("old")
    texts[1].write_bytes(b"\xff")
    for _ in range(2):
        documents = [SourceDocument(path.stem, "title", path) for path in texts]
        if texts[1].read_bytes() == b"\xff":
            with refused(ValueError, "bad.txt"):
                build_tiny(tmp_path / "out", {"train": documents}, tokenizer_kind="bytes", piece_bytes=1)
            texts[0].write_text("new")  # of the same size
            texts[1].write_text("fine")
    build_tiny(tmp_path / "out", {"train": documents}, tokenizer_kind="bytes", piece_bytes=1)
    assert documents_of(tmp_path / "out")[0].text == "new"


def test_a_tokenizer_is_trained_again_on_an_edited_document_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "text.txt"

    def build_from(out: Path, text: str) -> dict[str, bytes]:
        source.write_text(text)
        return build_tiny(out, {"train": [SourceDocument("1", "title", source)]})

    text, stopped = "\n".join(make_texts()), tmp_path / "stopped"
    other = text.replace("river", "ocean")
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(build, "encode_piece", None)
        build_from(stopped, text)
    assert build_from(stopped, other) == build_from(tmp_path / "straight", other)


def test_another_build_in_the_same_place_is_refused_unless_it_may_overwrite(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    in_bytes = {"tokenizer_kind": "bytes"}
    build_tiny(tmp_path, tokenizer_kind="bytes")
    for name in ("notes.txt", "notes.partial"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "train" / "x.partial").mkdir()
    changed = {**make_splits(), "test": [SourceDocument("09", "Book 9", "another text"), *make_documents()[10:]]}
    others: dict[str, dict[str, Any]] = {
        "tokenizer.json": {},
        "train/index.json": {"max_shard_bytes": 1, **in_bytes},
        "test/index.json": {"splits": changed, **in_bytes},
    }
    for name, options in others.items():
        with refused(ValueError, tmp_path / name, "belongs to another build"):
            build_tiny(tmp_path, **options)
    mine = {"notes.txt": b"mine", "notes.partial": b"mine"}
    assert build_tiny(tmp_path, overwrite=True) == {**expected, **mine}


def test_the_tokenizer_is_trained_on_the_train_split_alone(tmp_path: Path, expected: dict[str, bytes]) -> None:
    splits = {"train": make_splits()["train"], "test": [SourceDocument("0", "", "Zyzzyva zyzzyva " * 500)]}
    assert build_tiny(tmp_path, splits)["tokenizer.model"] == expected["tokenizer.model"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tokenizer_kind": "letters"}, "letters"),
        ({"splits": {"test": make_documents(2)}}, "train"),
        ({"splits": {"train": make_documents(2) * 2}}, "00"),
        ({"vocab_size": 30_000}, "vocab_size"),
        *(
            ({"splits": {"train": [SourceDocument("a", "", "short", scored=[span])]}, "tokenizer_kind": "bytes"}, "a")
            for span in [(3, 3), (-1, 2), (2, 99)]
        ),
    ],
)
def test_what_cannot_be_built_is_refused(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with refused(ValueError, named):
        build_tiny(tmp_path, **options)


def test_scored_spans_become_the_mask(tmp_path: Path) -> None:
    text = "Ann: \u00c9vian? Bob: No."
    spans = [(text.index("\u00c9"), text.index(" Bob")), (text.index("No"), len(text))]
    documents = [SourceDocument("a", "", text, scored=spans), SourceDocument("b", "", text)]
    build_tiny(tmp_path, {"train": documents}, tokenizer_kind="bytes")
    first, second = documents_of(tmp_path)
    assert BytesTokenizer().decode(first.tokens[first.mask]) == "\u00c9vian?No."
    assert (second.entry.mask_offset, second.entry.recall_offset) == (None, None)


@given(st.text("ab \u00c9\u20ac", min_size=8, max_size=60), st.data())
def test_recall_of_many_spans_equals_one_span_after_the_other(text: str, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(1, 5), max_size=60))  # bytes of each token, but the last
    sizes = np.array([size for size, end in zip(tokens, np.cumsum(tokens), strict=True) if end < len(text.encode())])
    characters = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
    starts = characters[np.concatenate(([0], np.cumsum(sizes))).astype(int)]
    places = st.lists(st.integers(0, len(text)), min_size=3, max_size=3, unique=True).map(sorted)
    spans = [(start, stop, referent) for referent, start, stop in data.draw(st.lists(places, max_size=12))]
    expected = np.zeros(len(starts), dtype=np.int32)
    good = []
    for start, stop, referent in spans:
        first, source = (int(np.flatnonzero(starts == starts[starts <= place][-1])[0]) for place in (start, referent))
        if source < first:
            good.append((start, stop, referent))
            for token in range(first, np.count_nonzero(starts < stop)):
                expected[token] = token - source
    found = recall_distances(SourceDocument("a", "", text, recall=good), text, starts)
    assert np.array_equal(found, expected) and found.dtype == np.int32


@pytest.mark.parametrize("span", [(4, 4, 0), (4, 6, 4), (4, 6, 5), (4, 99, 0), (4, 6, -1)])
def test_recall_spans_that_make_no_sense_are_refused(span: tuple[int, int, int]) -> None:
    text = "some text"
    with refused(ValueError, f"recall span {span}"):
        recall_distances(SourceDocument("a", "", text, recall=[span]), text, np.arange(len(text)))


# Faults of texts, place and disk: what is said, with which exit code, and what is left.


TEXT = b"It was the best of times,\nit was the worst of times.\n"
METADATA = "1,One,1900,u\n2,Two,1901,u\n3,Three,1902,u\n"
SCRIPT = ROOT / "shards" / "build.py"


def write_source(source: Path, books: dict[str, bytes], metadata: str = METADATA) -> Path:
    """`books`: "train/1" -> content of the file."""
    for name, content in books.items():
        path = source / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (source / "metadata.csv").write_text(metadata, encoding="utf-8")
    return source


def build_pg19(source: Path, out: Path, *options: str) -> int:
    return build_data("pg19", "--source", str(source), "--out", str(out), "--tokenizer", "bytes", *options)


def refuse(source: Path, out: Path, *named: str, code: int = 2) -> None:
    build_refused("pg19", "--source", source, "--out", out, "--tokenizer", "bytes", code=code, named=named)


REFUSED = {
    "not UTF-8": ({"train/2": b"caf\xe9"}, METADATA, "train/2.txt"),
    "id twice in metadata": ({"train/1": TEXT}, METADATA + "2,Again,1905,u\n", "row 4: id 2"),
    "bad row in metadata": ({"train/1": TEXT}, METADATA + "4,Four\n", "metadata.csv, row 4"),
    "book in two splits": ({"train/1": TEXT, "test/1": b"x"}, METADATA, "document 1 is in train and in test"),
    "text under two names": ({"train/7": TEXT, "test/8": b"\xef\xbb\xbf" + TEXT + b"\n"}, METADATA, "test/8.txt"),
    "text of a known book": ({"train/1": TEXT, "test/8": TEXT}, METADATA, "test/8.txt"),
    "unknown book in two splits": ({"train/9": TEXT, "validation/9": TEXT}, METADATA, "validation/9.txt"),
    "id that no tar can carry": ({"train/a.b": TEXT}, METADATA, "document id 'a.b' in split 'train'"),
    "no folder": ({"trian/1": TEXT}, METADATA, "--source"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_sources_that_cannot_be_built_are_refused_and_nothing_is_there(tmp_path: Path, fault: str) -> None:
    books, metadata, named = REFUSED[fault]
    refuse(write_source(tmp_path / "source", books, metadata), tmp_path / "out", named)
    assert {name for name in contents(tmp_path) if name.startswith("out/")} <= {"out/tokenizer.json"}


def test_numbers_begun_anew_in_each_split_are_other_books(tmp_path: Path) -> None:
    books = {"train/9": TEXT, "test/9": TEXT + TEXT, "train/10": b"", "test/11": b" "}  # and without words
    assert build_pg19(write_source(tmp_path / "source", books), tmp_path / "out") == 0


def test_books_that_are_odd_but_text_are_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The byte order mark goes, line ends become LF; empty, blank and unnamed books stay, and are reported."""
    books = {
        "train/1": TEXT,
        "train/10": b"\xef\xbb\xbf" + TEXT.replace(b"\n", b"\r\n"),
        "train/11": TEXT.replace(b"\n", b"\r"),
        "train/12": b"",
        "train/13": b" \n\t\r\n",
        "train/14": b"a\0b\n",
    }
    source = write_source(tmp_path / "source", books, "\ufeff" + METADATA)
    assert build_pg19(source, tmp_path / "out") == 0
    reported = capsys.readouterr().out
    said_line(reported, "5 of 6 documents", "metadata.csv")
    said_line(reported, "2 of 6 documents", "12, 13")
    found = documents_of(tmp_path / "out")
    assert [document.entry.title for document in found] == ["One", "10", "11", "12", "13", "14"]
    assert [document.text.encode() for document in found] == [TEXT, TEXT, TEXT, b"", b" \n\t\n", b"a\0b\n"]
    assert verify_dataset(tmp_path / "out") == []


def test_one_line_of_megabytes_is_text_like_any_other(tmp_path: Path) -> None:
    words = " ".join(f"word{number}" for number in range(150_000)).encode()  # 1.5 MB
    source = write_source(tmp_path / "source", {"train/1": words, "train/2": b"x" * 2**20, "train/3": TEXT * 100})
    options = ["--tokenizer", "sentencepiece", "--vocab-size", "300"]
    assert build_pg19(source, tmp_path / "out", *options) == 0
    sizes = [entry.bytes for entry in read_index(tmp_path / "out" / "train").documents]
    assert sizes == [len(words), 2**20, len(TEXT) * 100]


def test_a_document_beyond_int32_is_refused() -> None:
    tokens = np.broadcast_to(np.uint16(0), (MAX_TOKENS + 1,))  # takes two bytes
    document = TokenizedDocument("1", "One", None, words=1, bytes=1, tokens=tokens)
    with refused(ValueError, "2,147,483,647"):
        document_arrays(document)


@pytest.mark.parametrize(
    ("name", "content"), [("train/index.json", '{"of": "another program"}'), ("tokenizer.json", "no JSON")]
)
def test_what_another_program_left_is_refused_and_kept(tmp_path: Path, name: str, content: str) -> None:
    source, out = write_source(tmp_path / "source", {"train/1": TEXT}), tmp_path / "out"
    (out / "train").mkdir(parents=True)
    (out / name).write_text(content)
    (out / "train" / "their_own.tar").write_bytes(b"tar")
    refuse(source, out, name, "--out", "--overwrite")
    assert (out / name).read_text() == content
    assert build_pg19(source, out, "--overwrite") == 0
    assert read_tokenizer_metadata(out)["kind"] == "bytes"
    assert (out / "train" / "their_own.tar").read_bytes() == b"tar"


@pytest.mark.parametrize("name", ["text", "pg19"])
def test_a_build_is_replaced_with_its_own_tokenizer_and_kept_where_there_is_none(tmp_path: Path, name: str) -> None:
    source, out = write_source(tmp_path / "source", {"train/1": TEXT * 20}), tmp_path / "out"
    given = ("--source", source, "--out", out)
    assert build_data(name, *given, "--vocab-size", "280") == 0
    files = contents(out)
    again = (*given, "--overwrite", "--tokenizer-from")
    build_refused(name, *again, source, named=(source, "tokenizer.json", "--tokenizer-from"))
    assert contents(out) == files
    assert build_data(name, *again, out) == 0
    assert contents(out).keys() == files.keys()
    assert contents(out)["tokenizer.model"] == files["tokenizer.model"]


def test_a_full_disk_stops_a_build_that_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """A real process; no half-written file is left, and the result is that of a build in one go."""
    books = {f"train/{number}": bytes([97 + number]) * 400_000 for number in range(8)}
    source = write_source(tmp_path / "source", books)
    command = [sys.executable, str(SCRIPT), "pg19", "--source", str(source), "--tokenizer", "bytes", "--out"]
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        stopped = subprocess.run([*command, str(disk / "out")], capture_output=True, text=True, check=False)
        assert stopped.returncode == 1, stopped.stderr
        said(stopped.stderr, "[Errno 28]", f"'{disk / 'out'}")
        assert stopped.stderr.count("\n") == 1
        assert not list(disk.rglob("*.partial"))
        remount(disk, "size=40m")
        assert build_pg19(source, disk / "out") == 0
        assert build_pg19(source, tmp_path / "out") == 0
        assert contents(disk / "out") == contents(tmp_path / "out")


def test_a_read_only_place_is_an_error_of_one_line(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", {"train/1": TEXT})
    with small_disk(tmp_path / "disk", "ro") as disk:
        refuse(source, disk / "out", "[Errno 30]", f"'{disk / 'out'}", code=1)


def test_a_log_file_has_lines_of_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    options = ("--split-by-hash", "train=1", "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert build_data("text", "--source", tmp_path / "a.jsonl", *options) == 0
    printed = capsys.readouterr().err
    for what in ("reading: 2 documents", "train: tokens: 6 of 6 bytes", "train: tars: 2 of 2 documents"):
        assert what in printed, printed


def test_an_option_that_another_leaves_without_use_is_refused(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source", {"train/1": TEXT})
    for name in ("text", "pg19"):
        arguments = ("--source", source, "--out", tmp_path / "out")
        build_refused(
            name, *arguments, "--tokenizer", "bytes", "--vocab-size", "300", named=("--vocab-size", "--tokenizer bytes")
        )
        assert not (tmp_path / "out").exists()
    assert build_pg19(source, tmp_path / "one", "--tokenizer", "bytes") == 0
    taken = ("--tokenizer-from", tmp_path / "one")
    build_refused("pg19", *arguments, *taken, "--vocab-size", "300", named=("--vocab-size", "--tokenizer-from"))
    with pytest.raises(SystemExit) as ended:
        build_data("pg19", *arguments, *taken, "--tokenizer", "bytes")
    assert ended.value.code == 2
