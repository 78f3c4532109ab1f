from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penjing.core.errors import ConfigError, InputError
from penjing.core.models.attention import document_positions
from penjing.core.progress import Silent
from penjing.core.text.tokenizer import Tokenizer
from penjing.train.data.corpora import documents, name_place
from penjing.train.data.fashion import read_idx
from penjing.train.data.images import Images, ImageSet
from penjing.train.data.order import Order, permute
from penjing.train.data.pack import pack, prepare_tokens
from penjing.train.data.prefetch import Prefetched
from penjing.train.data.shards import ShardFile, ShardIndex, ShardWriter, TokenShards, read_index, write_index
from penjing.train.data.stream import OrderedStream, one_pass, shuffled
from penjing.train.data.tokens import TokenRows, held_out_rows
from penjing.train.objective.objective import IGNORED


@given(size=st.integers(1, 3000), key=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size, dtype=np.uint64), size, key).tolist()) == list(range(size))


def test_permutations_differ_and_look_random() -> None:
    a, b = (permute(np.arange(10000, dtype=np.uint64), 10000, key) for key in (1, 2))
    assert (a == b).mean() < 0.002
    assert abs(np.corrcoef(a, np.arange(10000))[0, 1]) < 0.05
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.05


def steps_of(world_size: int, micro_batch: int, steps: int) -> list[list[tuple[int, int]]]:
    """The (epoch, sample) pairs of each step over all processes."""
    orders = [Order(50, 12, micro_batch, rank, world_size, seed=4) for rank in range(world_size)]
    result = []
    for _ in range(steps):
        taken = [(*order.next(), order.real) for _ in range(orders[0].turns.own) for order in orders]
        result.append(sorted((int(e), int(s)) for one in taken for e, s, real in zip(*one, strict=True) if real))
    return result


def test_a_step_has_the_same_samples_however_it_is_cut() -> None:
    reference = steps_of(1, 12, 10)
    for world_size, micro_batch in ((1, 3), (2, 6), (2, 2), (3, 4), (4, 1), (5, 3), (5, 2), (7, 1), (13, 1), (1, 5)):
        assert steps_of(world_size, micro_batch, 10) == reference
    seen = [pair for step in reference for pair in step]
    assert len(set(seen)) == len(seen)  # no sample twice in an epoch
    assert {sample for epoch, sample in seen if epoch == 0} == set(range(50))


def test_the_order_goes_on_from_a_checkpoint_in_another_world() -> None:
    order = Order(50, 12, 12, 0, 1, seed=4)
    for _ in range(3):
        order.next()
    state = json.loads(json.dumps(order.state_dict()))
    expected = sorted(order.next()[1].tolist())
    halves = [Order(50, 12, 6, rank, 2, seed=4) for rank in range(2)]
    for half in halves:
        half.load_state_dict(state)
    assert sorted(sample for half in halves for sample in half.next()[1].tolist()) == expected
    with pytest.raises(InputError, match="made with batch_size=12, this run has 6"):
        Order(50, 6, 6, 0, 1, seed=4).load_state_dict(state)


def test_no_samples_are_refused() -> None:
    with pytest.raises(InputError, match="no complete sample"):
        Order(0, 4, 4, 0, 1, seed=0)


def write_shards(folder: Path, tokens: list[int], vocab_size: int = 1000, shard_tokens: int = 7) -> Path:
    folder.mkdir()
    writer = ShardWriter(folder, "train", vocab_size, shard_tokens)
    for begin in range(0, len(tokens), 5):
        writer.add(tokens[begin : begin + 5])
    dtype = "uint16" if vocab_size <= 65536 else "uint32"
    write_index(folder, ShardIndex(dtype=dtype, vocab_size=vocab_size, end_of_text=0, splits={"train": writer.close()}))
    return folder


@given(num_tokens=st.integers(1, 60), wide=st.booleans(), data=st.data())
@settings(max_examples=40, deadline=None)
def test_shards_read_back_any_range(
    tmp_path_factory: pytest.TempPathFactory, num_tokens: int, wide: bool, data: st.DataObject
) -> None:
    tokens = [(7919 * index) % 1000 + (70000 if wide else 0) for index in range(num_tokens)]
    shards = TokenShards(write_shards(tmp_path_factory.mktemp("s") / "x", tokens, 80000 if wide else 1000), "train")
    assert shards.num_tokens == num_tokens
    begin = data.draw(st.integers(0, num_tokens - 1))
    length = data.draw(st.integers(1, num_tokens - begin))
    assert shards.read(begin, length).tolist() == tokens[begin : begin + length]
    shards.verify()


def test_damaged_shards_are_named(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "x", list(range(20)))
    first = folder / "train-00000.bin"
    whole = first.read_bytes()
    first.write_bytes(whole[:-2])
    with pytest.raises(InputError, match=r"shard .*train-00000.bin has 12 bytes, not 14: it is empty or truncated"):
        TokenShards(folder, "train")
    first.write_bytes(b"")
    with pytest.raises(InputError, match="has 0 bytes"):
        TokenShards(folder, "train")
    first.unlink()
    with pytest.raises(InputError, match="is missing"):
        TokenShards(folder, "train")
    first.write_bytes(b"\xff\xff" + whole[2:])
    with pytest.raises(InputError, match="token id 65535 near token 0 is outside the vocabulary of 1000"):
        TokenShards(folder, "train").read(0, 5)
    with pytest.raises(InputError, match="is not what was written"):
        TokenShards(folder, "train").verify()
    with pytest.raises(InputError, match="has no split 'dev', only train"):
        TokenShards(folder, "dev")
    with pytest.raises(InputError, match="token id 1000 is outside the vocabulary"):
        ShardWriter(tmp_path, "t", 1000).add([1000])
    write_index(folder, ShardIndex(dtype="uint16", vocab_size=9, end_of_text=0, splits={"train": ()}))
    with pytest.raises(InputError, match=r"split 'train' of .* has no tokens"):
        TokenShards(folder, "train")
    index = read_index(folder).model_dump() | {
        "splits": {"train": [ShardFile(name="../x", tokens=1, sha256="").model_dump()]}
    }
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="outside its folder"):
        TokenShards(folder, "train")
    (folder / "index.json").write_text("{}")
    with pytest.raises(InputError, match="the file is damaged: make the shards again"):
        read_index(folder)


def test_targets_are_the_next_tokens(tmp_path: Path) -> None:
    shards = TokenShards(write_shards(tmp_path / "x", list(range(41))), "train")
    stream = shuffled(TokenRows(shards, 8), batch_size=5, micro_batch=5, seed=1)
    batch = next(stream)
    assert torch.equal(batch["targets"], batch["tokens"] + 1)
    assert sorted(batch["tokens"][:, 0].tolist()) == [0, 8, 16, 24, 32]  # an epoch has every row once


def test_documents_end_with_their_end_of_text(tmp_path: Path) -> None:
    shards = TokenShards(write_shards(tmp_path / "x", [7, 0, 5, 6, 0, 0, 8, 9, 0, 4]), "train")
    stream = shuffled(TokenRows(shards, 9, document_mask=True), batch_size=1, micro_batch=1)
    batch = next(stream)
    assert batch["tokens"].tolist() == [[7, 0, 5, 6, 0, 0, 8, 9, 0]]
    assert batch["documents"].tolist() == [[0, 0, 1, 1, 1, 2, 3, 3, 3]]
    positions = document_positions(batch["documents"])
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0, 0, 1, 2]]


def test_held_out_rows_come_once_whatever_the_world(tmp_path: Path) -> None:
    shards = TokenShards(write_shards(tmp_path / "x", list(range(50))), "train")
    for world_size in (1, 2, 4):
        firsts = []
        for rank in range(world_size):
            rows = held_out_rows(shards, 8)
            batches = list(one_pass(rows, 5, micro_batch=2, rank=rank, world_size=world_size))
            assert batches
            firsts += [
                int(row) for b in batches for row, target in zip(b["tokens"][:, 0], b["targets"][:, 0], strict=True)
                if target != IGNORED
            ]  # fmt: skip
        assert sorted(firsts) == [0, 8, 16, 24, 32]
    with pytest.raises(ConfigError, match=r"less than one sequence of 64 \+ 1; lower data.sequence_length"):
        held_out_rows(shards, 64)


def test_prefetching_changes_neither_batches_nor_state(tmp_path: Path) -> None:
    shards = TokenShards(write_shards(tmp_path / "x", list(range(100))), "train")

    def stream() -> OrderedStream[Order]:
        return shuffled(TokenRows(shards, 4), batch_size=3, micro_batch=3, seed=2)

    plain, ahead = stream(), Prefetched(stream(), depth=3)
    for _ in range(5):
        assert torch.equal(next(ahead)["tokens"], next(plain)["tokens"])
    time.sleep(0.05)  # it reads on
    assert ahead.state_dict() == plain.state_dict()
    state, expected = ahead.state_dict(), next(plain)["tokens"]
    next(ahead)
    ahead.load_state_dict(state)
    assert torch.equal(next(ahead)["tokens"], expected)
    ahead.close()


def test_an_error_of_the_reader_reaches_the_loop(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "x", list(range(100)))
    stream = shuffled(TokenRows(TokenShards(folder, "train"), 4), batch_size=24, micro_batch=24)
    ahead = Prefetched(stream, depth=2)
    (folder / "train-00003.bin").write_bytes(b"\xff" * 14)
    stream.samples = TokenRows(TokenShards(folder, "train"), 4)
    with pytest.raises(InputError, match="a shard is damaged"):
        next(ahead)


def test_packing_loses_no_text(shards: Path) -> None:
    from pydoc_data.topics import topics

    tokenizer = Tokenizer.from_folder(shards)
    index = read_index(shards)
    assert tokenizer.vocab_size == index.vocab_size == 320
    assert tokenizer.eos_token_ids == (index.end_of_text,)
    texts = {split: TokenShards(shards, split) for split in ("train", "held_out")}
    pieces = [
        piece
        for part in texts.values()
        for piece in tokenizer.decode(part.read(0, part.num_tokens).tolist(), skip_special=False).split("<|endoftext|>")
    ]
    assert {piece for piece in pieces if piece} == {topics[name] for name in sorted(topics)[:30]}


def test_the_cache_is_used_and_follows_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: Path
) -> None:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("one two three " * 400)
    first = prepare_tokens((str(text),), 320, held_out=0.01, tokenizer=shards)
    stamp = (first / "index.json").stat().st_mtime_ns
    assert prepare_tokens((str(text),), 320, held_out=0.01, tokenizer=shards) == first
    assert (first / "index.json").stat().st_mtime_ns == stamp
    text.write_text("four five six " * 400)
    assert prepare_tokens((str(text),), 320, held_out=0.01, tokenizer=shards) != first
    with pytest.raises(ConfigError, match=r"has 320 tokens, model.vocab_size is 300; set model.vocab_size = 320"):
        prepare_tokens((str(text),), 300, held_out=0.01, tokenizer=shards)


class Killed(Silent):
    """A process that is killed when its packing has come so many characters far."""

    def __init__(self, characters: int) -> None:
        self.left = characters
        self.packing = False

    def start(self, task: str, total: int) -> None:
        self.packing = task == "packing tokens"
        assert total == 20 * 300

    def advance(self, parts: int = 1) -> None:
        self.left -= parts * self.packing
        if self.left < 0:
            raise KeyboardInterrupt


def test_packing_goes_on_where_it_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penjing.train.data import pack as packing

    monkeypatch.setattr(packing, "_TOGETHER", 2)
    monkeypatch.setattr(packing, "_PUT_DOWN_S", 0.0)
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(20):
        (texts / f"{number:02}.txt").write_text(f"text {number:02} of many".ljust(300, "."))
    arguments = ((str(texts),), 270)
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "undisturbed"))
    whole = prepare_tokens(*arguments, held_out=0.2)
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "killed"))
    for packed in (8, 14):
        with pytest.raises(KeyboardInterrupt):
            prepare_tokens(*arguments, held_out=0.2, progress=Killed((packed + 1) * 300))
        (work,) = (tmp_path / "killed" / "tokens").glob("*.work")
        assert json.loads((work / "packed.json").read_text())["documents"] == packed
        with open(work / "train-00000.bin", "ab") as file:
            file.write(b"half a document")
    added: list[int] = []
    add = ShardWriter.add
    monkeypatch.setattr(ShardWriter, "add", lambda self, ids: (added.append(len(ids)), add(self, ids))[1])
    resumed = prepare_tokens(*arguments, held_out=0.2)
    assert len(added) == 20 - 14
    assert sorted(path.name for path in resumed.iterdir()) == sorted(path.name for path in whole.iterdir())
    assert all((resumed / path.name).read_bytes() == path.read_bytes() for path in whole.iterdir())
    assert not list((tmp_path / "killed" / "tokens").glob("*.work"))


@pytest.mark.parametrize("before", [0, 1, 6, 7, 13, 14, 20])
def test_shards_go_on_at_any_token(tmp_path: Path, before: int) -> None:
    first = ShardWriter(tmp_path, "train", 300, shard_tokens=7)
    first.add(list(range(before)))
    assert first.put_down() == before
    first.add([299] * 9)  # nobody hears of these
    first.put_down()
    second = ShardWriter(tmp_path, "train", 300, shard_tokens=7, written=before)
    second.add(list(range(before, 23)))
    files = second.close()
    assert [file.tokens for file in files] == [7, 7, 7, 2]
    tokens = np.concatenate([np.fromfile(tmp_path / file.name, np.uint16) for file in files])
    assert tokens.tolist() == list(range(23))


def test_wrong_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'builtin:poems' is unknown; choose builtin:prose, builtin:code, b"):
        documents("builtin:poems")
    with pytest.raises(InputError, match="does not exist"):
        list(documents(str(tmp_path / "nothing")))
    with pytest.raises(InputError, match="holds no file that is read here"):
        list(documents(str(tmp_path)))
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "bad").mkdir()
    with pytest.raises(InputError, match=r"1 of 1 documents are damaged.*/latin.txt: cannot be read as UTF-8"):
        pack(tmp_path / "bad", (str(tmp_path),), 300, held_out=0.1, tokenizer=None, progress=Silent())
    (tmp_path / "latin.txt").write_text("")
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="hold no text"):
        pack(tmp_path / "out", (str(tmp_path / "latin.txt"),), 300, held_out=0.1, tokenizer=None, progress=Silent())


def test_held_out_documents_stay_held_out() -> None:
    names = [str(index) for index in range(2000)]
    assert 140 < sum(name_place(name) < 0.1 for name in names) < 260
    assert name_place("a") == 0xCA978112CA1BBDCA / 2**64  # SHA-256 of "a": the same on every machine


def image_set(count: int = 20) -> ImageSet:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (count, 1, 6, 6), dtype=np.uint8)
    return ImageSet(images, np.arange(count, dtype=np.uint8) % 3, 3)


def test_images_are_normalised_and_augmented_by_their_own_dice() -> None:
    data = image_set()
    mean, std = data.statistics()

    def batches(world_size: int, rank: int, micro_batch: int) -> OrderedStream[Order]:
        images = Images(data, mean, std, pad=1, flip=True, erase=2)
        return shuffled(images, batch_size=8, micro_batch=micro_batch, rank=rank, world_size=world_size, seed=3)

    whole = next(batches(1, 0, 8))
    parts = [next(batches(2, rank, 4)) for rank in range(2)]
    assert torch.equal(whole["images"], torch.cat([part["images"] for part in parts]))
    assert torch.equal(whole["targets"], torch.cat([part["targets"] for part in parts]))
    assert whole["images"].dtype == torch.float32
    plain = shuffled(Images(data, mean, std), batch_size=20, micro_batch=20)
    everything = torch.cat([next(plain)["images"]])
    assert everything.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert everything.std().item() == pytest.approx(1.0, abs=2e-3)
    first, second = (next(stream) for stream in [batches(1, 0, 8)] * 2)
    assert not torch.equal(first["images"], second["images"])


def test_crops_and_flips_move_pixels_only() -> None:
    data = image_set()
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    stream = shuffled(Images(data, zero, one, pad=2, flip=True), batch_size=20, micro_batch=20)
    order = Order(20, 20, 20, 0, 1, 0)
    _, samples = order.next()
    images = next(stream)["images"]
    assert images.stride() == (36, 36, 6, 1)  # else torch takes one channel for channels last
    for image, sample in zip(images.numpy()[:, 0], samples, strict=True):
        original = np.pad(data.images[sample, 0].astype(np.float32) / 255, 2)
        candidates = [original[r : r + 6, c : c + 6] for r in range(5) for c in range(5)]
        assert any(np.allclose(image, x) or np.allclose(image, x[:, ::-1]) for x in candidates)


def test_held_out_images_come_once() -> None:
    data = image_set(7)
    mean, std = data.statistics()
    targets = [
        t
        for rank in range(2)
        for b in one_pass(Images(data, mean, std), micro_batch=2, rank=rank, world_size=2)
        for t in b["targets"].tolist()
    ]
    assert sorted(t for t in targets if t != IGNORED) == sorted(data.labels.tolist())


def test_wrong_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="20 images and 19 labels"):
        ImageSet(image_set().images, image_set().labels[:-1], 3)
    with pytest.raises(InputError, match="label 2, there are 2 classes"):
        ImageSet(image_set().images, image_set().labels, 2)
    path = tmp_path / "idx"
    path.write_bytes(b"\0\0\x08\x02" + struct.pack(">II", 2, 3) + bytes(range(6)))
    assert read_idx(path).tolist() == [[0, 1, 2], [3, 4, 5]]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="no complete IDX file"):
        read_idx(path)
