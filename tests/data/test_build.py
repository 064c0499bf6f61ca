"""Building a data directory: the same bytes whatever the workers and interruptions; recall positions in tokens."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_mem.data.shard import read_index, read_mask, read_recall, read_tokens
from dist_mem.data.tokenizers.registry import load_tokenizer
from dist_mem.data.tokenizers.single_bytes import BytesTokenizer
from dist_mem.data.verify import verify_dataset
from dist_mem.datasets import builder as build
from dist_mem.datasets.builder import WorkerKilledError, build_dataset
from dist_mem.datasets.source import RecallSpan, SourceDocument, recall_distances
from tests.support.messages import refused
from tests.support.paths import ROOT

PIECE_BYTES = 2000


def make_texts(num: int = 12) -> list[str]:
    draw = random.Random(0)
    words = ["the", "river", "of", "gold", "met", "an", "old", "mountain;", "she", "had", "never", "said", "where\n\n"]
    return ["  ".join(draw.choices(words, k=draw.randrange(20, 300))) for _ in range(num)]


def make_documents(num: int = 12) -> list[SourceDocument]:
    texts = [*make_texts(num - 1), ""]
    recall = [RecallSpan(8, 12, 0)]
    return [
        SourceDocument(f"{number:02d}", f"Book {number}", text, 1900 + number, recall if number == 3 else None)
        for number, text in enumerate(texts)
    ]


def make_splits() -> dict[str, list[SourceDocument]]:
    documents = make_documents()
    return {"train": documents[:9], "test": documents[9:]}


def build_tiny(out: Path, splits: dict[str, list[SourceDocument]] | None = None, **options: Any) -> dict[str, bytes]:
    options = {"name": "tiny", "vocab_size": 320, "piece_bytes": PIECE_BYTES, "max_shard_bytes": 2000, **options}
    build_dataset(splits or make_splits(), out, **options)
    return contents(out)


def contents(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return build_tiny(tmp_path_factory.mktemp("expected"))


def test_the_result_is_what_the_format_says_and_decodes_to_the_texts(tmp_path: Path) -> None:
    found = build_tiny(tmp_path)
    tars = [name for name in found if name.endswith(".tar")]
    tables = {f"{split}/{name}" for split in ("train", "test") for name in ("index.json", "documents.safetensors")}
    assert set(found) == {"tokenizer.json", "tokenizer.model", *tables, *tars}
    assert len(tars) > 3
    assert all(name.split("/")[1].startswith(f"tiny-{name.split('/')[0]}-0000") for name in tars)
    tokenizer = load_tokenizer(tmp_path)
    for split, documents in make_splits().items():
        index = read_index(tmp_path / split)
        assert index.tokenizer_fingerprint == tokenizer.fingerprint
        for number, document in enumerate(documents):
            entry, text = index.documents[number], str(document.source)
            assert tokenizer.decode(read_tokens(index, number)) == text
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


def test_a_failed_build_goes_on_with_the_pieces_it_has(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, encoded = build.encode_piece, list[Path]()

    def counting(piece: build.Piece, stop_after: int) -> int:
        if len(encoded) == stop_after:
            raise KeyboardInterrupt
        encoded.append(piece.path)
        return encode(piece)

    monkeypatch.setattr(build, "encode_piece", partial(counting, stop_after=3))
    with pytest.raises(KeyboardInterrupt):
        build_tiny(tmp_path)
    assert not list(tmp_path.glob("*/index.json"))
    monkeypatch.setattr(build, "encode_piece", partial(counting, stop_after=99))
    assert build_tiny(tmp_path) == expected
    assert len(encoded) == len(set(encoded)) > 3, "a piece is encoded once"


KILLED_BUILD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.data.test_build import build_tiny, kill_documents
build_tiny(Path(sys.argv[2]), kill_documents(Path(sys.argv[3])), tokenizer_kind="bytes", workers=2)
"""


def kill_documents(fifo: Path) -> dict[str, list[SourceDocument]]:
    """The splits, with a last training document whose text comes from `fifo`."""
    splits = make_splits()
    splits["train"].append(SourceDocument("fifo", "The last one", fifo))
    return splits


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
    with refused(WorkerKilledError):
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
    index = read_index(tmp_path / "out" / "train")
    assert BytesTokenizer().decode(read_tokens(index, 0)) == "new"


def test_another_build_in_the_same_place_is_refused_unless_it_may_overwrite(
    tmp_path: Path, expected: dict[str, bytes]
) -> None:
    in_bytes = {"tokenizer_kind": "bytes"}
    build_tiny(tmp_path, tokenizer_kind="bytes")
    (tmp_path / "notes.txt").write_text("mine")
    changed = {**make_splits(), "test": [SourceDocument("09", "Book 9", "another text"), *make_documents()[10:]]}
    others: list[dict[str, Any]] = [{}, {"max_shard_bytes": 1, **in_bytes}, {"splits": changed, **in_bytes}]
    for options in others:
        with refused(ValueError):
            build_tiny(tmp_path, **options)
    assert build_tiny(tmp_path, overwrite=True) == {**expected, "notes.txt": b"mine"}


def test_the_tokenizer_of_another_dataset_can_be_taken(tmp_path: Path) -> None:
    first = build_tiny(tmp_path / "first")
    second = build_tiny(tmp_path / "second", {"test": make_splits()["train"]}, tokenizer_from=tmp_path / "first")
    assert second["tokenizer.model"] == first["tokenizer.model"]
    assert read_index(tmp_path / "second" / "test").num_tokens == read_index(tmp_path / "first" / "train").num_tokens


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
    index = read_index(tmp_path / "train")
    tokens, mask = read_tokens(index, 0), read_mask(index, 0)
    assert mask is not None
    assert BytesTokenizer().decode(tokens[mask]) == "\u00c9vian?No."
    assert read_mask(index, 1) is None


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


def test_recall_is_stored_where_it_is_recorded(tmp_path: Path) -> None:
    build_tiny(tmp_path, tokenizer_kind="bytes")
    index = read_index(tmp_path / "train")
    recalls = [read_recall(index, number) for number in range(9)]
    assert [recall is not None for recall in recalls] == [number == 3 for number in range(9)]
    assert recalls[3] is not None
    assert np.flatnonzero(recalls[3]).tolist() == [8, 9, 10, 11]
    assert recalls[3][8:12].tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize("span", [(4, 4, 0), (4, 6, 4), (4, 6, 5), (4, 99, 0), (4, 6, -1)])
def test_recall_spans_that_make_no_sense_are_refused(span: tuple[int, int, int]) -> None:
    text = "some text"
    with refused(ValueError):
        recall_distances(SourceDocument("a", "", text, recall=[span]), text, np.arange(len(text)))
