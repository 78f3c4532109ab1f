"""Two files of the folder of state by which a served decoder hears which adapters it shall have, and says which it has.

The first is written by commands and read by the model's process, the second the other way round. Both belong to the
server's user alone; no port is opened for them.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from penjing.core.config import Config
from penjing.core.files import atomic_write_text
from penjing.serve.engine.config import AdapterName

SAYS = ".adapted.json"


class AdapterEntry(Config):
    """One adapter. Who asks for it again, because its folder has changed, gives it another `id`."""

    folder: Annotated[Path, AfterValidator(Path.absolute)] = Field(description="In PEFT's format.")
    id: str = Field(description="Of this wish.")


class WantedAdapters(Config):
    """All that a decoder shall have."""

    id: str = Field(description="Of this list.")
    adapters: dict[AdapterName, AdapterEntry] = Field(default_factory=dict, description="By their names.")


class ServedAdapters(WantedAdapters):
    """All that it has. `id` is that of the last list that it has read."""

    refused: dict[str, str] = Field(
        default_factory=dict, description="Why a name of that list is not, or not as asked."
    )


Listed = TypeVar("Listed", bound=WantedAdapters)


def said_path(wanted: Path) -> Path:
    """The second file beside the first."""
    return wanted.with_name(wanted.name.partition(".")[0] + SAYS)


def read_list(path: Path, kind: type[Listed]) -> Listed | None:
    """What a file says; None where it is not there or not whole."""
    with suppress(OSError, ValidationError, UnicodeDecodeError):
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    return None


def write_list(path: Path, content: WantedAdapters) -> None:
    """Write a file.

    Raises:
        SetupError: the disk is full.
    """
    atomic_write_text(path, content.model_dump_json())


def stamp_of(path: Path) -> tuple[int, ...]:
    """Another one whenever the file has changed; empty where there is none."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino
