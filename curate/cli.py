"""`penjing curate RECIPE | inspect | why | media | ask | agree`: flags here, the work elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from penjing.core.cli_options import Force, Json, Overrides, RecipeOrCommand, stage_app, write_json

app = stage_app()
curate_app = typer.Typer(
    cls=RecipeOrCommand,
    help="Curate text: `penjing curate RECIPE` (short for `penjing curate run RECIPE`) makes a corpus to train on.",
    no_args_is_help=True,
)
app.add_typer(curate_app, name="curate")
Recipe = Annotated[Path, typer.Argument(help="A TOML recipe, or a name of `penjing recipe list`.", show_default=False)]


@curate_app.command("run")
def run(recipe: Recipe, overrides: Overrides = None, force: Force = False) -> None:
    """Make the corpus of a recipe: documents cleaned, told apart by language, filtered, each kept once.

    A run that was ended goes on with what is left. The corpus holds `shards/`, which `data.sources` of a training
    recipe takes, and `report.html`.

    Examples:

    - `penjing curate recipes/corpus-docs.toml`
    - `penjing train recipes/decoder-tiny.toml --set 'data.sources=["build/corpus-docs"]'`
    """
    from penjing.core.progress import progress_bar
    from penjing.curate.run import curate

    with progress_bar() as progress:
        curate(recipe, overrides, force=force, progress=progress)


@curate_app.command("inspect")
def inspect(
    source: Annotated[Path, typer.Argument(help="A file or a folder of texts.", show_default=False)],
    limit_mb: Annotated[float, typer.Option(help="Read so many megabytes of text at most.")] = 64,
    json_file: Json = None,
) -> None:
    """Look at texts before a recipe is written: forms, sizes, languages, damage and duplicates.

    Example: `penjing curate inspect notes/`
    """
    from penjing.core.progress import print_table, progress_bar
    from penjing.curate.inspect import inspect_source

    with progress_bar() as progress:
        result = inspect_source(source, limit_mb, progress)
    print_table(result)
    write_json(result, json_file)


@curate_app.command("why")
def why(
    document: Annotated[str, typer.Argument(help="The id of a document, or its end.", show_default=False)],
    corpus: Annotated[Path, typer.Argument(help="The corpus folder.", show_default=False)],
) -> None:
    """Say what happened to a document: kept and how it was changed, or which rule of which step dropped it.

    Example: `penjing curate why printf.3.gz build/corpus-docs`
    """
    from penjing.core.progress import printable
    from penjing.curate.why import explain

    print("\n".join(map(printable, explain(document, corpus))))


@curate_app.command("media")
def media(
    source: Annotated[Path, typer.Argument(help="A folder of images and recordings.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="The folder that is written.", show_default=False)],
    licence: Annotated[str, typer.Option(help="Noted with each record.")] = "",
    distance: Annotated[
        int, typer.Option(min=-1, max=63, help="Images whose perceptual hashes differ in so many of 64 bits are one.")
    ] = 4,
    max_pixels: Annotated[int, typer.Option(min=1, help="A larger image counts as broken.")] = 50_000_000,
    most_damaged: Annotated[float, typer.Option(min=0, max=1, help="Share of the files that may be broken.")] = 0.05,
    towers: Annotated[
        Path | None, typer.Option(help="A checkpoint of two towers, such as an imported CLIP: how well texts fit.")
    ] = None,
    least_alignment: Annotated[
        float | None, typer.Option(min=-1, max=1, help="Drop images whose text fits less, by --towers.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that read.")] = 1,
    force: Force = False,
    json_file: Json = None,
) -> None:
    """Make tars to train on out of a folder of images and recordings with their texts.

    Images are turned upright and lose what a camera wrote into them, such as its place; of those that look alike the
    first is kept. Of recordings the header is read. What is broken is listed in quarantine.jsonl with its reason. The
    command given again after it was ended goes on with what is left.

    Examples:

    - `penjing curate media photos/ build/photos --licence CC-BY-4.0`
    - `penjing curate media photos/ build/photos --towers build/clip --least-alignment 0.2`
    - `penjing train recipes/clip-emoji.toml --set 'data.sources=["build/photos/images"]'`
    """
    from penjing.core.progress import print_table, progress_bar
    from penjing.curate.media.run import curate_media

    with progress_bar() as progress:
        report = curate_media(
            source, output, licence=licence, distance=distance, max_pixels=max_pixels, most_damaged=most_damaged,
            towers=towers, least_alignment=least_alignment, workers=workers, force=force, progress=progress,
        )  # fmt: skip
    print_table(report)
    write_json(report, json_file)


@curate_app.command("ask")
def ask(
    corpus: Annotated[Path, typer.Argument(help="The corpus folder.", show_default=False)],
    tasks: Annotated[Path, typer.Argument(help="The file that is written, such as tasks.json.", show_default=False)],
    form: Annotated[Literal["label-studio", "argilla"], typer.Option(help="For which of both.")] = "label-studio",
    documents: Annotated[int, typer.Option(min=1, help="So many at most.")] = 200,
    labels: Annotated[str, typer.Option(help="What people choose from, with commas.")] = "good,bad",
    domain: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Of this domain alone; may be repeated.")
    ] = None,
) -> None:
    """Write documents of a corpus as tasks for people to judge, in Label Studio or Argilla.

    Example: `penjing curate ask build/corpus-docs tasks.json`
    """
    from penjing.core.progress import print_table
    from penjing.curate.annotate.tiers import ask as written

    chosen = tuple(label.strip() for label in labels.split(",") if label.strip())
    print_table(written(corpus, tasks, form, documents, chosen, tuple(domain or ())))


@curate_app.command("agree")
def agree(
    exports: Annotated[list[Path], typer.Argument(help="What Label Studio or Argilla exported.", show_default=False)],
    labels: Annotated[Path, typer.Option(help="Settled labels, for the step `quality`.")] = Path("labels.jsonl"),
    experts: Annotated[Path, typer.Option(help="Tasks that are left to experts.")] = Path("experts.json"),
    least: Annotated[float, typer.Option(min=0, max=1, help="Probability from which a label is settled.")] = 0.8,
    expert_domain: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Documents of this domain are for experts; may be repeated."),
    ] = None,
    form: Annotated[Literal["label-studio", "argilla"], typer.Option(help="Of the experts' tasks.")] = "label-studio",
    json_file: Json = None,
) -> None:
    """Join what several people answered: labels to learn from, and what experts must look at.

    Each judge's errors are estimated together with the labels (Dawid and Skene), so that those who are often right
    count for more.

    Example: `penjing curate agree export.json --labels labels.jsonl`
    """
    from penjing.core.progress import print_table
    from penjing.curate.annotate.tiers import agree as joined

    found = joined(exports, labels, experts, least=least, expert_domains=tuple(expert_domain or ()), form=form)
    print_table(found)
    write_json(found, json_file)
