"""Options of commands that make an engine in this process, and the settings that they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from penjing.serve.engine.config import EngineConfig

KvDtype = Annotated[
    Literal["auto", "float32", "float16", "bfloat16", "int8"],
    typer.Option(
        help="How the KV cache is kept: int8 holds nearly twice the tokens of 16 bits, four times those of float32."
    ),
]
Speculate = Annotated[
    Literal["off", "forced", "lookup"],
    typer.Option(help="Guess tokens that stood in prompt or answer before, and check several at once; none changes."),
]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="Where the model runs; `auto`: on CUDA where there is a GPU.")
]
ADAPTER = "given"
"""What the engine calls the one adapter of a command; users name its folder."""
AdapterOf = Annotated[
    Path | None,
    typer.Option("--adapter", help="Folder of a LoRA adapter in PEFT's format: answer with it beside the model."),
]
Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        help="A JPEG or PNG for a model that sees, WAV for one that hears; may be repeated.",
    ),
]
EngineSet = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the engine: attention=window+blocks, …"),
]


def engine_config(
    kv_dtype: str, device: str, speculate: str, overrides: list[str] | None, adapter: Path | None = None
) -> EngineConfig:
    """The settings of an engine; what `--set` names counts more than an option of its own. `adapter` is the folder of
    the adapter `ADAPTER`.

    Raises:
        ConfigError: an unknown key, or a value out of range.
    """
    from penjing.core.config import apply_override, parse_config
    from penjing.serve.engine.config import EngineConfig

    values: dict[str, object] = {"kv_dtype": kv_dtype, "device": device, "speculate": speculate}
    if adapter is not None:
        values["adapters"] = {ADAPTER: adapter}
    for override in overrides or []:
        apply_override(values, override)
    return parse_config(EngineConfig, values, "--set")
