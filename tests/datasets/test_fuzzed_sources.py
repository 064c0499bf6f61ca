"""Corpora that are damaged or odd: all their texts are read, or they are refused; no traceback, and no endless loop."""

from __future__ import annotations

import io
import random
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from dist_mem.data.shard import read_index
from tests.support.data_builders import build_data
from tests.support.fuzzed_sources import number_of_texts, write_source

NUMBER = 25  # of corpora a seed


def check(seed: str, folder: Path) -> int:
    """Build a corpus; return the exit code."""
    path = write_source(random.Random(seed), folder / "corpus")
    name, out = ("pg19", folder / "out") if path.name == "metadata.csv" else ("text", folder / "out")
    split = () if name == "pg19" else ("--split-by-hash", "train=1")
    with redirect_stderr(io.StringIO()) as printed, redirect_stdout(io.StringIO()):
        code = build_data(name, "--source", folder / "corpus", "--out", out, "--tokenizer", "bytes", *split)
    assert code in (0, 2), f"{seed}: {code} {printed.getvalue()}"
    if code == 0:
        assert len(read_index(out / "train").documents) == number_of_texts(path), seed
    else:
        assert printed.getvalue().startswith("error: ") and "Traceback" not in printed.getvalue(), seed
        assert not out.exists(), seed
    return code


@pytest.mark.parametrize("seed", range(4))
def test_a_fuzzed_corpus_is_read_whole_or_refused(tmp_path: Path, seed: int) -> None:
    codes = set()
    for number in range(NUMBER):
        folder = tmp_path / str(number)
        folder.mkdir()
        codes.add(check(f"{seed}-{number}", folder))
        shutil.rmtree(folder)
    assert codes == {0, 2}
