"""Recordings → pictures of their log-mel spectrograms, as Whisper's feature extractor makes them (Radford et al.,
https://arxiv.org/abs/2212.04356), so that what sees pictures can hear."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penjing.core.config import Config
from penjing.core.errors import InputError
from penjing.core.images.wav import read_wav

_RANGE = 8.0  # powers of ten below the loudest that are told apart, as Whisper has it
_LEAST = 1e-10  # power


class Sound(Config):
    """How a recording becomes a picture: a row for each band of pitch, the highest below, a column for each moment."""

    rate: int = Field(default=16_000, ge=1000, le=192_000, description="Samples a second; others are made so many.")
    hop: int = Field(default=160, ge=1, description="Samples from one column to the next.")
    window: int = Field(default=400, ge=16, description="Samples that a column looks at.")

    def seconds(self, side: int) -> float:
        """What a picture of `side` columns shows."""
        return side * self.hop / self.rate


def spectrogram(data: bytes, sound: Sound, side: int, *, max_samples: int) -> NDArray[np.uint8]:
    """(side, side, 1): bands of pitch by moments, 255 for the loudest, 0 for 80 decibels less; silence behind the end.

    Args:
        data: a WAV file of plain numbers (PCM or floats), of any rate and number of channels, whose mean is heard.
        max_samples: a longer file is refused before it is read.

    Raises:
        InputError: no such file, broken, or longer than the picture.
    """
    samples, rate = read_wav(data, max_samples)
    count, most = round(len(samples) * sound.rate / rate), side * sound.hop
    if count > most:  # before it is resampled: a file may say one sample a second, and take hours
        raise InputError(f"it lasts {len(samples) / rate:.2f} s, and {sound.seconds(side):.2f} s are heard; cut it")
    samples = _resampled(samples, max(1, count))
    half = sound.window // 2
    padded = np.pad(np.pad(samples, (0, most - len(samples))), half, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, sound.window)[:: sound.hop][:side]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(sound.window) / sound.window)
    power = np.abs(np.fft.rfft(frames * hann)) ** 2
    log = np.log10(np.maximum(mel_bands(side, sound.window, sound.rate) @ power.T, _LEAST))
    values = np.clip((log - (log.max() - _RANGE)) / _RANGE, 0, 1)
    return np.round(255 * values).astype(np.uint8)[:, :, None]


@cache
def mel_bands(bands: int, window: int, rate: int) -> NDArray[np.float64]:
    """(bands, window / 2 + 1): triangles of equal area, evenly spread over Slaney's mel scale up to half the rate."""
    edges = _hertz(np.linspace(0, _mel(rate / 2), bands + 2))
    tones = np.linspace(0, rate / 2, window // 2 + 1)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (tones - low) / (middle - low), (high - tones) / (high - middle)
    return np.maximum(0, np.minimum(rising, falling)) * (2 / (high - low))


def _mel(hertz: float) -> float:
    """Even up to 1000 Hz, logarithmic above."""
    return 3 * hertz / 200 if hertz < 1000 else 15 + 27 * np.log(hertz / 1000) / np.log(6.4)


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mels < 15, 200 * mels / 3, 1000 * np.exp((mels - 15) * np.log(6.4) / 27))


def _resampled(samples: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """The same sound in `count` samples, without what those cannot say."""
    if count == len(samples):
        return samples
    tones = np.fft.rfft(samples)[: count // 2 + 1]
    return np.fft.irfft(tones, count) * (count / len(samples))
