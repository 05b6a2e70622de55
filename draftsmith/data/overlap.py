"""Near-duplicates of texts that must not be trained on, by word n-gram overlap over the whole text.

Texts with the same words are equal, whatever their case, punctuation and white space. Otherwise a text overlaps with a known one if it
contains at least half of the known one's words in runs of eight or more: Tulu 3's measure (Lambert et al., 2024,
arXiv:2411.15124, section 3.2), which finds changed beginnings, changed endings and texts inside longer ones. A text of fewer
than eight words is only found verbatim.

An instruction in front of many prompts does not make them duplicates. Runs that many texts share are boilerplate: they are ignored,
and the overlap is that of the rest of the known text; a rest of fewer than eight words must be contained completely.

`training_prompts.u64` in a finished store (`PromptsFile`) holds its training prompts in this form, for evaluation on other suites.
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
"""The share of a known text's words that another text must contain to overlap with it."""
_KNOWN_SHARING = 2
"""A run in more known texts than this is boilerplate."""
_TEXTS_SHARING = 10
"""A run of a held-out text in more texts of the same source than this, held out or not, is boilerplate."""

# Han and kana are written without spaces, so each character counts as a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_FACTORS = np.array([pow(0x9E3779B97F4A7C15, power, 2**64) for power in range(NGRAM_WORDS)], dtype=np.uint64)

Hashes = npt.NDArray[np.uint64]
Kind = Literal["verbatim", "near"]


@dataclass(frozen=True)
class Text:
    """A text as hashes, the same in every process and small enough to keep millions in memory."""

    whole: int
    """A 64-bit hash of its words in order; without words, of its characters except white space."""
    words: int
    """The number of words."""
    ngrams: Hashes
    """[words - 7] hashes of its runs of eight words; empty for a shorter text."""


def numbers_of(text: str) -> Text:
    """The text in the form that `Known` compares."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    words = [word.encode("utf-8", "surrogatepass") for word in _WORD.findall(folded)]
    whole = b" ".join(words) or "".join(folded.split()).encode("utf-8", "surrogatepass")
    if len(words) < NGRAM_WORDS:
        ngrams = np.empty(0, np.uint64)
    else:
        hashes = np.fromiter((xxhash.xxh3_64_intdigest(word) for word in words), np.uint64, len(words))
        ngrams = np.lib.stride_tricks.sliding_window_view(hashes, NGRAM_WORDS) @ _FACTORS  # modulo 2^64
    return Text(xxhash.xxh3_64_intdigest(whole), len(words), ngrams)


class Known:
    """Texts to compare others with.

    Call `add` for every known text, then `count` for the other texts of their source, then `find`. Memory: 24 bytes per word of a
    known text; nothing for the others.
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
            label: what `find` returns for it.
            of_a_kind: it has the same source as the texts compared with it: what many of those share (`count`) is
                boilerplate, too.
            opening: it opens its conversation. Later turns, such as "Go on.", are only compared if they have at least eight
                words.
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
        """Count the runs of a conversation's turns, to find boilerplate."""
        self._prepare()
        found = np.unique(np.concatenate([text.ngrams for text in texts])) if texts else np.empty(0, np.uint64)
        if len(self._keys) and len(found):
            at = np.minimum(np.searchsorted(self._keys, found), len(self._keys) - 1)
            self._in_others[at[self._keys[at] == found]] += 1
            self._filtered = False

    def find(self, texts: Sequence[Text]) -> dict[str, Kind]:
        """The known texts that overlap with one of these, by label, and how.

        Args:
            texts: the user turns of a conversation, in order, or one text.
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
        """Sort the known runs with their positions and the number of known texts with each."""
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
        """Remove boilerplate: keep the runs that count, and the words of each text outside boilerplate."""
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
        """The known texts of whose words these runs contain enough."""
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
    """Writes the texts of training conversations as hashes, from which the texts cannot be recovered.

    The file is a sequence of little-endian 64-bit numbers: for each text 1 if it opens its conversation or 0 if it is a later turn,
    `Text.whole`, the number of words, and the runs in order. It has no name until `publish`.

    Args:
        folder: for the temporary file.
    """

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (`publish` closes it)

    def add(self, texts: Iterable[str]) -> None:
        """Add a conversation: the user turns in order, or one text."""
        for turn, text in enumerate(texts):
            numbers = numbers_of(text)
            head = np.array([turn == 0, numbers.whole, numbers.words], dtype="<u8")
            self._file.write(head.tobytes() + numbers.ngrams.astype("<u8").tobytes())

    def publish(self, directory: Path) -> None:
        """Move the file into a store, atomically."""
        size = self._file.tell()
        self._file.seek(0)
        with new_file(directory / TRAINING_PROMPTS, size=size) as file:
            shutil.copyfileobj(self._file, file)
        self._file.close()


def read_prompts_file(directory: Path) -> Iterator[list[Text]]:
    """Yield a store's training conversations, as written by `PromptsFile`, one at a time.

    Raises:
        OSError: the store has no such file.
        ValueError: it is truncated.
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
