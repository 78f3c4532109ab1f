"""`penjing import` of decoders that see: an Idefics3 or SmolVLM folder → a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.core.checkpoint.vision_language import load_vision_language, save_vision_language
from penjing.core.errors import InputError
from penjing.core.files import publish_folder
from penjing.core.progress import Progress
from penjing.core.text.tokenizer import Tokenizer


def import_vision_language(
    folder: Path, out: Path, created_by: dict[str, Any], *, force: bool, progress: Progress
) -> None:
    """Make the checkpoint folder `out` of the model in `folder`; it appears only when it is complete.

    Raises:
        InputError: damaged, of another computation, or with a tokenizer that does not belong to it.
    """
    progress.start(f"importing {folder.name}", 2)
    model = load_vision_language(folder)
    progress.advance()
    config = model.config
    tokens = Tokenizer.from_folder(folder).vocab_size
    if tokens > config.decoder.vocab_size:
        raise InputError(
            f"{folder}: its tokenizer has {tokens} tokens, its embedding only {config.decoder.vocab_size} rows; the "
            "files do not belong together"
        )
    with publish_folder(out, replace=force) as partial:
        save_vision_language(partial, config, model, folder, created_by)
    progress.advance()
    size = sum(parameter.numel() for parameter in model.parameters())
    progress.note(
        f"{out}: a decoder that sees, of {size / 1e6:.1f} million parameters, {config.rows} tokens an image of "
        f"{config.vision.image_size} × {config.vision.image_size} pixels, license {created_by['license']}"
    )
