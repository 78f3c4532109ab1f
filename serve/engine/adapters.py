"""The adapters of an engine: which there are, and where each lies in the runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penjing.core.errors import RequestError


@dataclass(frozen=True)
class LoadedAdapter:
    """One adapter. Its `slot` is the runner's; `root` begins the digests of its keys and values."""

    name: str
    slot: int

    @property
    def root(self) -> bytes:
        """Another one for each adapter."""
        return b"adapter %d" % self.slot


class Adapters:
    """Those that requests may name; any thread may ask."""

    def __init__(self, slots: Mapping[str, int]) -> None:
        self._loaded = {name: LoadedAdapter(name, slot) for name, slot in slots.items()}

    @property
    def names(self) -> list[str]:
        """Of all, in the order given."""
        return list(self._loaded)

    def named(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of that name; None for none.

        Raises:
            RequestError: there is no such adapter; lists those that there are.
        """
        if name is None:
            return None
        if name not in self._loaded:
            known = f"there are {', '.join(self._loaded)}" if self._loaded else "this model has none"
            raise RequestError(f"sampling parameter lora_name: there is no adapter {name!r:.80}; {known}")
        return self._loaded[name]
