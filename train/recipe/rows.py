"""What sections say that name rows of a user's: conversations, pairs or prompts."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from penjing.core.config import Config


class WrittenConfig(Config):
    """How rows are written in the tokens of the checkpoint that the run begins with, and which are held out."""

    template: Path | None = Field(
        default=None,
        description="A file with a chat template (Jinja) in place of the checkpoint's; it is exported too.",
    )
    most_damaged: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        description="Bad rows are left out, counted and told; a larger share of them stops.",
    )
    held_out: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="Share of the rows that is kept for evaluation; equal prompts, or rows about equal images, stay "
        "together.",
    )


class RowConfig(WrittenConfig):
    """Rows of JSON lines or tables."""

    sources: tuple[str, ...] = Field(
        min_length=1,
        description="Files .jsonl or .parquet, and folders of them; or 'builtin:sums', 512 small sums, each with a "
        "wrong answer near the right one, 'builtin:sums-compared', with answers of four other sums in its place, and "
        "'builtin:large-sums', of numbers of three digits.",
    )
