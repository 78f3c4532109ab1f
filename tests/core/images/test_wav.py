"""WAV files as programs write them: read as libsndfile reads them, or refused in one sentence."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from penjing.core.errors import InputError
from penjing.core.images.wav import read_wav
from tests.core.images.test_sound import recording, tone

MOST = 100_000


def written(subtype: str, channels: int = 1, form: str = "WAV") -> bytes:
    """A noise in a file of libsndfile."""
    file, noise = io.BytesIO(), np.random.default_rng(0).uniform(-0.9, 0.9, (500, channels))
    soundfile.write(file, noise, 22_050, subtype=subtype, format=form)
    return file.getvalue()


@pytest.mark.parametrize("form", ["WAV", "WAVEX"])
@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"])
def test_samples_are_those_of_libsndfile(subtype: str, channels: int, form: str) -> None:
    data = written(subtype, channels, form)
    samples, rate = read_wav(data, MOST)
    theirs, _ = soundfile.read(io.BytesIO(data), always_2d=True)
    assert rate == 22_050
    np.testing.assert_allclose(samples, theirs.mean(1), atol=1e-12)


def test_a_file_that_came_through_a_pipe_does_not_know_its_size() -> None:
    data = bytearray(recording(tone(440, 0.01)))
    whole = read_wav(bytes(data), MOST)[0]
    for at in (4, data.index(b"data") + 4):
        data[at : at + 4] = b"\xff" * 4
    assert np.array_equal(read_wav(bytes(data), MOST)[0], whole)


def changed(at: int, values: bytes) -> bytes:
    data = bytearray(recording(tone(440, 0.01)))
    data[at : at + len(values)] = values
    return bytes(data)


NOT_A_NUMBER = b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<IHHIIHH", 16, 3, 1, 16_000, 64_000, 4, 32)
NOT_A_NUMBER += b"data" + struct.pack("<If", 4, float("nan"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (written("ALAW"), "it is a WAV file of A-law, not of plain numbers; convert it to 16-bit PCM"),
        (written("MS_ADPCM"), "it is a WAV file of ADPCM, not"),
        (recording(tone(440, 0.01))[:40], "its header or its samples are missing"),
        (recording(tone(440, 0.01))[:90], "it ends after 46 of 320 bytes; get it again"),
        (changed(24, b"\0\0\0\0"), "1 channels, 0 samples a second and 16 bits cannot be"),
        (changed(22, b"\0\0"), "0 channels"),
        (NOT_A_NUMBER, "samples that are NaN or infinite"),
        (b"hello, I am text", "it is no WAV file"),
    ],
)
def test_what_is_no_recording_is_told_in_one_sentence(data: bytes, said: str) -> None:
    with pytest.raises(InputError) as caught:
        read_wav(data, MOST)
    assert said in str(caught.value)


@given(st.integers(0, 80), st.binary(max_size=8), st.integers(0, 400))
def test_no_damage_is_another_error(at: int, values: bytes, length: int) -> None:
    try:
        samples, rate = read_wav(changed(at, values)[:length], MOST)
    except InputError:
        return
    assert np.isfinite(samples).all()
    assert rate > 0
