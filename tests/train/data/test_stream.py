"""Batches of every kind of samples stay what they are, to the bit: runs that go on from an older checkpoint need it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from penjing.core.errors import InputError
from penjing.core.graph.config import Pixels, TensorSpec
from penjing.train.chat.packed import pack_rows
from penjing.train.chat.preferences import Pairs
from penjing.train.chat.tokens import Masked, Pair
from penjing.train.data.augment import erased
from penjing.train.data.chunks import ChunkRows, cut
from penjing.train.data.images import Images, ImageSet
from penjing.train.data.mixing import Mixing, MixingConfig
from penjing.train.data.mixture import mixed
from penjing.train.data.order import Order
from penjing.train.data.shards import ShardIndex, ShardWriter, TokenShards, write_index
from penjing.train.data.stream import Draw, Indexed, OrderedStream, one_pass, shuffled
from penjing.train.data.tokens import TokenRows
from penjing.train.objective.objective import Batch
from penjing.train.sources.reader import Form, Reader
from penjing.train.sources.settings import Augment, SourceSettings
from penjing.train.sources.source import Source
from penjing.train.sources.stream import ReadSamples

# hashes of the batches that each kind gave when it had a stream of its own: shuffled, and held out
EXPECTED = {
    "tokens": ("bff83d3b2a36fa84", "f1f7536cef249edc", 5),
    "documents": ("4914ec14404136a5", "6d2e48745f7f4a26", None),
    "chunks": ("2e20aa63b188f6a9", "a3c162163ffe05fa", 7),
    "chat": ("cbe82dc9b950f5d6", "ab158bb0c3e71f65", None),
    "pairs": ("7935d224d687a2cf", "d61c77f9c265436c", None),
    "images": ("593e2f8b3b184f74", "b62b0bca4b620723", 7),
    "plain images": ("6ebd04e77b507212", "b62b0bca4b620723", 7),
    "samples": ("583df9f6ec0e442a", "7597964d2b5b36c7", 7),
}
MIXED = "eed00977366af685"
SIZES = {"a": 400, "b": 100, "c": 60}


def digest(batches: Iterable[Batch]) -> str:
    found = hashlib.sha256()
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def shards_of(folder: Path) -> dict[str, TokenShards]:
    splits = {}
    for name, size in SIZES.items():
        writer = ShardWriter(folder, f"train-{name}", 50, 64)
        writer.add(((np.arange(size) ** 2 * 7 + np.arange(size)) % 50).tolist())
        splits[name] = writer.close()
    write_index(folder, ShardIndex(dtype="uint16", vocab_size=50, end_of_text=0, splits=splits))
    return {name: TokenShards(folder, name) for name in splits}


def pixels(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def samples_of(kind: str, folder: Path) -> tuple[Indexed, Indexed]:
    """What is shuffled, and what is held out."""
    if kind in ("tokens", "documents"):
        shards = shards_of(folder)
        return TokenRows(shards["a"], 8, kind == "documents"), TokenRows(shards["b"], 8, kind == "documents")
    if kind == "chunks":
        shards = shards_of(folder)["a"]
        rows = ChunkRows(shards, cut(shards, 8, 3, (np.arange(50) % 5).astype(np.int8)), 8, document_mask=True)
        return rows, rows
    if kind == "chat":
        texts = [Masked(np.arange(1, n, dtype=np.int32), np.arange(1, n) % 3 > 0) for n in 2 + np.arange(23) % 9]
        return (packed := pack_rows(texts, 12, 0)), packed
    if kind == "pairs":

        def some(begin: int, size: int) -> NDArray[np.int32]:
            return np.arange(begin, begin + size, dtype=np.int32)

        answers = [Pair(some(1, 2 + n % 4), some(9, 2 + n % 3), some(20, 2 + n % 5), n / 8) for n in range(11)]
        reference = torch.arange(22, dtype=torch.float32).reshape(11, 2) / -7
        pairs = Pairs(answers, reference, 0)
        return pairs, pairs
    if kind == "samples":
        source = Source("made", 13, pixels, str, lambda index: index, [index % 3 for index in range(13)])
        spec = TensorSpec(name="x", dtype="float32", shape=("batch", 3, 6, 7))
        colours = Pixels(height=6, width=7, mean=(0.5, 0.25, 0.375), std=(0.25, 0.5, 0.3))
        reader = Reader(source, np.arange(13), Form((spec,), colours, 3), SourceSettings(), print)
        read = ReadSamples(reader, Augment(pad=2, flip=True, erase=3))
        return read, read
    values = np.random.default_rng(0).integers(0, 256, (20, 3, 6, 6), dtype=np.uint8)
    mean, std = np.array([0.5, 0.25, 0.375], np.float32), np.array([0.25, 0.5, 0.3], np.float32)
    data = ImageSet(values, np.arange(20, dtype=np.uint8) % 3, 3)
    change = (2, True, 3) if kind == "images" else (0, False, 0)
    return Images(data, mean, std, *change), Images(data, mean, std)


@pytest.mark.parametrize("kind", EXPECTED)
def test_batches_are_the_same_to_the_bit(tmp_path: Path, kind: str) -> None:
    given, held = samples_of(kind, tmp_path)
    learnt, judged, most = EXPECTED[kind]
    worlds = [(rank, size) for size in (1, 2) for rank in range(size)]
    streams = [
        shuffled(given, batch_size=5, micro_batch=2, rank=rank, world_size=size, seed=3) for rank, size in worlds
    ]
    assert digest(next(stream) for stream in streams for _ in range(18)) == learnt
    passes = [one_pass(held, most, micro_batch=2, rank=at, world_size=size) for at, size in worlds]
    assert digest(batch for each in passes for batch in each) == judged
    states = [stream.state_dict() for stream in streams]
    assert len({state.pop("content") for state in states}) == 1
    assert states[-1] == {"taken": 45, "num_samples": len(given), "batch_size": 5, "seed": 3}


def test_mixed_batches_are_the_same_to_the_bit(tmp_path: Path) -> None:
    shards, batches = shards_of(tmp_path), []
    config = MixingConfig(kind="perplexity", weights={"a": 0.5, "b": 0.3, "c": 0.2}, min_rise=0, rises=1, max_epochs=99)
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        stream = mixed(
            shards, Mixing(config, dict.fromkeys(SIZES, 1)), 8, document_mask=True, batch_size=5, micro_batch=2,
            rank=rank, world_size=size, seed=3,
        )  # fmt: skip
        batches += [next(stream) for _ in range(18)]
    assert digest(batches) == MIXED
    state = stream.state_dict()
    assert (state["step"], state["num_samples"], state["taken"], state["owed"]) == (9, 68, [23, 13, 9], [-0.5, 0.5, 0])


@pytest.mark.parametrize("side", [1, 2, 3, 8, 16])
def test_a_square_of_as_many_pixels_is_erased(side: int) -> None:
    random = np.random.default_rng(0).integers(0, 2**63, 200, np.uint64)
    marked = erased(random, 32, 48, side)
    rows, columns = marked.any(2).sum(1), marked.any(1).sum(1)
    assert (marked.sum((1, 2)) == rows * columns).all()  # whole rectangles
    assert rows.max() == columns.max() == side  # a part may lie outside
    assert rows.min() == (side + 1) // 2


class Numbers:
    def __len__(self) -> int:
        return 101

    def batch(self, draw: Draw) -> Batch:
        return {"numbers": torch.from_numpy(draw.samples[draw.real])}


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 10), (1, 3), (2, 5)])
def test_some_of_many_samples_are_taken_from_everywhere(world_size: int, micro_batch: int) -> None:
    taken = [
        number
        for rank in range(world_size)
        for batch in one_pass(Numbers(), 20, micro_batch=micro_batch, rank=rank, world_size=world_size, spread=True)
        for number in batch["numbers"].tolist()
    ]
    assert sorted(taken) == [place * 101 // 20 for place in range(20)]
    for most in (None, 101, 500):
        everything = one_pass(Numbers(), most, micro_batch=7, spread=True)
        assert [number for batch in everything for number in batch["numbers"].tolist()] == list(range(101))


def test_other_data_of_as_many_samples_do_not_go_on(tmp_path: Path) -> None:
    def stream(name: str, tokens: list[int]) -> OrderedStream[Order]:
        (tmp_path / name).mkdir()
        writer = ShardWriter(tmp_path / name, "train", 1000, 64)
        writer.add(tokens)
        index = ShardIndex(dtype="uint16", vocab_size=1000, end_of_text=0, splits={"train": writer.close()})
        write_index(tmp_path / name, index)
        return shuffled(TokenRows(TokenShards(tmp_path / name, "train"), 4), batch_size=3, micro_batch=3, seed=2)

    texts = list(range(900))
    given = stream("given", texts)
    next(given)
    state = given.state_dict()
    stream("same", texts).load_state_dict(state)
    for name, other in (("others", texts[::-1]), ("a word more, and one less at the end", [7, *texts[:-1]])):
        changed = stream(name, other)
        with pytest.raises(InputError, match=r"the data are not those .* --accept-changes"):
            changed.load_state_dict(state)
        changed.load_state_dict({key: value for key, value in state.items() if key != "content"})  # an older one
