"""The generated language: of known entropy, the same everywhere."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mlhpc.suite.config import load_config
from mlhpc.suite.data.manifest import read_manifest
from mlhpc.suite.data.shards import ShardReader
from mlhpc.suite.errors import InputError
from mlhpc.suite.world import World
from mlhpc.workloads.moe_lm import DESCRIPTOR
from mlhpc.workloads.moe_lm.generate import ENDINGS, LETTERS, ODDS, SIZES, Language, Lexicon, generate
from mlhpc.workloads.moe_lm.workload import MoELM


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("moe_lm") / "smoke"
    generate(root, "smoke", seed=1, world=World.create(None))
    return root


def test_the_odds_and_the_entropy_rate_are_those_of_the_text() -> None:
    language = Language(3, Lexicon(4, 24))
    rows = language.passages(400, 1 + 3 * 80, 0)
    topics = rows[:, 0] - min(language.names)[0]
    words = rows[:, 1:].reshape(400, 80, 3)
    index = {word: number for number, word in enumerate(language.words)}
    chain = np.array([[index[bytes(word[:2])] for word in row] for row in words])
    lists = language.successors[topics[:, None], chain[:, :-1]]
    ranks = (lists == chain[:, 1:, None]).argmax(axis=2)
    assert (lists == chain[:, 1:, None]).any(axis=2).all()
    shares = np.bincount(ranks.ravel(), minlength=8) / ranks.size
    assert shares == pytest.approx(np.array(ODDS) / sum(ODDS), abs=0.01)
    endings = Counter(words[:, :, 2].ravel().tolist())
    assert set(endings) == set(ENDINGS[:8])
    assert min(endings.values()) > 0.9 * words.shape[0] * 10
    bits = (-np.log2(shares) @ shares + 3) / 3
    assert bits == pytest.approx(language.entropy_rate(), rel=0.02)


def test_the_oracle_knows_what_passages_have_been_drawn_with(smoke: Path) -> None:
    """The chances of all passages of one and of two words sum to one, and long passages have the entropy rate."""
    language = Language(3, Lexicon(2, 9, 2))
    texts = [word + ending for word in language.words for ending in (b"q", b"r")]
    for length in (2, 3, 4, 5, 7):
        ends = {(a + b)[: length - 1] for a in texts for b in texts}
        rows = np.frombuffer(b"".join(language.names[1] + end for end in sorted(ends)), np.uint8).reshape(-1, length)
        bits = language.bits(rows)
        assert (2 ** -bits[np.isfinite(bits)]).sum() == pytest.approx(1)
    large = Language(3, Lexicon(4, 24))
    rows = large.passages(300, 1 + 3 * 80, 0)
    assert large.bits(rows).mean() / 240 == pytest.approx(large.entropy_rate(), rel=0.01)
    language, reader = Language(1, Lexicon(8, 32)), ShardReader(smoke, "validation")
    known = language.bits(reader.read(range(len(reader)))["text"]).mean() / 64
    assert 0 < known - language.entropy_rate() < 0.1  # the first word is any
    assert known < DESCRIPTOR.card().size("smoke").threshold


def test_topics_are_named_at_the_beginning_only() -> None:
    language = Language(3, Lexicon(40, 24))
    assert len(set(language.names)) == 40
    assert not {name[0] for name in language.names} & set(LETTERS + ENDINGS)
    rows = language.passages(50, 129, 1)
    assert {bytes((byte,)) for byte in rows[:, 0]} <= set(language.names)
    assert set(rows[:, 1:].ravel().tolist()) <= set(LETTERS + ENDINGS)


def test_a_lexicon_that_cannot_be_is_refused() -> None:
    for lexicon in (Lexicon(0, 8), Lexicon(8, 7), Lexicon(8, 257), Lexicon(99, 8), Lexicon(2, 8, 17)):
        with pytest.raises(InputError, match=r"lexicon: .*, expected"):
            Language(0, lexicon)


def test_the_same_seed_is_the_same_data_and_another_another(smoke: Path, tmp_path: Path) -> None:
    world = World.create(None)
    generate(tmp_path / "again", "smoke", seed=1, world=world)
    steps: list[tuple[int, int]] = []
    generate(tmp_path / "other", "smoke", seed=2, world=world, progress=lambda *step: steps.append(step))
    assert steps == [(1, 2), (2, 2)]
    assert read_manifest(tmp_path / "again").sha256 == read_manifest(smoke).sha256
    assert read_manifest(tmp_path / "other").sha256 != read_manifest(smoke).sha256
    with pytest.raises(InputError, match="holds a data set with"):
        generate(tmp_path / "again", "smoke", seed=2, world=world)


def test_the_card_counts_the_samples(smoke: Path) -> None:
    manifest = read_manifest(smoke)
    for size in ("smoke", "mini", "mini_dense", "mini_facts", "mini_facts_dense"):
        card, settings = DESCRIPTOR.card().size(size), SIZES[size]
        assert (settings.train_rows, settings.validation_rows) == (card.train_samples, card.eval_samples)
    card = DESCRIPTOR.card().size("smoke")
    assert (manifest.samples("train"), manifest.samples("validation")) == (card.train_samples, card.eval_samples)
    workload = MoELM(load_config(DESCRIPTOR, "smoke"))
    assert [len(workload.dataset(split, smoke)) for split in ("train", "validation")] == [
        card.train_samples,
        card.eval_samples,
    ]
