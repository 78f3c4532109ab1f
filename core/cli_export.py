"""`penjing compress quantize | verify` and `penjing export`: flags here, the work in penjing.compress."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from penjing.core.cli_shared import Force, Json, write_json
from penjing.core.errors import ConfigError

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
    from penjing.compress.steps.quantize_command import quantize_to_folder
    from penjing.core.progress import progress_bar

    with progress_bar() as progress:
        quantize_to_folder(checkpoint, out, target, overrides or [], force=force, progress=progress)


def verify(
    artifact: Artifact,
    served: Annotated[
        bool, typer.Option("--served", help="Also through a Triton server, started for it; the answers are recorded.")
    ] = False,
    server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Also through this running server (gRPC).")
    ] = None,
    json_file: Json = None,
) -> None:
    """Check an artifact's hashes, and run the parity gate again on this machine.

    Examples:

    - `penjing compress verify build/resnet-fashion-int8`
    - `penjing compress verify build/resnet-fashion-int8 --served`
    """
    from penjing.compress.verify import print_verification, verify_artifact
    from penjing.core.progress import progress_bar

    with progress_bar() as progress:
        result: dict[str, Any] = verify_artifact(artifact, progress)
    if served or server:
        from penjing.serve.parity import served_parity
        from penjing.serve.supervisor.temporary import temporary_server

        with nullcontext(server) if server else temporary_server(artifact) as address:
            found = served_parity(artifact, address)
        result["differences"] += found.pop("differences")
        result |= found
    print_verification(result)
    write_json(result, json_file)


def export(
    artifact: Artifact,
    out: Annotated[Path, typer.Argument(help="The file or folder to write.", show_default=False)],
    to: Annotated[
        Literal["onnx", "tensorrt", "compressed-tensors", "gguf", "model-repository"],
        typer.Option(
            help="onnx: of a classifier a file, of a decoder a folder; tensorrt: engine of a classifier; "
            "compressed-tensors: of a decoder, for vLLM and transformers; gguf: Q8_0 of a decoder; "
            "model-repository: a folder for `tritonserver`."
        ),
    ],
    target: Annotated[
        Target | None, typer.Option(help="The engine that an ONNX file is for; by default the artifact's.")
    ] = None,
    form: Annotated[
        Literal["onnxruntime", "python"] | None,
        typer.Option(
            help="Of a model-repository. onnxruntime: that backend, no penjing on the server (classifiers' default); "
            "python: penjing in the Python backend."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Of a model-repository: a setting of `penjing serve --set`."),
    ] = None,
    force: Force = False,
) -> None:
    """Write an artifact in the form that another engine reads; it is checked there first.

    Examples:

    - `penjing export build/resnet-fashion-int8 resnet.onnx --to onnx`
    - `penjing export build/resnet-fashion-int8 resnet.onnx --to onnx --target tensorrt` for trtexec
    - `penjing export build/smollm2-int8 build/smollm2-onnx --to onnx` for ONNX Runtime, with keys and values
    - `penjing export build/smollm2-int8 build/smollm2-vllm --to compressed-tensors` for vLLM and transformers
    - `penjing export build/smollm2-int8 smollm2.gguf --to gguf` for llama.cpp
    - `penjing export build/resnet-fashion-int8 models --to model-repository --set max_batch_size=128`, then
      `tritonserver --model-repository=models`
    """
    from penjing.core.progress import progress_bar

    if to == "model-repository":
        if target:
            raise ConfigError("--target is for --to onnx; a model repository takes the artifact's")
        from penjing.serve.supervisor.export import export_repository

        with progress_bar() as progress:
            made = export_repository(artifact, out, form, overrides=overrides, force=force, progress=progress)
            progress.note(f"wrote {made}; serve it with 'tritonserver --model-repository={out}'")
        return
    if form or overrides:
        raise ConfigError(f"--form and --set are for --to model-repository; leave them out with --to {to}")
    from penjing.compress.export.run import export_artifact, print_export

    with progress_bar() as progress:
        record = export_artifact(artifact, to, out, target=target, force=force, progress=progress)
    print_export(out, record)
