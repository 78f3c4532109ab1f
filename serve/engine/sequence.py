"""The scheduler's vocabulary: a sequence of tokens on its way through the model, and the batch of one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from penjing.serve.sight.images import Placed

NO_ADAPTER = -1


class Sequence:
    """The tokens of one answer (prompt first) and how far the model is with them.

    `num_computed_tokens` counts the tokens whose keys and values are in the KV cache; the scheduler lets it catch up
    with `num_tokens`, whether the missing ones are a prompt, a preempted answer or the token sampled last.
    `block_table[i]` is the KV block of tokens `i·block_size …`; 0 stands for a block that has left every attention
    window.
    """

    __slots__ = (
        "adapter",
        "block_hashes",
        "block_table",
        "draft",
        "fork_of",
        "forks",
        "images",
        "index",
        "key",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_windowed_blocks",
        "priority",
        "request_id",
        "root",
        "score_from",
        "table_version",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
        index: int = 0,
        fork_of: Sequence | None = None,
        key: str = "",
        priority: int = 0,
        adapter: int = NO_ADAPTER,
        root: bytes = b"",
        images: tuple[Placed, ...] = (),
    ) -> None:
        assert prompt_ids, "a sequence starts with at least one token"
        self.request_id = request_id
        self.index = index
        self.key = key  # on whose behalf it runs
        self.priority = priority  # lower numbers first
        self.adapter = adapter  # slot of its adapter in the runner
        self.root = root  # beginning of its chain of digests: who has another adapter has other keys and values
        self.images = images  # in the order of their places
        self.token_ids = list(prompt_ids)
        self.num_prompt_tokens = len(prompt_ids)
        self.draft: list[int] = []  # guessed tokens behind the last one that this step checks
        self.score_from = len(prompt_ids)  # first prompt token whose probability is still wanted; there: none
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # found in the prefix cache when first admitted
        self.block_table: list[int] = []
        self.table_version = 0  # changes when the table changes otherwise than by appending
        self.block_hashes: list[bytes] = []  # chained digests of the first full blocks
        self.num_published_blocks = 0  # leading blocks offered to the prefix cache
        self.num_windowed_blocks = 0  # leading blocks given up because they left the window
        self.fork_of = fork_of  # the sequence whose prompt blocks this one shares (n > 1)
        self.forks: list[Sequence] = []  # wait until this sequence's prompt is computed

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def scores_prompt(self) -> bool:
        """Whether probabilities of the prompt's own tokens are still wanted."""
        return self.score_from < self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, index={self.index}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens}, blocks={len(self.block_table)})"
        )


class SequenceChunk(NamedTuple):
    """`num_tokens` tokens of `sequence` to compute in a step, from its `num_computed_tokens` on, then its
    `draft`."""

    sequence: Sequence
    num_tokens: int


class Batch(NamedTuple):
    """What one step computes; `num_tokens` over all chunks and drafts."""

    chunks: list[SequenceChunk]
    num_tokens: int
