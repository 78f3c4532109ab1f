"""`penjing import` of two towers: a CLIP or SigLIP folder → a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.core.checkpoint.towers import load_towers, save_towers
from penjing.core.checkpoint.towers_config import towers_config
from penjing.core.errors import InputError
from penjing.core.files import publish_folder
from penjing.core.manifest import read_json_object
from penjing.core.progress import Progress
from penjing.core.text.text_tokenizer import TOKENIZER, TextTokenizer
from penjing.core.text.tokenizer import read_backend
from penjing.core.vision.paired_config import TextTransformerConfig
from penjing.core.vision.towers_config import TowersConfig

_WORD = "a"


def import_towers(folder: Path, out: Path, created_by: dict[str, Any], *, force: bool, progress: Progress) -> None:
    """Make the checkpoint folder `out` of the towers in `folder`; it appears only when it is complete.

    Raises:
        InputError: damaged, of another computation, or with a tokenizer that does not belong to it.
    """
    config = towers_config(folder)
    if not (folder / TOKENIZER).is_file():
        raise InputError(
            f"{folder} has no {TOKENIZER}; get it again with that file, which the pages of CLIP and SigLIP have, or "
            "make one with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    tokenizer = TextTokenizer(folder, config.text)
    config = _filled(folder, config, tokenizer)
    progress.start(f"importing {folder.name}", 2)
    model = load_towers(folder)
    progress.advance()
    with publish_folder(out, replace=force) as partial:
        save_towers(partial, model, config, folder, tokenizer.max_tokens, created_by)
    progress.advance()
    size = sum(parameter.numel() for parameter in model.parameters())
    height, width = config.image_size
    progress.note(
        f"{out}: two towers of {size / 1e6:.1f} million parameters, vectors of {config.dimension} numbers, images of "
        f"{height} × {width} pixels, texts of up to {tokenizer.max_tokens} tokens, license {created_by['license']}"
    )


def _filled(folder: Path, config: TowersConfig, tokenizer: TextTokenizer) -> TowersConfig:
    """`config` with the token that the tokenizer itself fills texts up with, and a check of the one that ends them."""
    text = config.text
    if not isinstance(text, TextTransformerConfig):
        return config
    row = tokenizer.rows([_WORD])[0]
    if text.pooling == "end":
        if text.end_token_id is not None and text.end_token_id not in row:
            raise InputError(
                f"{folder / TOKENIZER} ends no text with the token {text.end_token_id}, which stands for a text in "
                "this model; the files do not belong together"
            )
        return config
    path = folder / "tokenizer_config.json"
    token = read_json_object(path).get("pad_token") if path.exists() else None
    token = token.get("content") if isinstance(token, dict) else token
    found = read_backend(folder / TOKENIZER).token_to_id(token) if isinstance(token, str) else None
    if found is None:
        return config
    return config.model_copy(update={"text": text.model_copy(update={"pad_token_id": found})})
