"""Pictures of recordings, against transformers' feature extractor of Whisper; and what is refused."""

from __future__ import annotations

import io
import wave

import numpy as np
import pytest

from penjing.core.errors import InputError
from penjing.core.images.sound import Sound, mel_bands, spectrogram

SOUND, SIDE = Sound(hop=250), 64  # one second of 16,000 samples


def recording(samples: np.ndarray, rate: int = 16_000, channels: int = 1, width: int = 2) -> bytes:
    """The WAV file of samples from -1 to 1."""
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setnchannels(channels)
        made.setsampwidth(width)
        made.setframerate(rate)
        whole = np.round(np.repeat(samples, channels) * (2.0 ** (8 * width - 1) - 1)).astype(np.int64)
        if width == 1:
            made.writeframes((whole + 128).astype(np.uint8).tobytes())
        else:
            made.writeframes(whole.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes())
    return file.getvalue()


def tone(hertz: float, seconds: float = 1.0, rate: int = 16_000) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)


def heard(data: bytes) -> np.ndarray:
    return spectrogram(data, SOUND, SIDE, max_samples=1_000_000)[:, :, 0]


def test_a_picture_is_what_whisper_hears() -> None:
    from transformers import WhisperFeatureExtractor

    theirs = WhisperFeatureExtractor(feature_size=SIDE, hop_length=250, n_fft=400, chunk_length=1)
    np.testing.assert_allclose(mel_bands(SIDE, 400, 16_000), theirs.mel_filters.T, atol=1e-10)
    random = np.random.default_rng(0)
    for samples in (tone(440), tone(3000, 0.4), 0.2 * random.standard_normal(12_000).clip(-3, 3)):
        data = recording(samples)
        stored = np.round(samples * 32767) / 32768
        wanted = theirs(stored, sampling_rate=16_000, return_tensors="np").input_features[0]
        log = 4 * wanted - 4
        np.testing.assert_allclose(heard(data) / 255, (log - log.max() + 8) / 8, atol=0.6 / 255)


@pytest.mark.parametrize(
    ("rate", "channels", "width"), [(16_000, 2, 2), (44_100, 1, 2), (8_000, 1, 3), (16_000, 1, 1), (22_050, 2, 4)]
)
def test_rates_channels_and_widths_are_one_sound(rate: int, channels: int, width: int) -> None:
    found = heard(recording(tone(440, 0.8, rate), rate, channels, width))
    loud = heard(recording(tone(440, 0.8)))
    assert np.abs(found.argmax(0).astype(int) - loud.argmax(0))[:48].max() <= 1
    assert (found[:, -8:] <= found[:, 20:21].max() // 2).all()  # silence behind the end


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no WAV file of plain numbers"),
        (b"RIFF" + b"x" * 40, "no WAV file of plain numbers"),
        (recording(tone(440))[:2000], "broken WAV file"),
        (recording(tone(440, 1.1)), r"it lasts 1\.10 s, and 1\.00 s are heard"),
        (recording(np.zeros(0)), "WAV file without samples"),
    ],
)
def test_what_cannot_be_heard_is_one_line(data: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        heard(data)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="at most 100 are decoded"):
        spectrogram(recording(tone(440)), SOUND, SIDE, max_samples=100)


def test_a_recording_that_says_one_sample_a_second_is_too_long_before_it_is_resampled() -> None:
    with pytest.raises(InputError, match=r"it lasts 900000\.00 s, and 1\.00 s are heard"):
        heard(recording(np.zeros(900_000), rate=1))
