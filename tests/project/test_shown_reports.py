"""Reports of faults, which no command of a page makes: a block `text` of a page has the form that the code writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dist_mem.doctor import disks, machine, network
from dist_mem.supervision import findings, flight_recorder, hang_report
from dist_mem.supervision.findings import Place
from dist_mem.supervision.hang_report import Position
from dist_mem.supervision.stragglers import Stragglers
from tests.support.page_commands import FENCE, PAGES
from tests.support.paths import ROOT
from tests.support.shown_output import difference

pytestmark = pytest.mark.pages

Patch = pytest.MonkeyPatch
NODES = [f"node{1 + rank // 3}" for rank in range(8)]


def hang(_: Patch) -> str:
    """Rank 3 is silent."""
    positions = [Position(rank, NODES[rank], 1, 1207, "backward", 90, 600.2) for rank in range(8) if rank != 3]
    return hang_report.report(positions, NODES, seconds=600, folder=Path("runs/demo/hangs/20261120T101500Z"))


def collective(_: Patch) -> str:
    """The device of rank 3 does not begin what all others wait in."""
    operation = "nccl:all_reduce of 1,048,576 BFloat16"
    states = {rank: frozenset({4812} if rank != 3 else ()) for rank in range(8)}
    ranks = {rank: flight_recorder.Progress({4812: operation}, 4812, begun, 4812) for rank, begun in states.items()}
    return "\n".join(flight_recorder._judged("nccl group 0 (default_pg)", ranks).lines)


def stragglers(_: Patch) -> str:
    ranks = Stragglers(None, rank=0, nodes=NODES, threshold=1.5)
    slow, calm = [0.21 if rank == 3 else 0.1 for rank in range(8)], [0.1] * 8
    steps = enumerate([*[slow] * 40, *[calm] * 40], start=800)
    return "\n".join(f"step {step}: {message}" for step, slots in steps for message in ranks.update(slots))


def doctor(patch: Patch) -> str:
    patch.setattr(machine, "_raised", lambda kind, good: 64)
    patch.setattr(disks, "compiler_caches", lambda: {"Triton": (Path("/home/ann/.triton/cache"), "TRITON_CACHE_DIR")})
    patch.setattr(disks, "file_system_of", lambda path: "nfs4")
    places = [Place(NODES[rank // 2], rank) for rank in range(16)]
    (files, *_) = machine.check_limits(16)
    found = [remark.at(Place("node2")) for remark in disks.check_caches()]
    return "\n".join(findings.lines([*network.check_sums(places, [[]] * 16), *found, files.at(Place("node2", 9))]))


MADE: dict[str, list[Callable[[Patch], str]]] = {
    "docs/howto/trouble.md": [hang, collective, stragglers],
    "docs/howto/doctor.md": [doctor],
}


def texts(page: Path) -> list[str]:
    return [block for language, block in FENCE.findall(page.read_text(encoding="utf-8")) if language == "text"]


def test_every_text_of_a_page_is_compared() -> None:
    shown = {page.relative_to(ROOT).as_posix(): len(texts(page)) for page in PAGES if texts(page)}
    assert shown == {page: len(makers) for page, makers in MADE.items()}


CASES = [
    pytest.param(page, index, id=f"{Path(page).stem}-{make.__name__}")
    for page, makers in MADE.items()
    for index, make in enumerate(makers)
]


@pytest.mark.parametrize(("page", "index"), CASES)
def test_a_report_has_the_form_of_the_page(page: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        made = MADE[page][index](patch)
    assert (differs := difference(texts(ROOT / page)[index], made)) is None, differs
