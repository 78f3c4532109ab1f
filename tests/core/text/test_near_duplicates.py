"""Signatures against their definition and datatrove, clusters against a walk over pairs, detection against theory."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penjing.core.text.near_duplicates import Signer, connected, split_words, word_grams

PRIME = (1 << 61) - 1


def test_words_are_runs_of_letters_or_single_characters_of_scripts_without_spaces() -> None:
    assert split_words("Don't x_1, ÉTÉ") == ["don", "t", "x_1", "été"]
    assert split_words("日本語 and ไทย") == ["日", "本", "語", "and", "ไ", "ท", "ย"]
    assert len(word_grams("a b c d e f")) == 2
    assert len(word_grams("a b")) == 1
    assert len(word_grams(" ... ")) == 0
    tables = [f"{row}, {row * 7 % 1000}, {row * 13 % 1000}, 1, 2, 3" for row in (100, 200)]
    assert set(word_grams(tables[0])) != set(word_grams(tables[1]))  # numbers are words, too


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=600))
@settings(max_examples=30, deadline=None)
def test_signatures_are_those_of_the_definition(values: list[int]) -> None:
    grams = np.array(values, np.uint64)
    generator = np.random.RandomState(5)
    factor = generator.randint(1, PRIME, dtype=np.uint64, size=6)
    offset = generator.randint(0, PRIME, dtype=np.uint64, size=6)
    expected = [min((int(f) * g + int(o)) % 2**64 % PRIME for g in values) for f, o in zip(factor, offset, strict=True)]
    assert Signer(3, 2, seed=5).minima(grams).ravel().tolist() == expected


def test_signatures_are_datatroves() -> None:
    minhash = pytest.importorskip("datatrove.pipeline.dedup.minhash")
    theirs = minhash.MinhashDedupSignature.__new__(minhash.MinhashDedupSignature)
    theirs.config, theirs.num_hashes, theirs._parameters = minhash.MinhashConfig(), 112, None
    grams = np.random.default_rng(0).integers(0, 2**64, 1000, dtype=np.uint64)
    assert Signer().minima(grams).tolist() == theirs.get_signature(grams[:, None])


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), max_size=40))
@settings(max_examples=100, deadline=None)
def test_clusters_are_what_chains_of_equal_keys_connect(rows: list[tuple[int, int, int]]) -> None:
    keys = np.array([[a * 1000 + i * (a > 3), b * 1000 + i * (b > 3), c * 1000 + i * (c > 3)]
                     for i, (a, b, c) in enumerate(rows)], np.uint64).reshape(-1, 3)  # fmt: skip
    label = list(range(len(rows)))
    for i in range(len(rows)):
        for j in range(i):
            if (keys[i] == keys[j]).any() and label[i] != label[j]:
                low, high = sorted((label[i], label[j]))
                label = [low if each == high else each for each in label]
    assert connected(keys.T, len(rows)).tolist() == label


@pytest.mark.parametrize("share", [0.6, 0.8, 0.9])
def test_pairs_are_found_as_often_as_theory_says(share: float) -> None:
    signer, dice, trials, size = Signer(), random.Random(int(share * 10)), 300, 400
    found = 0
    for _ in range(trials):
        union = np.array([dice.getrandbits(64) for _ in range(size)], np.uint64)
        common = round(share * size)
        alone = (size - common) // 2
        one, other = union[: common + alone], np.concatenate([union[:common], union[common + alone :]])
        found += bool((signer.minima(one) == signer.minima(other)).all(axis=1).any())
    expected = 1 - (1 - share**8) ** 14
    assert abs(found / trials - expected) <= 3 * (expected * (1 - expected) / trials) ** 0.5 + 0.01
