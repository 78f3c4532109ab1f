"""`penjing compress RECIPE`: which pipeline a recipe is for."""

from __future__ import annotations

from pathlib import Path

from penjing.core.config import read_recipe
from penjing.core.progress import Progress


def compress_recipe(recipe: Path, overrides: list[str], *, out: Path | None, force: bool, progress: Progress) -> Path:
    """Run a recipe: one with `[[steps]]` step by step (`flow.run`), any other into an INT8 artifact (`pipeline`).

    Raises:
        PenjingError: as these say.
    """
    if "steps" in read_recipe(recipe, overrides):
        from penjing.compress.flow.run import compress_steps

        return compress_steps(recipe, overrides, out=out, force=force, progress=progress)
    from penjing.compress.pipeline import compress

    return compress(recipe, overrides, out=out, force=force, progress=progress)
