"""The adapters of an engine: which there are, and where each lies in the runner. They come and go while answers run."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from penjing.core.errors import RequestError

if TYPE_CHECKING:
    from penjing.kernels.low_rank import Pairs


class AdapterRunner(Protocol):
    """What computes them."""

    adapter_slots: dict[str, int]
    """Of each adapter that it began with, by its name."""

    def add_adapter(self, layers: Pairs) -> int:
        """Take one in; its slot. Raises ConfigError where the model takes none."""
        ...

    def remove_adapter(self, slot: int) -> None:
        """Free a slot that no step uses any more."""
        ...


@dataclass(frozen=True)
class LoadedAdapter:
    """One adapter. Its `slot` is the runner's; `serial` is no other one's, also when name and slot are used again."""

    name: str
    slot: int
    serial: int

    @property
    def root(self) -> bytes:
        """Begins the digests of its keys and values: another one for each adapter that there ever was."""
        return b"adapter %d" % self.serial


class Adapters:
    """Those that requests may name. Any thread may ask for one; the engine's thread alone changes them."""

    def __init__(self, runner: AdapterRunner) -> None:
        self._runner = runner
        self._serial = 0
        self._loaded = {name: self._new(name, slot) for name, slot in runner.adapter_slots.items()}
        self._held: dict[str, LoadedAdapter] = {}  # by request
        self._leaving: list[tuple[weakref.ref[LoadedAdapter], int]] = []

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
        loaded = self._loaded
        if (found := loaded.get(name)) is None:
            known = f"there are {', '.join(loaded)}" if loaded else "this model has none"
            raise RequestError(f"sampling parameter lora_name: there is no adapter {name!r:.80}; {known}")
        return found

    def add(self, name: str, layers: Pairs) -> None:
        """From now on requests find it. One of that name before goes on with the answers that it has begun.

        Raises:
            ConfigError: the model takes none.
        """
        slot = self._runner.add_adapter(layers)
        self.remove(name)
        self._loaded = self._loaded | {name: self._new(name, slot)}

    def remove(self, name: str) -> None:
        """Requests find it no more. Its slot is free when the last one that had found it has ended."""
        if (gone := self._loaded.get(name)) is not None:
            self._loaded = {other: loaded for other, loaded in self._loaded.items() if other != name}
            self._leaving.append((weakref.ref(gone), gone.slot))
            del gone
        self._free()

    def hold(self, request_id: str, adapter: LoadedAdapter | None) -> dict[str, Any]:
        """Keep it for a request until `release`; what the request's sequences must know of it."""
        if adapter is None:
            return {}
        self._held[request_id] = adapter
        return {"adapter": adapter.slot, "root": adapter.root}

    def release(self, request_id: str) -> None:
        """The request has ended."""
        if self._held.pop(request_id, None) is not None:
            self._free()

    def _new(self, name: str, slot: int) -> LoadedAdapter:
        self._serial += 1
        return LoadedAdapter(name, slot, self._serial)

    def _free(self) -> None:
        """Free the slots of those that are gone and that nobody has: no request that runs, and none that is prepared
        on another thread."""
        for gone, slot in list(self._leaving):
            if gone() is None:
                self._leaving.remove((gone, slot))
                self._runner.remove_adapter(slot)
