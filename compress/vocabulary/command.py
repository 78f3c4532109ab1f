"""`penjing compress vocabulary`: a folder in, a folder out, and a table of what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from penjing.compress.measure.evaluate import EvaluateSettings
from penjing.compress.vocabulary.scripts import foreign_tokens
from penjing.compress.vocabulary.smaller import (
    costs,
    count_tokens,
    held_out_texts,
    open_whole,
    tokens_of,
    write_smaller,
)
from penjing.core.checkpoint.decoder import Checkpoint
from penjing.core.errors import ConfigError
from penjing.core.files import check_replaceable, publish_folder
from penjing.core.progress import Progress, error_console
from penjing.core.text.tokenizer import Tokenizer

JUDGED = 4096  # tokens of each text


def make_smaller_vocabulary(
    source: Path,
    out: Path,
    keep: float,
    *,
    texts: Sequence[Path] = (),
    scripts: Sequence[str] = (),
    judge: Sequence[Path] = (),
    settings: EvaluateSettings | None = None,
    force: bool = False,
    progress: Progress,
) -> dict[str, Any]:
    """Write the decoder `source` with a share `keep` of its tokens to `out`, and measure what that costs.

    Args:
        texts: the user's own, whose tokens stay first.
        scripts: writing systems; tokens of others leave first. None named: all alike.
        judge: further held-out texts, which are named by their files.
        settings: how much of each text is judged.

    Returns:
        tokens, tokens_before, parameters_fewer, and of each text its rise of perplexity and how much longer it is.

    Raises:
        ConfigError: no decoder of text, a share that leaves nothing out, or an unknown writing system.
        InputError: a damaged or missing file, a tokenizer of another kind, or too few tokens.
        SetupError: disk full, no permission.
    """
    checkpoint = open_whole(source)
    if settings is None:
        settings = EvaluateSettings(
            prose_tokens=JUDGED, code_tokens=JUDGED, own_tokens=JUDGED, window=_window(checkpoint)
        )
    room = tokens_of(keep, checkpoint.config.vocab_size)
    if source.resolve() == out.resolve():
        raise ConfigError(f"{out} is the checkpoint itself; name another folder")
    check_replaceable(out, force, "penjing.json")
    last = foreign_tokens(Tokenizer.from_folder(source), scripts)
    held_out = held_out_texts(source, _by_name(judge), settings)
    used = count_tokens(source, texts, "--text", progress) if texts else Counter[int]()
    progress.start("tokens that stay", 1)
    with publish_folder(out, replace=force) as partial:
        made = write_smaller(checkpoint, room, used, partial, last)
        progress.advance()
        found = costs(source, partial, held_out, settings, progress)
    return {"output": str(out), **made, "texts": {name: asdict(cost) for name, cost in found.items()}}


def print_smaller_vocabulary(result: Mapping[str, Any]) -> None:
    """The table of `make_smaller_vocabulary`, on standard error."""
    console = error_console()
    console.print(
        f"{result['output']}: {result['tokens']:,} of {result['tokens_before']:,} tokens, "
        f"{result['parameters_fewer'] / 1e6:.1f} million parameters fewer",
        soft_wrap=True,
    )
    table = Table("text", "perplexity", "95 % interval", "tokens", box=None, pad_edge=False)
    for name, values in result["texts"].items():
        rise = values["rise"]
        table.add_row(
            name,
            f"{100 * rise['value']:+.2f} %",
            f"{100 * rise['low']:+.2f} to {100 * rise['high']:+.2f} %",
            f"{100 * values['longer']:+.2f} %",
        )
    console.print(table)
    console.print(
        "Perplexity is counted over the tokens of the whole vocabulary: both read the same text.", soft_wrap=True
    )


def _window(checkpoint: Checkpoint) -> int:
    """Tokens of a window: half of the context at most, since texts become longer."""
    longest = max(16, checkpoint.config.max_position_embeddings // 2)
    return min(512, 1 << (longest.bit_length() - 1))


def _by_name(paths: Sequence[Path]) -> dict[str, Path]:
    named = {path.stem: path for path in paths}
    if len(named) < len(paths) or named.keys() & {"prose", "code"}:
        raise ConfigError("--judge: two texts would have one name (prose and code are taken); rename a file")
    return named
