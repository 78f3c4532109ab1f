"""`penjing compress quantize | verify` and `penjing export`: flags here, the work in penjing.compress."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from penjing.core.cli_shared import Force, Json, write_json

Artifact = Annotated[Path, typer.Argument(help="An artifact folder.", show_default=False)]
Target = Literal["onnxruntime-cpu", "onnxruntime-avx2", "tensorrt"]


def add_commands(app: typer.Typer, compress_app: typer.Typer) -> None:
    """Put these commands where users look for them."""
    app.command("export")(export)
    compress_app.command("verify")(verify)
    compress_app.command("quantize")(quantize)


def quantize(
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint of an image classifier.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The artifact folder to make.", show_default=False)],
    target: Annotated[Target, typer.Option(help="The engine that will run it.")] = "onnxruntime-cpu",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as observer=entropy or calibrate.images=512."),
    ] = None,
    force: Force = False,
) -> None:
    """Turn a classifier into an INT8 artifact without training: calibrated on training images, gated by parity.

    Example: `penjing compress quantize build/resnet-fashion build/resnet-fashion-int8 --set observer=mse`
    """
    from penjing.compress.quant.command import quantize_to_folder
    from penjing.core.progress import progress_bar

    with progress_bar() as progress:
        quantize_to_folder(checkpoint, out, target, overrides or [], force=force, progress=progress)


def verify(artifact: Artifact, json_file: Json = None) -> None:
    """Check an artifact's hashes, and run the parity gate again on this machine.

    Example: `penjing compress verify build/resnet-fashion-int8`
    """
    from penjing.compress.verify import print_verification, verify_artifact
    from penjing.core.progress import progress_bar

    with progress_bar() as progress:
        result: dict[str, Any] = verify_artifact(artifact, progress)
    print_verification(result)
    write_json(result, json_file)


def export(
    artifact: Artifact,
    out: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)],
    to: Annotated[Literal["onnx", "gguf"], typer.Option(help="onnx: of a classifier; gguf: Q8_0 of a decoder.")],
    force: Force = False,
) -> None:
    """Write an artifact in the form that another engine reads; it is checked first.

    Examples:

    - `penjing export build/resnet-fashion-int8 resnet.onnx --to onnx`
    - `penjing export build/smollm2-int8 smollm2.gguf --to gguf` for llama.cpp
    """
    from penjing.compress.export.run import export_artifact
    from penjing.core.progress import progress_bar

    with progress_bar() as progress:
        export_artifact(artifact, to, out, force=force, progress=progress)
        progress.note(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")
