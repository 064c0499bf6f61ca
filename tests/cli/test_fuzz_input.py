"""Any value for any key: `dist-mem train` takes it, or ends with code 2 and one error, and never in another way.

Keys are discovered from the schema, the `deepspeed:` block and the memories' options. Most inputs are checked in this
process by `train --check`, which does all of a start up to the first rank; a sample of them is trained by real
processes. How many inputs were tried is printed at the end.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dist_mem.__main__ import main
from dist_mem.config import Config, known_keys
from dist_mem.config.keys import Metadata, find_key, keys_of
from dist_mem.memory import described_memories
from tests.support.asked import Asked
from tests.support.damaged_json import PIECES
from tests.support.jobs import write_config
from tests.support.limits import limit

pytestmark = pytest.mark.nightly

NUM_INPUTS = 2000
NUM_TRAINED = 40
SLOW = 60.0  # seconds: an input that takes longer counts as one that does not end
OPTIONS = {field.name for _, options in described_memories().values() for field in fields(options)}
KEYS = sorted({key.replace("[]", "[0]") for key in known_keys()} | {f"memory.{name}" for name in ("kind", *OPTIONS)})
KINDS = sorted(described_memories())


def metadata_of(key: str) -> Metadata:
    found = find_key(Config, key)
    options = [keys_of(options).get(key.rpartition(".")[2]) for _, options in described_memories().values()]
    found = found or next((option for option in options if option and key.startswith("memory.")), None)
    return found.metadata if found else Metadata()


def edges(key: str) -> list[str]:
    """Numbers around the bounds of a key, and of machine words."""
    ends = {0, 1, 2, 2**31, 2**63, 10**20, int(metadata_of(key).at_most or 0)}
    return [str(number + step) for number in ends for step in (-1, 0, 1)]


def texts(key: str) -> st.SearchStrategy[str]:
    """What may stand behind `key=`."""
    words = [*metadata_of(key).choices, *(KINDS if key == "memory.kind" else ())]
    quoted = st.text(max_size=40).map(json.dumps)
    long = st.integers(1, 20_000).flatmap(
        lambda size: st.sampled_from(["x", "é", "9", "[", "x/"]).map(lambda a: a * size)
    )
    plain = st.sampled_from([*edges(key), *PIECES, *words])
    numbers = st.one_of(st.integers().map(str), st.floats().map(repr), st.integers(-(10**30), 10**30).map(str))
    lists = st.lists(st.one_of(numbers, quoted, plain), max_size=4).map(lambda items: f"[{', '.join(items)}]")
    usual = st.one_of(st.integers(1, 64).map(str), st.floats(0, 1).map(repr), st.sampled_from(["true", "false"]))
    return st.one_of(plain, plain, usual, usual, numbers, quoted, st.text(max_size=40), lists, long)


overrides = st.sampled_from(KEYS).flatmap(lambda key: texts(key).map(lambda text: f"{key}={text}"))
wrong_keys = st.tuples(st.text(max_size=60), st.sampled_from(PIECES)).map("=".join)
inputs = st.lists(st.one_of(*[overrides] * 9, wrong_keys), min_size=1, max_size=3)
steady = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "phases": [Phase.explicit, Phase.generate],
    "suppress_health_check": list(HealthCheck),
}


@pytest.fixture(scope="module")
def config(books: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of one step that any key may be added to."""
    few = {
        "run_dir": "run",
        "train": {"steps": 1, "global_batch_size": 2, "micro_batch_size": 2},
        "checkpoint": {"every": None},
    }
    return write_config(tmp_path_factory.mktemp("fuzz") / "base.yaml", books, Path("run"), few)


@pytest.fixture(scope="module")
def tried() -> Iterator[Counter[str]]:
    """Counts inputs by how they ended."""
    counts: Counter[str] = Counter()
    yield counts
    print("\ninputs tried:", dict(counts))


def usable(given: list[str]) -> list[str]:
    """The overrides without those that would open a network or start a program, and in a form that a shell can give."""
    asked = [
        text.replace("\0", "").encode(errors="surrogateescape" if text.isascii() else "replace").decode()
        for text in given
    ]
    return [text for text in asked if not re.search(r"://|pipe:", text) and not text.startswith("-")]


def check_answer(given: list[str], code: Any, text: str, left: list[str]) -> None:
    """Taken, or refused with one error, and then nothing is left."""
    assert code in (0, 2), f"{given}: code {code}\n{text[-3000:]}"
    assert "Traceback" not in text, f"{given}\n{text[-3000:]}"
    if code == 2:
        assert len(re.findall(r"^(?:dist-mem [\w -]+: )?error: ", text, re.MULTILINE)) == 1, f"{given}\n{text[-3000:]}"
        assert not left, f"{given} leaves {left}"
        assert len(text) < 20_000, f"{given}: {len(text)} characters"


def named(override: str) -> tuple[str, ...]:
    """One of these an error must have: the last part of the key, or its block, which another key has made invalid."""
    key = override.partition("=")[0].replace("[0]", "")
    last, block = re.split(r"[.\[]", key)[-1], key.rpartition(".")[0]
    return (last[:100], f"{block}.") if "." in block else (last[:100],)


@settings(max_examples=NUM_INPUTS, **steady)
@given(chosen=inputs)
def test_any_input_is_taken_or_refused(
    chosen: list[str], config: Path, tried: Counter[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    here = tmp_path_factory.getbasetemp() / "empty"
    here.mkdir(exist_ok=True)
    asked, reported = usable(chosen), StringIO()
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(reported), redirect_stderr(reported):
        patch.chdir(here)
        try:
            code: Any = main(["train", str(config), "--check", *asked])
        except SystemExit as ended:
            code = ended.code
    assert time.monotonic() - began < limit(SLOW), f"{asked} took {time.monotonic() - began:.0f} s"
    text = reported.getvalue()
    check_answer(asked, code, text, [str(path) for path in here.iterdir()])
    if code == 2 and len(asked) == 1:
        assert any(name in text for name in named(asked[0])), f"{asked}: the key is not named\n{text[-3000:]}"
    tried[f"checked: {code}"] += 1


@settings(max_examples=NUM_TRAINED, **steady)
@given(chosen=overrides)
def test_any_input_is_trained_or_refused(chosen: str, config: Path, tried: Counter[str], asked: Asked) -> None:
    given = usable([chosen])
    answer = asked(["train", str(config), *given])
    assert answer.code in (0, 2, 3), f"{given}: code {answer.code}\n{answer.text[-3000:]}"  # 3: it diverged
    check_answer(given, min(answer.code, 2) if answer.code != 3 else 0, answer.text, answer.left)
    tried[f"trained: {answer.code}"] += 1
