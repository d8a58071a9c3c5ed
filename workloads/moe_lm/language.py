"""A generated language: the topic of a passage, named only at its beginning, decides how words follow each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlhpc.suite.errors import InputError

LETTERS = b"abcdefghijklmnop"  # of words: two letters each
ENDINGS = b"qrstuvwxyz.,;:!?"  # of words: one byte that says nothing of the next word
TOPICS = range(ord("!"), ord("a"))  # bytes that name topics, other than LETTERS and ENDINGS
ODDS = (64, 16, 7, 4, 3, 2, 1, 1)  # of the eight words that may follow, near 1 : 1/4 : … : 1/64


@dataclass(frozen=True)
class Lexicon:
    """How large a language is: ``topics``, ``words`` common to all topics, and ``endings`` that any word may get."""

    topics: int
    words: int
    endings: int = 8


class Language:
    """A Markov chain of words for each topic, all of the same words.

    Compressors and counts see the last words before a byte. Each word gets one of ``endings`` endings at random. So the
    same words seldom come back in the same bytes. The next word follows from the last word and the topic, which is far
    behind.
    """

    def __init__(self, seed: int, lexicon: Lexicon) -> None:
        names = [byte for byte in TOPICS if byte not in ENDINGS]
        limits = {"topics": (1, len(names)), "words": (len(ODDS), len(LETTERS) ** 2), "endings": (1, len(ENDINGS))}
        for part, (least, most) in limits.items():
            if not least <= getattr(lexicon, part) <= most:
                raise InputError(f"lexicon: {part} is {getattr(lexicon, part)}, expected {least} to {most}")
        self.lexicon, self._seed = lexicon, seed
        draw = self._random(0)
        chosen = draw.permutation(len(LETTERS) ** 2)[: lexicon.words]
        self.words = [bytes((LETTERS[pair // len(LETTERS)], LETTERS[pair % len(LETTERS)])) for pair in chosen]
        self.successors = np.array(
            [[draw.permutation(lexicon.words)[: len(ODDS)] for _ in self.words] for _ in range(lexicon.topics)]
        )
        self.names = [bytes((byte,)) for byte in names[: lexicon.topics]]
        endings = [bytes((byte,)) for byte in ENDINGS[: lexicon.endings]]
        self._forms = np.array([[word + ending for ending in endings] for word in self.words], dtype=object)

    def passages(self, count: int, length: int, stream: int) -> NDArray[np.uint8]:
        """Generate ``count`` passages of ``length`` bytes, as rows. Another ``stream``: others of the language."""
        draw = self._random(1 + stream)
        words = -(-(length - 1) // 3)  # the last one is cut
        topic, word = draw.integers(self.lexicon.topics, size=count), draw.integers(self.lexicon.words, size=count)
        ranks = np.repeat(np.arange(len(ODDS)), ODDS)[draw.integers(sum(ODDS), size=(words, count))]
        endings = draw.integers(self.lexicon.endings, size=(words, count))
        parts = [[self.names[each] for each in topic]]
        for rank, ending in zip(ranks, endings, strict=True):
            word = self.successors[topic, word, rank]
            parts.append(self._forms[word, ending].tolist())
        rows = b"".join(b"".join(row)[:length] for row in zip(*parts, strict=True))
        return np.frombuffer(rows, dtype=np.uint8).reshape(count, length)

    def entropy_rate(self) -> float:
        """Compute the bits per byte of a long passage of known topic: no model is better.

        Every word has the same length and the same odds, so it is a sum over these alone. 9 digits are the same on all
        processors.
        """
        chances = np.array(ODDS) / sum(ODDS)
        bits = -(chances * np.log2(chances)).sum() + np.log2(self.lexicon.endings)
        return float(f"{bits / 3:.9g}")

    def bits(self, rows_NL: NDArray[np.uint8]) -> NDArray[np.float64]:
        """Compute the bits of each passage (N,) for the oracle, without its first byte. They are the least on average.

        What it never says has infinitely many.
        """
        rows, length = np.arange(len(rows_NL)), rows_NL.shape[1]
        topics, words = np.zeros(256, dtype=np.int64), np.zeros((256, 256), dtype=np.int64)
        topics[[name[0] for name in self.names]] = np.arange(len(self.names))
        letters_V2 = np.array([tuple(word) for word in self.words])
        words[letters_V2[:, 0], letters_V2[:, 1]] = np.arange(len(self.words))
        chances_TWV = np.zeros((self.lexicon.topics, self.lexicon.words, self.lexicon.words))
        np.put_along_axis(chances_TWV, self.successors, np.array(ODDS) / sum(ODDS), axis=2)
        topic_N = topics[rows_NL[:, 0]]
        # the first word follows one that is drawn evenly and not written
        next_NV, bits_N = chances_TWV.mean(axis=1)[topic_N], np.zeros(len(rows))
        for begin in range(1, length, 3):
            if begin + 1 == length:  # the last word is cut after its first letter
                chance_N = (next_NV * (letters_V2[:, 0] == rows_NL[:, begin, None])).sum(axis=1)
            else:
                word_N = words[rows_NL[:, begin], rows_NL[:, begin + 1]]
                chance_N, next_NV = next_NV[rows, word_N], chances_TWV[topic_N, word_N]
            with np.errstate(divide="ignore"):
                bits_N -= np.log2(chance_N)
            # all endings are equally likely; the last word may be cut before its own
            bits_N += np.log2(self.lexicon.endings) * (begin + 2 < length)
        return bits_N

    def _random(self, stream: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=[self._seed, stream]))
