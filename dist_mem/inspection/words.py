"""Group the tokens of a text into words, and sort the words into simple classes by stated rules.

name: a capitalised word that does not begin a sentence; or one that does, if it is a name elsewhere and nowhere in
    lower case. Words in capitals only (headings), I and its contractions are none.
number: a word with a digit, or a number word up to twelve, a hundred, a thousand.
function word: an article, pronoun, preposition, conjunction or auxiliary verb of English (`FUNCTION_WORDS`).
mark: no letter and no digit. other: every other word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

NAME, NUMBER, FUNCTION, OTHER, MARK = CLASSES = ("name", "number", "function word", "other", "mark")
_NUMBERS = "one two three four five six seven eight nine ten eleven twelve hundred thousand first second third"
_FUNCTION_WORDS = """a an the this that these those i me my mine myself we us our ours you your yours he him his himself
she her hers herself it its itself they them their theirs who whom whose which what there here of in on at by for with
from to into onto upon over under up down out off about after before between through without within against during and
or but nor so yet if then than because as while when where why how though although until unless since not no is am are
was were be been being have has had having do does did done will would shall should can could may might must any some
all both each every other such only own same too very"""
NUMBER_WORDS, FUNCTION_WORDS = frozenset(_NUMBERS.split()), frozenset(_FUNCTION_WORDS.split())
_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*|[^\w\s]+")
_ENDS_SENTENCE = re.compile('[.!?:;"\u201c\u201d\u2018(\\[_*-]|\u2014')  # before a word: the next one may begin one
_I = re.compile("I(?:['\u2019].*)?")
_POSSESSIVE = re.compile("['\u2019]s?$")


class TextWord(NamedTuple):
    """A word, or a run of marks, of a text."""

    text: str
    first: int  # its tokens are [first, end)
    end: int
    kind: str  # of CLASSES


def words_of(pieces: Sequence[str]) -> list[TextWord]:
    """Return the words of a text that is given by its tokens' pieces; a token belongs to the word that it begins in.

    A piece without a character of its own, as a space, or the first bytes of a character that another token completes,
    belongs to the word after it; the last of them to none.
    """
    text = "".join(pieces)
    found = list(_WORD.finditer(text))
    kinds = _kinds(text, found)
    words: list[TextWord] = []
    token, position = 0, 0  # `position`: of the character at which `token` begins
    for match, kind in zip(found, kinds, strict=True):
        first = token
        while token < len(pieces) and _begins_before(pieces[token], position, match.end()):
            position += len(pieces[token])
            token += 1
        if token > first:
            words.append(TextWord(match[0], first, token, kind))
    return words


def _begins_before(piece: str, position: int, end: int) -> bool:
    """Return whether the first character of a piece that is no space stands before `end`."""
    return position + len(piece) - len(piece.lstrip()) < end


def _kinds(text: str, found: Sequence[re.Match[str]]) -> list[str]:
    """Return the class of every word."""
    begins = _sentence_starts(text, found)
    inside = {match[0] for match, begin in zip(found, begins, strict=True) if not begin and _is_capitalised(match[0])}
    lower = {match[0] for match in found if match[0][0].islower()}
    kinds = []
    for match, begin in zip(found, begins, strict=True):
        word = match[0]
        is_name = _is_capitalised(word) and (not begin or (word in inside and word.lower() not in lower))
        kinds.append(NAME if is_name else _kind_without_names(word.lower()))
    return kinds


def _sentence_starts(text: str, found: Sequence[re.Match[str]]) -> list[bool]:
    """Return which words may begin a sentence: after a mark that ends one or opens speech, or after an empty line."""
    starts, end, begins = [], 0, True
    for match in found:
        begins = begins or "\n\n" in text[end : match.start()]
        starts.append(begins)
        is_word = match[0][0].isalnum()
        begins = bool(_ENDS_SENTENCE.search(match[0])) if not is_word else False
        end = match.end()
    return starts


def _is_capitalised(word: str) -> bool:
    is_plain = word[0].isupper() and not (len(word) > 1 and word.isupper())
    return is_plain and not _I.fullmatch(word) and not any(character.isdigit() for character in word)


def _kind_without_names(word: str) -> str:
    if not any(character.isalnum() for character in word):
        return MARK
    if word in NUMBER_WORDS or any(character.isdigit() for character in word):
        return NUMBER
    return FUNCTION if re.split("['\u2019]", word)[0] in FUNCTION_WORDS else OTHER


def distances_to_last(words: Sequence[TextWord], kind: str = NAME) -> list[int | None]:
    """Return, per word, the tokens back to the last mention of the same word; None: not of the class, or the first."""
    last: dict[str, int] = {}
    distances: list[int | None] = []
    for word in words:
        name = _POSSESSIVE.sub("", word.text) if word.kind == kind else None
        distances.append(word.first - last[name] if name in last else None)
        if name is not None:
            last[name] = word.first
    return distances
