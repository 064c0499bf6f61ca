"""WordNet for METEOR, read by NLTK from a plain WordNet 3.0 folder, as Debian's package wordnet-base installs it.

NLTK expects its own download, which has two more files: `lexnames`, the names of WordNet's 45 source files (defined
here), and `index.sense`, for a mapping between versions of WordNet that METEOR does not use.
"""

from __future__ import annotations

import io
import warnings
from functools import cache
from pathlib import Path
from typing import Any

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
