"""Readers fit samples to a network; what is broken is left out, named and counted."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from penjing.core import files
from penjing.core.checkpoint.classifier_config import fitted_pixels
from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.core.graph.config import Fit, Pixels, TensorSpec
from penjing.core.images.decode import decode_image
from penjing.core.progress import Silent
from penjing.train.data.augment import boxes, coloured, zoomed
from penjing.train.data.images import Images, ImageSet
from penjing.train.data.order import Order
from penjing.train.data.stream import Draw, OrderedStream, one_pass, shuffled
from penjing.train.objective.mixture import OTHERS, SHARES
from penjing.train.objective.outputs import REAL
from penjing.train.sources import decoders, images
from penjing.train.sources.images import Wanted, load_images
from penjing.train.sources.mix import MixedSamples
from penjing.train.sources.open import open_source
from penjing.train.sources.reader import Form, Reader
from penjing.train.sources.settings import Augment, SourceSettings
from penjing.train.sources.stream import ReadSamples, augmented
from tests.train.sources.photos import folder_of, photo

PIXELS = Pixels(height=16, width=16, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
INPUT = TensorSpec(name="x", dtype="float32", shape=("batch", 3, 16, 16))


def reader_of(path: Path, form: Form | None = None, notes: list[str] | None = None, **values: Any) -> Reader:
    given = SourceSettings.model_validate({"source": str(path), **values})
    source = open_source(given)
    note = [].append if notes is None else notes.append
    return Reader(source, np.arange(source.size), form or Form((INPUT,), PIXELS, 2), given, note)


def test_images_are_fitted_and_normalised(tmp_path: Path) -> None:
    reader = reader_of(folder_of(tmp_path, {"cat": 2, "dog": 2}))
    inputs, targets = reader.batch([0, 3])
    assert inputs["x"].shape == (2, 3, 16, 16)
    assert inputs["x"].dtype == np.float32
    assert targets.tolist() == [0, 1]
    assert np.abs(inputs["x"]).max() <= 2.01


def test_processes_decode_what_threads_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path, {"": 6})
    (tmp_path / "000.png").write_bytes(b"no image")
    parts = np.array([[0.1, 0.2, 0.6, 0.7]] * 6)
    read = {}
    for processes in (0, 1):
        reader = reader_of(tmp_path, processes=processes, max_broken=0.5)
        read[processes] = reader.batch(range(6), shown=parts)[0]["x"], reader.broken
    assert np.array_equal(read[0][0], read[1][0])
    assert read[0][1] == read[1][1]
    assert len(read[1][1]) == 1
    for process in decoders._pool(1)._processes.values():
        process.kill()
    with pytest.raises(SetupError, match=r"lower data\.processes"):
        reader_of(tmp_path, processes=1, max_broken=0.5).batch(range(6))


def test_what_is_broken_is_named_and_replaced(tmp_path: Path) -> None:
    folder_of(tmp_path, {"cat": 2, "dog": 2})
    (tmp_path / "cat" / "000.png").write_bytes(b"no image")
    notes: list[str] = []
    reader = reader_of(tmp_path, notes=notes, max_broken=0.3)
    inputs, targets = reader.batch([0, 1])
    np.testing.assert_array_equal(inputs["x"][0], inputs["x"][1])
    assert targets.tolist() == [0, 0]
    assert len(notes) == 1
    assert "000.png is left out" in notes[0]
    with pytest.raises(InputError, match=r"1 of 4 samples.*max_broken"):
        reader_of(tmp_path, max_broken=0.1).batch([0])
    for path in tmp_path.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match="4 of 4"):
        reader_of(tmp_path, max_broken=1.0).batch([0])


@given(place=st.integers(0, 2000), byte=st.integers(0, 255), cut=st.integers(0, 2000))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_images_are_one_error(tmp_path: Path, place: int, byte: int, cut: int) -> None:
    folder_of(tmp_path, {"cat": 1, "dog": 1})
    for path, ending in ((tmp_path / "cat" / "000.png", "png"), (tmp_path / "dog" / "000.png", "jpg")):
        data = bytearray(photo(0, ending=ending))
        data[place % len(data)] = byte
        path.write_bytes(data[: len(data) - cut % len(data)])
    with contextlib.suppress(InputError):
        inputs, _ = reader_of(tmp_path, max_broken=1.0).batch([0, 1])
        assert np.isfinite(inputs["x"]).all()


def test_classes_have_to_be_those_of_the_network(tmp_path: Path) -> None:
    folder_of(tmp_path, {"cat": 1, "dog": 1})
    with pytest.raises(InputError, match="2 classes, the network 10"):
        reader_of(tmp_path, Form((INPUT,), PIXELS, 10))
    with pytest.raises(InputError, match="tells none apart"):
        reader_of(tmp_path, Form((INPUT,), PIXELS, 0))
    with pytest.raises(InputError, match="'cat', which is none"):
        reader_of(tmp_path, Form((INPUT,), PIXELS, 2, ("dog", "bird")))
    named = reader_of(tmp_path, Form((INPUT,), PIXELS, 3, ("dog", "bird", "cat")))
    assert named.targets is not None
    assert named.targets.tolist() == [2, 0]
    assert reader_of(tmp_path, Form((INPUT,), PIXELS, 10), labels=False).targets is None


def test_images_need_to_be_wanted(tmp_path: Path) -> None:
    folder_of(tmp_path, {"": 2})
    with pytest.raises(InputError, match="--size 224x224"):
        reader_of(tmp_path, Form((INPUT,))).batch([0])


def test_tensors_go_by_name_or_place(tmp_path: Path) -> None:
    x, y = np.zeros((3, 2), np.float32), np.zeros((3, 4), np.int32)
    np.savez(tmp_path / "a.npz", second=y, first=x)
    specs = (
        TensorSpec(name="first", dtype="float32", shape=("batch", 2)),
        TensorSpec(name="second", dtype="int64", shape=("batch", "length")),
    )
    inputs, targets = reader_of(tmp_path / "a.npz", Form(specs)).batch([0, 1])
    assert {name: (value.shape, value.dtype.name) for name, value in inputs.items()} == {
        "first": ((2, 2), "float32"),
        "second": ((2, 4), "int64"),
    }
    assert targets.tolist() == [-1, -1]
    with pytest.raises(InputError, match="no third"):
        reader_of(tmp_path / "a.npz", Form((*specs[:1], specs[1].model_copy(update={"name": "third"})))).batch([0])
    with pytest.raises(InputError, match="give what the network takes"):
        reader_of(tmp_path / "a.npz", Form((specs[0].model_copy(update={"shape": ("batch", 5)}), specs[1]))).batch([0])


@pytest.mark.parametrize("name", ["x", "arr_0", "pictures"])
def test_a_single_tensor_of_another_name_is_taken_and_said(tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / "a.npz", **{name: np.zeros((3, 2), np.float32)})  # type: ignore[arg-type]
    notes: list[str] = []
    reader = reader_of(tmp_path / "a.npz", Form((TensorSpec(name="x", dtype="float32", shape=("batch", 2)),)))
    reader.note = notes.append
    assert reader.batch([0, 1])[0]["x"].shape == (2, 2)
    said = [f"{tmp_path}/a.npz has no x; its only tensor beside classes, pictures, is taken for it"]
    assert notes == (said if name == "pictures" else [])


def test_what_is_no_number_is_refused(tmp_path: Path) -> None:
    form = Form((TensorSpec(name="a", dtype="float32", shape=("batch", 2)),))
    np.savez(tmp_path / "a.npz", a=np.array([[1, np.inf], [np.nan, 1]], np.float32))
    reader = reader_of(tmp_path / "a.npz", form)
    assert reader.batch([0])[0]["a"][0, 1] == np.inf
    with pytest.raises(InputError, match="NaN"):
        reader.batch([0, 1])


def test_the_stream_is_the_same_however_it_is_cut(tmp_path: Path) -> None:
    folder_of(tmp_path, {"cat": 5, "dog": 4})
    augment = Augment(pad=2, flip=True, erase=3)

    def stream(micro: int, rank: int = 0, size: int = 1) -> OrderedStream[Order]:
        return shuffled(
            ReadSamples(reader_of(tmp_path), augment),
            batch_size=4,
            micro_batch=micro,
            rank=rank,
            world_size=size,
            seed=3,
        )

    whole = stream(4)
    one, other = stream(2, 0, 2), stream(2, 1, 2)
    for _ in range(4):
        batch, halves = next(whole), (next(one), next(other))
        for name in ("input.0", "targets", REAL):
            parts = np.concatenate([half[name].numpy() for half in halves])
            np.testing.assert_array_equal(batch[name].numpy(), parts)


def test_augmented_images_keep_their_pixels() -> None:
    images = np.arange(2 * 4 * 4 * 1, dtype=np.uint8).reshape(2, 4, 4, 1) + 1
    random = np.array([1 << 32, 0], np.uint64)
    found = augmented(images, random, Augment(flip=True), (0.0,))
    np.testing.assert_array_equal(found[0], images[0, :, ::-1])
    np.testing.assert_array_equal(found[1], images[1])
    padded = augmented(images, np.zeros(2, np.uint64), Augment(pad=1), (0.0,))
    np.testing.assert_array_equal(padded[:, 1:, 1:], images[:, :-1, :-1])
    assert not padded[:, 0].any()


def test_held_out_samples_are_each_seen_once(tmp_path: Path) -> None:
    reader = ReadSamples(reader_of(folder_of(tmp_path, {"cat": 3, "dog": 4})), Augment())
    batches = [list(one_pass(reader, 100, micro_batch=2, rank=rank, world_size=2)) for rank in (0, 1)]
    assert [len(each) for each in batches] == [2, 2]
    assert sum(int(batch[REAL].sum()) for each in batches for batch in each) == 7


def test_images_for_our_own_classifiers(tmp_path: Path) -> None:
    folder_of(tmp_path, {"cat": 12, "dog": 12})
    given = SourceSettings(source=str(tmp_path))
    halves = [
        load_images(given, Wanted(fitted_pixels((10, 12), 1, "stretch", None, "bilinear")), 0.25, split, 100, Silent())
        for split in ("train", "test")
    ]
    assert sum(len(half.images) for half in halves) == 24
    assert halves[0].images.shape[1:] == (1, 10, 12)
    assert halves[0].num_classes == 2
    assert not {image.tobytes() for image in halves[0].images} & {image.tobytes() for image in halves[1].images}
    assert (
        len(
            load_images(
                given, Wanted(fitted_pixels((8, 8), 3, "stretch", None, "bilinear")), 0.25, "train", 5, Silent()
            ).images
        )
        == 5
    )


def test_images_of_our_own_classifiers_keep_their_shape_where_that_is_wanted(tmp_path: Path) -> None:
    """An image whose middle square is white and whose left and right are black."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for place in range(2):
            image = np.zeros((16, 48, 3), np.uint8)
            image[:, 16:32] = 255 - place
            Image.fromarray(image).save(tmp_path / name / f"{place}.png")
    given = SourceSettings(source=str(tmp_path))

    def read(fit: Fit) -> Any:
        wanted = Wanted(fitted_pixels((16, 16), 3, fit, None, "bilinear"))
        return load_images(given, wanted, 0.0, "train", 9, Silent()).images[0, 0].astype(int)

    assert (read("cover") >= 254).all()
    assert (read("stretch")[:, 0] == 0).all()
    with pytest.raises(ConfigError, match="resize is 16x16, out of which 32x32 are cut"):
        fitted_pixels((32, 32), 3, "cover", (16, 16), "bilinear")
    border = read("border")
    assert (border[:5] == 128).all()
    assert (border[11:] == 128).all()
    assert border[8, 8] >= 254
    assert border[8, 0] == 0


def test_a_sample_is_mixed_with_another_by_its_own_number_alone() -> None:
    images = np.arange(10, dtype=np.uint8).reshape(10, 1, 1, 1).repeat(3, 1)
    zero, one = np.zeros(3, np.float32), np.full(3, 1 / 255, np.float32)
    mixed = MixedSamples(Images(ImageSet(images, np.arange(10), 10), zero, one), 0.4)
    random = np.random.default_rng(0).integers(0, 2**64, 200, np.uint64)
    draw = Draw(np.arange(200) % 10, np.ones(200, np.bool_), random)
    found = mixed.batch(draw)
    own, other, share = found["targets"], found[OTHERS], found[SHARES]
    expected = (1 - share) * own + share * other
    assert torch.allclose(found["images"], expected[:, None, None, None].expand(-1, 3, 1, 1), atol=1e-5)
    assert 0 <= float(share.min()) < 0.02
    assert 0.38 < float(share.max()) <= 0.4
    assert len(set(other.tolist())) == 10
    half = mixed.batch(Draw(draw.samples[50:90], draw.real[50:90], random[50:90]))
    assert torch.equal(half["images"], found["images"][50:90])
    plain = mixed.batch(Draw(draw.samples, draw.real))
    assert OTHERS not in plain
    assert torch.allclose(plain["images"][:10, 0, 0, 0], torch.arange(10.0))


def test_a_part_of_an_image_is_shown(tmp_path: Path) -> None:
    """The left half of an image that is red there and blue elsewhere is red, whatever the file's size."""
    image = np.zeros((40, 80, 3), np.uint8)
    image[:, :40, 0] = image[:, 40:, 2] = 255
    Image.fromarray(image).save(tmp_path / "one.png")
    pixels = Pixels(height=8, width=8, mean=(0.0,) * 3, std=(1.0,) * 3)
    data = (tmp_path / "one.png").read_bytes()
    left = decode_image(data, pixels, part=(0.2, 0.0, 0.5, 0.45))
    assert (left == (255, 0, 0)).all()
    assert (decode_image(data, pixels, part=(0.0, 0.0, 1.0, 1.0)) == decode_image(data, pixels)).all()


def test_parts_and_colours_stay_within_their_bounds() -> None:
    random = np.random.default_rng(0).integers(0, 2**64, 500, np.uint64)
    found = boxes(random, 0.3)
    area, ratio = found[:, 2] * found[:, 3], found[:, 2] / found[:, 3]
    assert found.min() >= 0
    assert (found[:, :2] + found[:, 2:]).max() <= 1 + 1e-9
    assert 0.3 - 1e-9 <= area.min() < 0.35
    assert area.max() > 0.9
    assert 3 / 4 - 1e-9 <= ratio.min() < ratio.max() <= 4 / 3 + 1e-9
    images = np.full((500, 4, 4, 3), 100, np.uint8)
    lights = coloured(images, random, 0.2).mean((1, 2, 3))
    assert 80 <= lights.min() < 85
    assert 115 < lights.max() <= 120
    assert (zoomed(images, random, 0.3) == 100).all()
    grey = np.random.default_rng(1).integers(0, 256, (5, 6, 4, 1), np.uint8)
    assert zoomed(grey, random[:5], 0.3).shape == coloured(grey, random[:5], 0.3).shape == grey.shape
    assert (coloured(grey, random[:5], 0.0) == grey).all()


def test_samples_are_cut_out_of_their_files(tmp_path: Path) -> None:
    reader = reader_of(folder_of(tmp_path, {"a": 4, "b": 4}))
    random = np.arange(4, dtype=np.uint64)
    draw = Draw(np.arange(4), np.ones(4, bool), random)
    whole = ReadSamples(reader, Augment()).batch(draw)["input.0"]
    cut = ReadSamples(reader, Augment(scale=0.3)).batch(draw)["input.0"]
    again = ReadSamples(reader, Augment(scale=0.3)).batch(draw)["input.0"]
    assert cut.shape == whole.shape
    assert not torch.equal(cut, whole)
    assert torch.equal(cut, again)
    alone = ReadSamples(reader, Augment(scale=0.3)).batch(Draw(np.arange(2, 3), np.ones(1, bool), random[2:3]))
    assert torch.equal(alone["input.0"], cut[2:3])


def test_images_that_take_too_much_memory_lie_in_a_file_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    given = SourceSettings(source=str(folder_of(tmp_path / "photos", {"cat": 5, "dog": 4})))
    wanted = Wanted(fitted_pixels((10, 12), 3, "stretch", None, "bilinear"))
    held = load_images(given, wanted, 0.0, "train", 9, Silent())
    monkeypatch.setattr(images, "available_bytes", lambda: 100)
    found = load_images(given, wanted, 0.0, "train", 9, Silent())
    assert isinstance(found.images, np.memmap)
    assert not isinstance(held.images, np.memmap)
    assert np.array_equal(found.images, held.images)
    assert np.array_equal(found.labels, held.labels)
    assert list((tmp_path / "cache" / "images").iterdir()) == []
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(SetupError, match="the disk is full"):
        load_images(given, wanted, 0.0, "train", 9, Silent())
