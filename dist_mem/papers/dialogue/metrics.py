"""Metrics that compare a reply with the reference reply: F1, ROUGE-1, ROUGE-L and METEOR, as in table 2 of the paper.

All are means over replies, in percent. The published evaluation passed the arguments of rouge-score in the wrong order
and took the first element of the result, so its ROUGE is recall; here it is the F-measure.

METEOR needs WordNet, read by NLTK from a plain WordNet 3.0 folder, as Debian's package wordnet-base installs it. NLTK
expects its own download, which has two more files: `lexnames`, the names of WordNet's 45 source files (defined here),
and `index.sense`, for a mapping between versions of WordNet that METEOR does not use.
"""

from __future__ import annotations

import io
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

METRICS = ("f1", "rouge1", "rougeL", "meteor")
Scorer = Callable[[str, str], dict[str, float | None]]
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1(reply: str, *, reference: str) -> float:
    """Return the overlap of two texts as word multisets, normalised as for SQuAD (Rajpurkar et al. 2016); in [0, 1].

    If a text has no words after normalisation, the result is 1 if neither has any, else 0 (SQuAD 2.0).
    """
    found, wanted = _normal_words(reply), _normal_words(reference)
    if not found or not wanted:
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted))


def _normal_words(text: str) -> list[str]:
    """Return the words in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def make_scorer(wordnet_folder: Path | None = None) -> Scorer:
    """Return a function of (reply, reference) that computes every metric in [0, 1]; METEOR is None without WordNet.

    ROUGE is rouge-score's F-measure with the Porter stemmer. METEOR is NLTK's, of lower-case words separated by spaces,
    as NLTK split raw text when the paper was written.

    Args:
        wordnet_folder: None: Debian's folder, if it exists.

    Raises:
        ValueError: `wordnet_folder` contains no WordNet.
    """
    from nltk.translate.meteor_score import meteor_score  # both take seconds to import
    from rouge_score.rouge_scorer import RougeScorer

    rouge = RougeScorer(["rouge1", "rougeL"], use_stemmer=True)
    wordnet = open_wordnet(wordnet_folder)

    def score(reply: str, reference: str) -> dict[str, float | None]:
        overlap = rouge.score(target=reference, prediction=reply)
        meteor = None
        if wordnet is not None:
            meteor = float(meteor_score([reference.split()], reply.split(), wordnet=wordnet))
        return {
            "f1": f1(reply, reference=reference),
            "rouge1": overlap["rouge1"].fmeasure,
            "rougeL": overlap["rougeL"].fmeasure,
            "meteor": meteor,
        }

    return score


def mean_scores(scores: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Return the mean of each metric in percent; None without replies or if the metric is not available."""
    means: dict[str, float | None] = {}
    for metric in METRICS:
        values = [value for score in scores if (value := score[metric]) is not None]
        means[metric] = 100 * fmean(values) if values else None
    return means


DEBIAN_FOLDER = Path("/usr/share/wordnet")
REMEDY = f"apt-get install wordnet-base ({DEBIAN_FOLDER}), or --wordnet FOLDER of a WordNet 3.0 with data.noun"
_NOUNS = (
    "Tops act animal artifact attribute body cognition communication event feeling food group location motive object "
    "person phenomenon plant possession process quantity relation shape state substance time"
)
_VERBS = (
    "body change cognition communication competition consumption contact creation emotion motion perception "
    "possession social stative weather"
)
# lexnames(5WN): number, name and part of speech (1 noun, 2 verb, 3 adjective, 4 adverb); the number is the index here
_LEXNAMES = (
    [("adj.all", 3), ("adj.pert", 3), ("adv.all", 4)]
    + [(f"noun.{name}", 1) for name in _NOUNS.split()]
    + [(f"verb.{name}", 2) for name in _VERBS.split()]
    + [("adj.ppl", 3)]
)


def open_wordnet(folder: Path | None = None) -> Any:
    """Return NLTK's reader of a WordNet folder (None: Debian's), or None if Debian's does not exist.

    Raises:
        ValueError: the given folder contains no WordNet.
    """
    place = folder or DEBIAN_FOLDER
    if not (place / "data.noun").is_file():
        if folder is not None:
            raise ValueError(f"--wordnet {folder}: it has no data.noun: {REMEDY}")
        return None
    return _read_wordnet(place)


@cache  # it takes seconds
def _read_wordnet(place: Path) -> Any:
    import nltk.data  # a second to import
    from nltk.corpus.reader.wordnet import WordNetCorpusReader

    class PlainWordNet(WordNetCorpusReader):
        """A reader that does not need the two files that only NLTK's download has."""

        def open(self, file: str) -> Any:
            if file == "lexnames":
                lines = [f"{number:02}\t{name}\t{kind}\n" for number, (name, kind) in enumerate(_LEXNAMES)]
                return io.StringIO("".join(lines))
            return super().open(file)

        def map_wn(self, version: str = "wordnet") -> None:
            """No mapping to another version of WordNet."""

    if str(place) not in nltk.data.path:
        nltk.data.path.append(str(place))  # NLTK reads only from these folders
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The multilingual functions")
        return PlainWordNet(str(place), None)
