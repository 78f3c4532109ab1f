"""`penjing compress …`, `penjing export` and `penjing report`: flags here, the work in the stage's folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from penjing.core.cli_options import (
    Force,
    Json,
    Overrides,
    RecipeOrCommand,
    model_folder,
    refuse_early,
    stage_app,
    write_json,
)
from penjing.core.errors import ConfigError, InputError

app = stage_app()
compress_app = typer.Typer(
    cls=RecipeOrCommand,
    help="Compress a checkpoint: `penjing compress RECIPE` (short for `penjing compress run RECIPE`), or look at one.",
    no_args_is_help=True,
)
app.add_typer(compress_app, name="compress")

Artifact = Annotated[Path, model_folder("An artifact folder.")]
Checkpoint = Annotated[Path, model_folder("A checkpoint folder.")]
Target = Literal["onnxruntime-cpu", "onnxruntime-avx2", "tensorrt"]


@compress_app.command("verify")
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
        from penjing.core.cli import ask_server

        found = ask_server(artifact, server)
        result["differences"] += found.pop("differences")
        result |= found
    print_verification(result)
    write_json(result, json_file)


@compress_app.command("quantize")
def quantize(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Argument(help="The artifact folder to make.", show_default=False)],
    target: Annotated[
        Target | None, typer.Option(help="The engine that will run it, of a classifier or a text encoder.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as observer=entropy or data.images=512."),
    ] = None,
    force: Force = False,
) -> None:
    """Turn a checkpoint into an INT8 artifact: calibrated, gated by parity, with a report.

    The same as a recipe with one step, `kind = "quantize"`; the recipe lies beside what is made.

    Examples:

    - `penjing compress quantize build/resnet-fashion build/resnet-fashion-int8 --set observer=mse`
    - `penjing compress quantize build/smollm2 build/smollm2-int8 --set guard.perplexity_ratio=1.02`
    """
    from penjing.compress.run import quantize_to_folder
    from penjing.core.progress import progress_bar

    with progress_bar() as progress:
        quantize_to_folder(checkpoint, out, target, overrides or [], force=force, progress=progress)


@compress_app.command("run")
def compress(
    recipe: Annotated[
        Path, typer.Argument(help="A TOML recipe, or a name of `penjing recipe list`.", show_default=False)
    ],
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Write here instead of to the recipe's output.")] = None,
    force: Force = False,
) -> None:
    """Compress a checkpoint as a recipe says: prune and train it step by step, or make it an INT8 artifact.

    What is made carries a report; a run that was killed goes on after its last complete step.

    Examples:

    - `penjing compress recipes/resnet-fashion-pruned.toml --set steps.0.ratio=0.2`
    - `penjing compress recipes/smollm2-int8.toml --set steps.0.lm_head=keep`
    """
    from penjing.compress.old_grammar import OLDER

    refuse_early(recipe, overrides, "compress", OLDER)
    from penjing.compress.run import run_recipe
    from penjing.core.progress import progress_bar

    with progress_bar() as progress:
        run_recipe(recipe, overrides or [], out=out, force=force, progress=progress)


@compress_app.command("inspect")
def compress_inspect(
    checkpoint: Checkpoint,
    json_file: Json = None,
) -> None:
    """Show each layer's shape, bytes and multiply-accumulates, and what pruning can take: channels, heads, features.

    Example: `penjing compress inspect build/smollm2 --json inspect.json`
    """
    from penjing.compress.families.base import family_at
    from penjing.compress.prune.inspect import inspect_network, print_inspection
    from penjing.core.progress import progress_bar

    with progress_bar() as progress:
        family = family_at(checkpoint)
        prunes = family.pruner is not None
        result = inspect_network(checkpoint, family.skeleton(checkpoint), progress, groups=prunes)
        if not prunes:
            progress.note(f"{family.said} cannot be pruned, so that no groups are shown")
    print_inspection(result)
    write_json(result, json_file)


@compress_app.command("sensitivity")
def compress_sensitivity(
    checkpoint: Checkpoint,
    data: Annotated[Literal["calibration", "held-out"], typer.Option(help="What is measured on.")] = "calibration",
    ratios: Annotated[str, typer.Option(help="Shares of a group's units to remove.")] = "0.1,0.3,0.5",
    method: Annotated[Literal["l1", "l2", "random"], typer.Option(help="Which units go first.")] = "l1",
    source: Annotated[
        str | None, typer.Option(help="Samples of a graph, as data.source of a recipe; its own example if left out.")
    ] = None,
    images: Annotated[int, typer.Option(min=1, help="Images of a classifier's data, or samples of a graph's.")] = 512,
    windows: Annotated[int, typer.Option(min=1, help="Of 256 tokens, of a decoder's data.")] = 8,
    bits: Annotated[bool, typer.Option("--bits", help="Round each layer instead of pruning it.")] = False,
    widths: Annotated[str, typer.Option(help="In bits, with --bits.")] = "8,6,4",
    out: Annotated[
        Path | None, typer.Option(help="The folder to make; CHECKPOINT-sensitivity or -bits if left out.")
    ] = None,
    force: Force = False,
    json_file: Json = None,
) -> None:
    """Prune, or with --bits round, one layer after the other and show what it costs; goes on after a kill.

    Example: `penjing compress sensitivity build/resnet-fashion --ratios 0.2,0.4,0.6`
    """
    from penjing.compress.sensitivity.command import run_sensitivity

    flags = {"data": data, "ratios": ratios, "method": method, "images": images, "windows": windows, "widths": widths}
    flags["source"] = source
    result = run_sensitivity(checkpoint, flags, bits=bits, out=out, force=force)
    write_json(result, json_file)


@compress_app.command("vocabulary")
def compress_vocabulary(
    checkpoint: Annotated[Path, model_folder("The folder of a decoder.")],
    out: Annotated[Path, typer.Argument(help="The checkpoint folder to make.", show_default=False)],
    keep: Annotated[float, typer.Option(min=0, max=1, help="Share of the tokens that stay.")] = 0.85,
    texts: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", help="Your own texts, whose tokens stay first; may be repeated."),
    ] = None,
    scripts: Annotated[
        list[str] | None,
        typer.Option(
            "--script",
            metavar="NAME",
            help="A writing system of your texts, as latin or cjk: tokens of others leave first.",
        ),
    ] = None,
    judge: Annotated[
        list[Path] | None,
        typer.Option("--judge", metavar="FILE", help="A held-out text to judge by as well; may be repeated."),
    ] = None,
    force: Force = False,
    json_file: Json = None,
) -> None:
    """Leave out the tokens of a decoder that are used least, and the rows of its embedding and head.

    What they stood for is spelled by other tokens. Shows what held-out text costs then; nothing is trained. Small
    decoders with large vocabularies lose least. Compress or train the new folder as any other.

    Examples:

    - `penjing compress vocabulary build/gemma3 build/gemma3-small --keep 0.84`
    - `penjing compress vocabulary build/gemma3 build/gemma3-latin --keep 0.6 --script latin`
    - `penjing compress vocabulary build/gemma3 build/gemma3-mine --keep 0.5 --text notes/ --judge letters.txt`
    """
    from penjing.compress.vocabulary.command import make_smaller_vocabulary, print_smaller_vocabulary
    from penjing.core.progress import progress_bar

    with progress_bar() as progress:
        result = make_smaller_vocabulary(
            checkpoint,
            out,
            keep,
            texts=texts or [],
            scripts=scripts or [],
            judge=judge or [],
            force=force,
            progress=progress,
        )
    print_smaller_vocabulary(result)
    write_json(result, json_file)


@compress_app.command("search")
def compress_search(
    recipe: Annotated[Path, typer.Argument(help="A recipe of a search, or a name of one.", show_default=False)],
    overrides: Overrides = None,
    force: Force = False,
    json_file: Json = None,
) -> None:
    """Choose widths of groups and bits of layers together: the best that each cost can buy, as recipes.

    Measures single changes and combinations, fits a sum to them, and finds the combinations that no other beats. The
    output holds search.json, report.html, and for each point of the front a recipe that `penjing compress` takes. Goes
    on after a kill.

    Examples:

    - `penjing compress search recipes/resnet-fashion-search.toml`
    - `penjing compress search recipes/resnet-fashion-search.toml --set cost=bytes --set space.widths=[1.0,0.5]`
    """
    refuse_early(recipe, overrides, "compress-search")
    from penjing.compress.search.search import run_joint_search
    from penjing.core.progress import progress_bar

    with progress_bar() as progress:
        result = run_joint_search(recipe, overrides, force=force, progress=progress)
    if json_file is not None:
        write_json(result, json_file)


@app.command("graph")
def graph(
    checkpoint: Annotated[Path, model_folder("The folder of a graph.")],
    out: Annotated[Path | None, typer.Option(help="Write the graph to this `.txt`, `.svg` or `.json`.")] = None,
    target: Annotated[Target, typer.Option(help="Whose rules say what becomes INT8.")] = "onnxruntime-cpu",
    json_file: Json = None,
) -> None:
    """Show a network: its operators, shapes, costs and bytes, and what pruning and INT8 can take.

    Example: `penjing graph build/net --out graph.svg`
    """
    from penjing.compress.prospects import print_prospects, prospects
    from penjing.core.checkpoint.graph_look import show
    from penjing.core.progress import progress_bar

    network, result = show(checkpoint, out)
    with progress_bar() as progress:
        result |= (found := prospects(checkpoint, network, target, progress))
    print_prospects(found)
    if json_file is not None:
        write_json(result, json_file)


@app.command("report")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `penjing compress` made.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Also write a page with Pareto plots to this file.")] = None,
    json_file: Json = None,
) -> None:
    """Compare compression runs: sizes, quality, speed and what each step cost, stage by stage.

    Example: `penjing report build/resnet-fashion-pruned build/resnet-fashion-mild --out runs.html`
    """
    if missing := [run for run in runs if not run.exists()]:
        raise InputError(f"{missing[0]} does not exist; name a folder that 'penjing compress' made")
    from penjing.compress.report.compare import report_runs

    write_json(report_runs(runs, out), json_file)


@app.command("export")
def export(
    artifact: Artifact,
    out: Annotated[Path, typer.Argument(help="The file or folder to write.", show_default=False)],
    to: Annotated[
        Literal[
            "onnx",
            "tensorrt",
            "compressed-tensors",
            "compressed-tensors-weights",
            "transformers",
            "gguf",
            "model-repository",
        ],
        typer.Option(
            help="onnx: of a classifier or a graph a file, of a decoder a folder; tensorrt: engine of a classifier; "
            "compressed-tensors: of a decoder, for vLLM and transformers; compressed-tensors-weights: the same with "
            "activations in floating point (W4A16, W8A16); transformers: a decoder in floating point, whatever its "
            "family, for transformers, vLLM and those who train it on; gguf: Q8_0, Q4_0, Q4_1 or Q4_K of a decoder; "
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
    name: Annotated[
        str | None,
        typer.Option(help="Of a model-repository: what clients call the model; by default what it is, such as graph."),
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
    - `penjing export build/resnet-fashion-int8 resnet.onnx --to onnx --target tensorrt # for trtexec`
    - `penjing export build/net net.onnx --to onnx # any network, also in floating point`
    - `penjing export build/smollm2-int8 build/smollm2-onnx --to onnx # for ONNX Runtime, with keys and values`
    - `penjing export build/smollm2-int8 build/smollm2-vllm --to compressed-tensors # for vLLM, transformers`
    - `penjing export build/smollm2-int8 build/smollm2-w8a16 --to compressed-tensors-weights`
    - `penjing export build/smollm2-int8 smollm2.gguf --to gguf # for llama.cpp`
    - `penjing export build/gemma3 build/gemma3-hf --to transformers # in floating point, as its family again`
    - `penjing export build/resnet-fashion-int8 models --to model-repository --name shoes --set max_batch_size=128`
    - `tritonserver --model-repository=models # serves what the line before wrote`
    """
    if to == "model-repository":
        if target:
            raise ConfigError("--target is for --to onnx; a model repository takes the artifact's")
        from penjing.core.cli import write_repository

        return write_repository(artifact, out, form, overrides, name=name, force=force)
    if form or overrides or name is not None:
        raise ConfigError(f"--form, --name and --set are for --to model-repository; leave them out with --to {to}")
    from penjing.compress.exports import export_artifact, print_export
    from penjing.core.progress import progress_bar

    with progress_bar() as progress:
        record = export_artifact(artifact, to, out, target=target, force=force, progress=progress)
    print_export(out, record)
