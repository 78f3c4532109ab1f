"""What the header of a recording says; its samples are not decoded."""

from __future__ import annotations

import io
from dataclasses import dataclass

from penjing.core.errors import InputError
from penjing.core.images.wav import chunks
from penjing.curate.documents.needs import needed

SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")


@dataclass(frozen=True)
class Recording:
    """What a header says."""

    form: str
    sample_rate: int
    channels: int
    seconds: float


def read_recording(content: bytes) -> Recording:
    """The header of the recording in `content`, by libsndfile.

    Raises:
        InputError: it is none, it holds no sample, or its header says more than there is.
        SetupError: soundfile is not installed.
    """
    library = needed("soundfile")
    try:
        with library.SoundFile(io.BytesIO(content)) as file:
            frames, rate, channels, form = file.frames, file.samplerate, file.channels, file.format
            file.seek(max(0, frames - 1))
            last = len(file.read(1))
    except (library.LibsndfileError, RuntimeError, OSError, ValueError) as error:
        reason = str(error).rpartition(": ")[2]  # before it stands the name of an object
        raise InputError(f"is no recording that is read here ({reason})") from None
    if form in ("WAV", "WAVEX"):  # of which libsndfile takes what is there for all
        try:
            chunks(content)
        except InputError as error:
            raise InputError(str(error).removeprefix("it ")) from None
    if frames < 1 or not last:
        raise InputError("holds no sound, or less than its header says")
    return Recording(str(form), int(rate), int(channels), frames / rate)
