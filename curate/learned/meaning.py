"""Documents that say the same: the angle between their vectors (as SemDeDup, https://arxiv.org/abs/2303.09540, but
without its clusters: every pair is looked at).

A document joins the nearest of the earlier ones that stay, where that is near enough. So each that is dropped is near
the one that stands for it; were those joined that are near through others, a chain of neighbours would leave one of
very unlike ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 1024  # documents that are compared with as many earlier ones at once: 4 MB of products


def packed(scope: int, vector: NDArray[np.float32], *, known: bool) -> NDArray[np.uint64]:
    """(1 + features / 4,) what is stored of a document: the hash of what it is compared within, and its (features,)
    vector of length 1 as 16-bit floats; of one that is not `known` zeros, which are near nothing."""
    halves = np.zeros(-(-len(vector) // 4) * 4, np.float16)
    if known:
        halves[: len(vector)] = vector
    return np.concatenate([np.array([scope], np.uint64), halves.view(np.uint64)])


def leaders(rows: NDArray[np.uint64], least: float) -> NDArray[np.int64]:
    """For each of the (documents, 1 + features / 4) `rows` of `packed` the place of the document that stands for it:
    the nearest earlier one of its scope that stands for itself and whose cosine is `least` or more, else itself.

    Time grows with the documents times those that stay; memory is two copies of the vectors in 32 bits.
    """
    first = np.arange(len(rows), dtype=np.int64)
    for scope in np.unique(rows[:, 0]) if len(rows) else ():
        places = np.flatnonzero(rows[:, 0] == scope)
        first[places] = places[_lead(_unit(rows[places, 1:]), least)]
    return first


def _unit(bits: NDArray[np.uint64]) -> NDArray[np.float32]:
    vectors = np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _lead(vectors: NDArray[np.float32], least: float) -> NDArray[np.int64]:
    stays = np.empty_like(vectors)  # vectors of those that stand for themselves, in order
    places = np.empty(len(vectors), np.int64)  # of these
    num_stays = 0
    first = np.arange(len(vectors), dtype=np.int64)
    for begin in range(0, len(vectors), BLOCK):
        block = vectors[begin : begin + BLOCK]
        best, nearest = np.full(len(block), -1.0, np.float32), np.zeros(len(block), np.int64)
        for low in range(0, num_stays, BLOCK):
            products = block @ stays[low : min(low + BLOCK, num_stays)].T
            there = products.argmax(1)
            value = products[np.arange(len(block)), there]
            better = value > best
            best, nearest = np.where(better, value, best), np.where(better, low + there, nearest)
        among = block @ block.T
        for row in range(len(block)):
            earlier = np.flatnonzero(first[begin : begin + row] == np.arange(begin, begin + row))
            if len(earlier) and among[row, earlier].max() > best[row]:
                place = int(earlier[among[row, earlier].argmax()])
                best[row], leader = among[row, place], begin + place
            else:
                leader = int(places[nearest[row]]) if num_stays else begin + row
            if best[row] >= least:
                first[begin + row] = leader
        own = np.flatnonzero(first[begin : begin + len(block)] == np.arange(begin, begin + len(block)))
        stays[num_stays : num_stays + len(own)] = block[own]
        places[num_stays : num_stays + len(own)] = begin + own
        num_stays += len(own)
    return first
