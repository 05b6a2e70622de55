"""Whether a text is nearly one of those that must not be trained on: overlap of word n-grams over the whole text.

Two texts with the same words are the same, whatever their case, punctuation and white space. Beyond that, a text overlaps
with a known one if it holds at least half of the known one's words in runs of eight or more: Tulu 3's measure
(Lambert et al., 2024, arXiv:2411.15124, section 3.2), which finds a changed beginning, a changed ending and a text put into
a longer one. A text of fewer than eight words is only found word for word.

An instruction that stands before many prompts makes them no duplicates. Runs that many texts share are boilerplate: they are
left out, and the overlap is that of the rest of the known text; a rest of fewer than eight words has to be there
completely.

`training_prompts.u64` in a finished store holds what it was made from in this form (`PromptsFile`), for evaluations by other
suites.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import xxhash

from draftsmith.run.atomic_io import new_file

TRAINING_PROMPTS = "training_prompts.u64"
NGRAM_WORDS = 8
"""Words in a run."""
SHARE = 0.5
"""The part of a known text's words that makes another text overlap with it."""
_KNOWN_SHARING = 2
"""A run in more known texts than this is boilerplate."""
_TEXTS_SHARING = 10
"""A held-out text's run in more texts of its own kind than this, held out or not, is boilerplate."""

# Han, kana: written without spaces, so that each character counts as a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_FACTORS = np.array([pow(0x9E3779B97F4A7C15, power, 2**64) for power in range(NGRAM_WORDS)], dtype=np.uint64)

Hashes = npt.NDArray[np.uint64]
Kind = Literal["verbatim", "near"]


@dataclass(frozen=True)
class Text:
    """A text as numbers, the same in every process: millions of them stay in memory."""

    whole: int
    """A 64-bit hash of its words in order; of a text without words, of its characters but for white space."""
    words: int
    """How many there are."""
    ngrams: Hashes
    """Hashes of its runs of eight words, [words - 7]; none of a shorter text."""


def numbers_of(text: str) -> Text:
    """The text as `Known` compares it."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    words = [word.encode("utf-8", "surrogatepass") for word in _WORD.findall(plain)]
    whole = b" ".join(words) or "".join(plain.split()).encode("utf-8", "surrogatepass")
    if len(words) < NGRAM_WORDS:
        ngrams = np.empty(0, np.uint64)
    else:
        hashes = np.fromiter((xxhash.xxh3_64_intdigest(word) for word in words), np.uint64, len(words))
        ngrams = np.lib.stride_tricks.sliding_window_view(hashes, NGRAM_WORDS) @ _FACTORS  # modulo 2^64
    return Text(xxhash.xxh3_64_intdigest(whole), len(words), ngrams)


class Known:
    """Texts that others are held against.

    Call `add` for every known text, then `count` for the texts that they are one kind with, then `find`. Memory: 24 bytes
    for every word of a known text; nothing for the others.
    """

    def __init__(self) -> None:
        self._exact: dict[int, list[str]] = {}
        self._texts: list[Text] = []
        self._labels: list[str] = []
        self._counted: list[bool] = []
        self._ready = False

    def add(self, text: str, label: str, *, of_a_kind: bool = False, opening: bool = True) -> None:
        """Add a known text.

        Args:
            label: what `find` is to answer.
            of_a_kind: it was drawn from the same texts as those that are held against it; what many of them share
                (`count`) is boilerplate, too.
            opening: it opens its conversation. Later turns, such as "Go on.", are only compared if they have eight
                words or more.
        """
        numbers = numbers_of(text)
        if opening:
            labels = self._exact.setdefault(numbers.whole, [])
            if label not in labels:
                labels.append(label)
        if len(numbers.ngrams):
            self._texts.append(numbers)
            self._labels.append(label)
            self._counted.append(of_a_kind)
        self._ready = False

    def __len__(self) -> int:
        return len(self._exact) + len(self._texts)

    def count(self, texts: Sequence[Text]) -> None:
        """Take note of a conversation's turns that `find` may be asked about, for what is shared by many."""
        self._prepare()
        found = np.unique(np.concatenate([text.ngrams for text in texts])) if texts else np.empty(0, np.uint64)
        if len(self._keys) and len(found):
            at = np.minimum(np.searchsorted(self._keys, found), len(self._keys) - 1)
            self._in_others[at[self._keys[at] == found]] += 1
            self._filtered = False

    def find(self, texts: Sequence[Text]) -> dict[str, Kind]:
        """Labels of the known texts that one of these overlaps with, and how.

        Args:
            texts: the user's turns of a conversation, in order, or one text.
        """
        self._prepare()
        self._filter()
        found: dict[str, Kind] = {}
        for text in texts:
            found |= {self._labels[owner]: "near" for owner in self._near(text.ngrams)}
        if texts:
            found |= dict.fromkeys(self._exact.get(texts[0].whole, []), "verbatim")
        return found

    def _prepare(self) -> None:
        """Sort the known runs: where each stands, and in how many known texts it is."""
        if self._ready:
            return
        counts = [len(text.ngrams) for text in self._texts]
        runs = np.concatenate([text.ngrams for text in self._texts]) if counts else np.empty(0, np.uint64)
        owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        places = np.concatenate([np.arange(n, dtype=np.int32) for n in counts]) if counts else np.empty(0, np.int32)
        order = np.argsort(runs, kind="stable")  # stable: one text's runs stay together
        self._runs, self._owners, self._places = runs[order], owners[order], places[order]
        self._keys, starts, key_of = np.unique(self._runs, return_index=True, return_inverse=True)
        new = np.ones(len(self._runs), dtype=bool)  # the first of each text among equal runs
        new[1:] = (self._owners[1:] != self._owners[:-1]) | (self._runs[1:] != self._runs[:-1])
        self._in_known = np.add.reduceat(new, starts, dtype=np.int32) if len(starts) else np.empty(0, np.int32)
        self._key_of = key_of.astype(np.int32)
        self._in_others = np.zeros(len(self._keys), dtype=np.int32)
        self._ready, self._filtered = True, False

    def _filter(self) -> None:
        """Leave boilerplate out: which runs still count, and which words of each text."""
        if self._filtered:
            return
        known, others = self._in_known[self._key_of], self._in_others[self._key_of]
        of_a_kind = np.array(self._counted, dtype=bool)[self._owners] if len(self._owners) else np.empty(0, bool)
        shared = (known > _KNOWN_SHARING) | (of_a_kind & (known + others > _TEXTS_SHARING))
        self._rest = [np.ones(text.words, dtype=bool) for text in self._texts]
        for owner, place in zip(self._owners[shared].tolist(), self._places[shared].tolist(), strict=True):
            self._rest[owner][place : place + NGRAM_WORDS] = False
        self._kept_runs, self._kept_owners, self._kept_places = (
            values[~shared] for values in (self._runs, self._owners, self._places)
        )
        self._filtered = True

    def _near(self, ngrams: Hashes) -> Iterator[int]:
        """The known texts whose words these runs hold enough of."""
        runs = np.unique(ngrams)
        starts, ends = (np.searchsorted(self._kept_runs, runs, side=side) for side in ("left", "right"))
        held: dict[int, npt.NDArray[np.bool_]] = {}
        for hit in np.flatnonzero(ends > starts).tolist():
            for entry in range(starts[hit], ends[hit]):
                owner, place = int(self._kept_owners[entry]), int(self._kept_places[entry])
                mask = held.setdefault(owner, np.zeros(self._texts[owner].words, dtype=bool))
                mask[place : place + NGRAM_WORDS] = True
        for owner in sorted(held):
            rest = self._rest[owner]
            words = int(rest.sum())
            needed = words if words < NGRAM_WORDS else SHARE * words
            if words and int((held[owner] & rest).sum()) >= needed:
                yield owner


class PromptsFile:
    """Writes the texts of training conversations as numbers; what they say cannot be read from it.

    The file is a row of little-endian 64-bit numbers: for each text 1 if it opens its conversation or 0 if it is a later
    turn, its `Text.whole`, its words, and its runs in order. It has no name until `publish`.

    Args:
        folder: where the temporary file lies.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (`publish` closes it)

    def add(self, texts: Iterable[str]) -> None:
        """Add a conversation: the user's turns in order, or one text."""
        for turn, text in enumerate(texts):
            numbers = numbers_of(text)
            head = np.array([turn == 0, numbers.whole, numbers.words], dtype="<u8")
            self._file.write(head.tobytes() + numbers.ngrams.astype("<u8").tobytes())

    def publish(self, directory: Path) -> None:
        """Put the file into a store, whole or not at all."""
        size = self._file.tell()
        self._file.seek(0)
        with new_file(directory / TRAINING_PROMPTS, size=size) as file:
            shutil.copyfileobj(self._file, file)
        self._file.close()


def read_prompts_file(directory: Path) -> Iterator[list[Text]]:
    """A store's training conversations as `PromptsFile` wrote them, one at a time.

    Raises:
        OSError: the store has no such file.
        ValueError: it was cut off.
    """
    texts: list[Text] = []
    with (directory / TRAINING_PROMPTS).open("rb") as file:
        while head := file.read(24):
            opening, whole, words = map(int, np.frombuffer(head, "<u8"))
            ngrams = np.frombuffer(file.read(8 * max(0, words - NGRAM_WORDS + 1)), "<u8").astype(np.uint64)
            if len(ngrams) != max(0, words - NGRAM_WORDS + 1):
                raise ValueError(f"{directory / TRAINING_PROMPTS} ends in the middle of a prompt")
            if opening and texts:
                yield texts
                texts = []
            texts.append(Text(whole, words, ngrams))
    if texts:
        yield texts
