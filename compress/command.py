"""`penjing compress RECIPE`: which pipeline a recipe is for."""

from __future__ import annotations

from pathlib import Path

from penjing.core.config import read_recipe
from penjing.core.family import family_of
from penjing.core.progress import Progress


def compress_recipe(recipe: Path, overrides: list[str], *, out: Path | None, force: bool, progress: Progress) -> Path:
    """Run a recipe: one with `[[steps]]` step by step (`flow.run`), any other into an INT8 artifact: of a text
    encoder (`encoder.run`) or of a decoder (`pipeline`).

    Raises:
        PenjingError: as these say.
    """
    values = read_recipe(recipe, overrides)
    if "steps" in values:
        from penjing.compress.run import compress_steps

        return compress_steps(recipe, overrides, out=out, force=force, progress=progress)
    model = values.get("model")
    if isinstance(model, str) and (Path(model) / "config.json").is_file() and family_of(Path(model)) == "encoder":
        from penjing.compress.steps.encoder_run import compress_encoder

        return compress_encoder(recipe, overrides, out=out, force=force, progress=progress)
    from penjing.compress.decoder.pipeline import compress

    return compress(recipe, overrides, out=out, force=force, progress=progress)
