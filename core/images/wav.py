"""WAV files of plain numbers: integers of 8 to 32 bits and floats, of any rate and number of channels; also those whose
header has the extensible form (Microsoft's "Multiple Channel Audio Data and WAVE Files")."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from penjing.core.errors import InputError

_INTEGERS, _FLOATS, _EXTENSIBLE = 1, 3, 0xFFFE
_OTHERS = {2: "ADPCM", 6: "A-law", 7: "mu-law", 0x11: "ADPCM", 0x31: "GSM", 0x50: "MPEG", 0x55: "MP3", 0xFF: "AAC"}
_UNKNOWN = 0xFFFFFFFF  # the size that a program writes which does not know it yet, as into a pipe


def chunks(data: bytes) -> dict[bytes, bytes]:
    """What a WAV file holds: name → content, up to the samples.

    Raises:
        InputError: it is none, or ends inside one of them.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        raise InputError("it is no WAV file of plain numbers: those begin with RIFF and WAVE")
    found: dict[bytes, bytes] = {}
    at = 12
    while at + 8 <= len(data) and b"data" not in found:
        name, size = struct.unpack("<4sI", data[at : at + 8])
        at += 8
        there = len(data) - at
        if size > there and not (name == b"data" and size == _UNKNOWN):
            raise InputError(f"it is a broken WAV file: it ends after {there:,} of {size:,} bytes; get it again")
        found.setdefault(name, data[at : at + size])
        at += size + size % 2
    return found


def read_wav(data: bytes, most: int) -> tuple[NDArray[np.float64], int]:
    """(samples from -1 to 1, of all channels the mean; how many a second).

    Args:
        most: samples of all channels that may be; a file of more is refused before it is decoded.

    Raises:
        InputError: no such file, or a broken, empty, compressed or too long one.
    """
    found = chunks(data)
    header = found.get(b"fmt ", b"")
    if len(header) < 16 or b"data" not in found:
        raise InputError("it is a broken WAV file: its header or its samples are missing")
    kind, channels, rate, _, width, bits = struct.unpack("<HHIIHH", header[:16])
    if kind == _EXTENSIBLE and len(header) >= 26:
        (kind,) = struct.unpack("<H", header[24:26])
    if kind not in (_INTEGERS, _FLOATS):
        named = _OTHERS.get(kind, f"format {kind}")
        raise InputError(f"it is a WAV file of {named}, not of plain numbers; convert it to 16-bit PCM")
    size = width // channels if channels else 0
    if rate < 1 or not channels or size * channels != width or size not in ((1, 2, 3, 4), (4, 8))[kind == _FLOATS]:
        raise InputError(
            f"it is a broken WAV file: {channels} channels, {rate} samples a second and {bits} bits cannot be"
        )
    samples = found[b"data"]
    count = len(samples) // width
    if not count:
        raise InputError("it is a WAV file without samples")
    if count * channels > most:
        raise InputError(f"it has {count * channels:,} samples, at most {most:,} are decoded; cut it")
    values = _numbers(samples[: count * width], size, is_float=kind == _FLOATS)
    if not np.isfinite(values).all():
        raise InputError("it is a WAV file with samples that are NaN or infinite")
    return values.reshape(-1, channels).mean(1), rate


def _numbers(raw: bytes, size: int, *, is_float: bool) -> NDArray[np.float64]:
    """From -1 to 1, of `size` bytes each."""
    if is_float:
        return np.clip(np.frombuffer(raw, f"<f{size}").astype(np.float64), -1, 1)
    if size == 1:
        return (np.frombuffer(raw, np.uint8).astype(np.float64) - 128) / 128
    if size == 3:  # three bytes are made four
        raw, size = np.pad(np.frombuffer(raw, np.uint8).reshape(-1, 3), ((0, 0), (1, 0))).tobytes(), 4
    return np.frombuffer(raw, f"<i{size}").astype(np.float64) / 2.0 ** (8 * size - 1)
