"""`penjing import` of text encoders: a sentence-transformers or BERT folder → a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penjing.core.checkpoint.encoder import load_encoder, save_encoder
from penjing.core.errors import InputError
from penjing.core.files import publish_folder
from penjing.core.manifest import read_json_object
from penjing.core.progress import Progress
from penjing.core.text.text_tokenizer import TextTokenizer

_KINDS = ("Transformer", "Pooling", "Normalize")


def import_encoder(folder: Path, out: Path, created_by: dict[str, Any], *, force: bool, progress: Progress) -> None:
    """Make the checkpoint folder `out` of the encoder in `folder`; it appears only when it is complete.

    Raises:
        InputError: damaged, or embeddings are made in another way than by averaging and scaling to length 1.
    """
    check_pooling(folder)
    progress.start(f"importing {folder.name}", 2)
    model = load_encoder(folder)
    progress.advance()
    tokenizer = TextTokenizer(folder, model.config)
    with publish_folder(out, replace=force) as partial:
        save_encoder(partial, model, folder, tokenizer.max_tokens, created_by)
    progress.advance()
    size = sum(parameter.numel() for parameter in model.parameters())
    progress.note(
        f"{out}: a text encoder of {size / 1e6:.1f} million parameters, embeddings of {model.config.hidden_size} "
        f"numbers, texts of up to {tokenizer.max_tokens} tokens, license {created_by['license']}"
    )


def check_pooling(folder: Path) -> None:
    """Refuse a sentence-transformers folder that makes embeddings otherwise; a plain BERT folder says nothing.

    Raises:
        InputError: other modules than Transformer, Pooling (mean) and Normalize.
    """
    if not (folder / "modules.json").exists():
        return
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        kinds = tuple(str(module["type"]).rpartition(".")[2] for module in modules)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{folder / 'modules.json'} is damaged ({error}); get the model again") from None
    if kinds != _KINDS:
        raise InputError(
            f"{folder} makes embeddings by {' → '.join(kinds)}; only {' → '.join(_KINDS)} is computed here"
        )
    path = folder / "1_Pooling" / "config.json"
    modes = sorted(key for key, on in read_json_object(path).items() if key.startswith("pooling_mode") and on)
    if modes != ["pooling_mode_mean_tokens"]:
        raise InputError(
            f"{path}: {', '.join(modes) or 'no mode'} is set; only pooling_mode_mean_tokens is computed here"
        )
