"""Texts and token shards elsewhere: fsspec's file system in memory, and a server over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from penjing.core.errors import InputError
from penjing.core.remote import files
from penjing.train.data.order import Order, permute_near
from penjing.train.data.pack import prepare_tokens
from penjing.train.data.prefetch import Prefetched
from penjing.train.data.shards import ShardIndex, ShardWriter, TokenShards, write_index
from penjing.train.data.stream import one_pass
from penjing.train.data.tokens import TokenRows
from penjing.train.remote.shards import RemoteShards, local_folder, open_shards, read_ahead
from tests.core.remote.server import Files, serving

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
LENGTH, BLOCK = 8, 256  # tokens of a sample; bytes: 16 samples


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_FIRST_WAIT_S", 0.001)
    files._checked_at.clear()
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    folder.mkdir()
    writer = ShardWriter(folder, "train", 5000, shard_tokens=1001)
    writer.add(np.random.default_rng(0).integers(0, 5000, 6_000).tolist())
    index = ShardIndex(dtype="uint16", vocab_size=5000, end_of_text=0, splits={"train": writer.close()})
    write_index(folder, index)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def served(shards: Path) -> Files:
    return Files({f"t/{path.name}": path.read_bytes() for path in shards.iterdir()})


def stream_of(folder: Path, rank: int = 0, world_size: int = 1):
    found = RemoteShards(folder, "train", BLOCK)
    rows = TokenRows(found, LENGTH)
    return read_ahead(rows, found, LENGTH, batch_size=4, micro_batch=4 // world_size, rank=rank, world_size=world_size)


@pytest.mark.parametrize("size", [1, 5, 31, 32, 33, 1000, 1003])
def test_near_permutations_are_permutations_of_whole_groups(size: int) -> None:
    found = permute_near(np.arange(size, dtype=np.uint64), size, 7, 16, 3)
    assert sorted(found.tolist()) == list(range(size))
    whole = size // 16 * 16
    for begin in range(0, whole if size >= 32 else 0, 48):  # a window has samples of three groups alone
        window = found[begin : min(begin + 48, whole)]
        assert len(np.unique(window // 16)) == len(window) // 16
    again = np.concatenate([permute_near(np.array([n], np.uint64), size, 7, 16, 3) for n in range(size)])
    assert (again == found).all()
    if size > 100:
        assert (permute_near(np.arange(size, dtype=np.uint64), size, 8, 16, 3) != found).mean() > 0.9


def test_remote_rows_are_those_of_the_same_shards_here(shards: Path) -> None:
    server = served(shards)
    with serving(server) as address:
        folder = local_folder(f"{address}/t/")
        assert (folder / "tokenizer.json").read_text() == "{}"
        here, there = TokenShards(shards, "train"), open_shards(folder, "train")
        assert there.num_tokens == here.num_tokens
        for begin, size in ((0, 6_000), (990, 30), (5_999, 1)):
            assert (there.read(begin, size) == here.read(begin, size)).all()
        batches = [list(one_pass(TokenRows(each, LENGTH), micro_batch=64)) for each in (here, there)]
        assert all(torch.equal(a["targets"], b["targets"]) for a, b in zip(*batches, strict=True))
        with pytest.raises(InputError, match="is remote, and its files are not read as a whole"):
            there.verify()


def test_an_epoch_reads_each_block_once_and_each_sample(shards: Path) -> None:
    server = served(shards)
    with serving(server) as address:
        server.gets.clear()
        stream = stream_of(local_folder(f"{address}/t"))
        seen = [next(stream)["tokens"] for _ in range(len(stream.samples) // 4)]  # type: ignore[arg-type]
        rows = sorted(map(tuple, torch.cat(seen).tolist()))
        here = TokenRows(TokenShards(shards, "train"), LENGTH)
        expected = sorted(map(tuple, here.read(range(len(here)))["tokens"].tolist()))
        assert len(set(rows) & set(expected)) >= len(expected) - 3  # 749 samples are no multiple of 4
        bins = {name: count for name, count in server.gets.items() if name.endswith(".bin")}
        assert sum(bins.values()) <= sum(-(-len(server.files[name]) // BLOCK) for name in bins)


def test_batches_are_the_same_on_any_number_of_processes_and_after_a_stop(shards: Path) -> None:
    with serving(served(shards)) as address:
        folder = local_folder(f"{address}/t")
        whole = stream_of(folder)
        expected = [next(whole)["tokens"] for _ in range(220)]  # past the first epoch
        for world in (2, 4):
            parts = [stream_of(folder, rank, world) for rank in range(world)]
            for step in range(220 if world == 2 else 30):
                assert torch.equal(torch.cat([next(each)["tokens"] for each in parts]), expected[step])
        ahead = Prefetched(stream_of(folder))
        for _ in range(133):
            next(ahead)
        state = ahead.state_dict()
        ahead.close()
        for rank in range(2):  # goes on with other processes
            other = stream_of(folder, rank, 2)
            other.load_state_dict(json.loads(json.dumps(state)))
            for step in range(133, 200):
                assert torch.equal(next(other)["tokens"], expected[step][2 * rank : 2 * rank + 2])


def test_an_order_over_blocks_is_not_taken_for_another(shards: Path) -> None:
    near, plain = Order(100, 4, 4, 0, 1, 0, near=(10, 2)), Order(100, 4, 4, 0, 1, 0)
    assert plain.state_dict().keys() == {"taken", "num_samples", "batch_size", "seed"}
    for one, other in ((near, plain), (plain, near)):
        with pytest.raises(InputError, match="the checkpoint was made with near="):
            one.load_state_dict(other.state_dict())
    assert [next_ for _ in range(30) for next_ in near.next()[1].tolist()] == Order(
        100, 4, 4, 0, 1, 0, near=(10, 2)
    ).coming(120).tolist()


def test_a_disconnect_loses_and_repeats_nothing(shards: Path) -> None:
    server = served(shards)
    with serving(server) as address:
        expected = [next(each)["tokens"] for each in [stream_of(local_folder(f"{address}/t"))] for _ in range(150)]
    server = served(shards)
    with serving(server) as address:
        folder = local_folder(f"{address}/t")
        server.failures = [503, 0, 500, 0]
        stream = stream_of(folder)
        assert all(torch.equal(next(stream)["tokens"], each) for each in expected)


def test_remote_shards_that_are_cut_off_or_missing_are_named(shards: Path) -> None:
    server = served(shards)
    with serving(server) as address:
        folder = local_folder(f"{address}/t")
        server.files["t/train-00001.bin"] = server.files["t/train-00001.bin"][:-2]
        with pytest.raises(InputError, match=r"train-00001.bin has 2,000 bytes, not 2,002"):
            open_shards(folder, "train")
        del server.files["t/train-00000.bin"]
        with pytest.raises(InputError, match=r"train-00000.bin does not exist"):
            open_shards(folder, "train")
        with pytest.raises(InputError, match=r"which data.shards names: .*/nothing/index.json does not exist"):
            local_folder(f"{address}/nothing")


def test_remote_texts_pack_to_what_they_pack_to_here(tmp_path: Path) -> None:
    texts = [f"Document {n} says something of its own, namely {n * 7919 % 1000} and {n * n}. " * 5 for n in range(60)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text(lines)
    (tmp_path / "corpus" / "b.txt").write_text("A text beside it. " * 40)
    for path in (tmp_path / "corpus").iterdir():
        with fsspec.open(f"memory://corpus/{path.name}", "wb") as file:
            file.write(path.read_bytes())
    here = prepare_tokens((str(tmp_path / "corpus"),), 300, held_out=0.1)
    there = prepare_tokens(("memory://corpus/",), 300, held_out=0.1)
    assert here != there
    assert prepare_tokens(("memory://corpus/",), 300, held_out=0.1) == there
    for name in ("train-00000.bin", "held_out-00000.bin", "tokenizer.json"):
        assert (here / name).read_bytes() == (there / name).read_bytes()
    with fsspec.open("memory://corpus/b.txt", "wb") as file:
        file.write(b"Another text. " * 40)
    assert prepare_tokens(("memory://corpus/",), 300, held_out=0.1) != there
    with pytest.raises(InputError, match=r"memory://nothing/"):
        prepare_tokens(("memory://nothing/",), 300, held_out=0.1)
