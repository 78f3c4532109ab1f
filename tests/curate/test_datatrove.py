"""Clusters beside datatrove's own stages 1 to 3, given the same runs of words."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from penjing.core.text.near_duplicates import Signer, connected, word_grams
from tests.curate.corpus import prose

minhash = pytest.importorskip("datatrove.pipeline.dedup.minhash")


def corpus() -> list[str]:
    """60 texts, and of each three copies with more and more words changed."""
    texts, dice = [], np.random.default_rng(4)
    for seed in range(60):
        words = prose(seed, 150).split()
        for changed in (0, 2, 6, 14):
            copy = list(words)
            for place in dice.integers(0, len(words), changed):
                copy[place] = f"other{dice.integers(1000)}"
            texts.append(" ".join(copy))
    return [texts[place] for place in dice.permutation(len(texts))]


def test_clusters_are_datatroves(tmp_path: Path) -> None:
    from datatrove.data import Document

    class OnOurGrams(minhash.MinhashDedupSignature):
        def get_shingles(self, text: str) -> Any:
            return word_grams(text)[:, None]

    from penjing.curate.documents.words import WORDS

    texts, config = corpus(), minhash.MinhashConfig()
    stage = OnOurGrams(str(tmp_path / "signatures"), config, language=cast(Any, WORDS))
    stage.run((Document(text=text, id=str(place)) for place, text in enumerate(texts)), 0, 1)
    for rank in range(config.num_buckets):
        buckets = minhash.MinhashDedupBuckets(str(tmp_path / "signatures"), str(tmp_path / "buckets"), config=config)
        buckets.run(cast(Any, None), rank, config.num_buckets)
    joined = minhash.MinhashDedupCluster(
        str(tmp_path / "buckets"), str(tmp_path / "clusters"), config=config, save_cluster_id=True
    )
    joined.run(cast(Any, None), 0, 1)
    theirs, heads = np.arange(len(texts)), dict[int, int]()
    for document, cluster in struct.iter_unpack("<2I", (tmp_path / "clusters" / "000000.clusters").read_bytes()):
        theirs[document] = heads.setdefault(cluster, document)
    signer = Signer()
    ours = connected(np.stack([signer.keys(text) for text in texts]).T, len(texts))
    assert ours.tolist() == theirs.tolist()
    assert 60 < len(set(ours.tolist())) < 200  # some copies are found, some are too different
