"""docs/explanation/claims.md: verdicts are of one list, and every figure names its log entry or test."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

DOCS = ROOT / "docs" / "explanation"
VERDICTS = {"seen", "seen at small scale", "not seen", "opposite seen", "open"}
CLAIMS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (DOCS / "claims.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and line.count("|") == 5 and not line.startswith("| claim ")
]


def test_a_claim_has_a_verdict_and_its_figures_a_source(subtests: pytest.Subtests) -> None:
    assert len(CLAIMS) > 30
    for claim in CLAIMS:
        with subtests.test(claim=claim):
            _, run, verdict, seen = claim
            assert verdict in VERDICTS
            source = re.search(r"\]\(\.\./log/[\d-]+\.md#", seen) or re.search(r"`tests/[\w/]+\.py`", run)
            figures = re.findall(r"\d+\.\d+", re.sub(r"\]\([^)]*\)", "]", seen))
            assert source or not figures
            assert source or verdict == "open"
