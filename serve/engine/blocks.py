"""KV-cache blocks: reference counts, a hash-chained prefix cache, and least-recently-used eviction in O(1)."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b

from penjing.serve.engine.sequence import Sequence

NULL_BLOCK = 0  # never written and never given out: it stands in tables for blocks that left the window
ROOT_HASH = b"penjing"


def chain_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """Digest of a block's tokens and, through `parent`, of every token before it.

    128 bits of BLAKE2b: a prompt cannot be made to collide with another user's, as it could with Python's `hash`.
    """
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


def block_hash(sequence: Sequence, index: int, size: int, parent: bytes) -> bytes:
    """Digest of a block of `sequence`, of all before it, and of the images that begin in them."""
    start = index * size
    for image in sequence.images:  # its tokens are those of any other, so its content counts from where it begins
        parent += image.digest if start <= image.start < start + size else b""
    return chain_hash(parent, sequence.token_ids[start : start + size])


class BlockManager:
    """Owns the numbers of the KV blocks; knows nothing of tensors.

    A block is held (reference count > 0), free and blank, or free and cached: its content is complete and can be found
    by the digest of its token chain until the block is needed for something else. Blank blocks go first, then the
    cached one that was released longest ago; a sequence releases its last block first, so that the front of a prefix,
    which more requests share, lives longest.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        assert num_blocks >= 2, "one null block and one usable block at least"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.ref_counts = [0] * num_blocks
        self.ref_counts[NULL_BLOCK] = 1
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.tokens: list[tuple[int, ...]] = [()] * num_blocks  # of published blocks: equality is checked on a hit
        self.by_hash: dict[bytes, int] = {}
        self.free_blank = list(range(num_blocks - 1, NULL_BLOCK, -1))
        self.free_cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self.free_blank) + len(self.free_cached)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks that hold the first tokens of `sequence`; changes nothing but the sequence's memo of digests.

        At most `num_tokens − 1` tokens: the last one is always computed, since its logits are wanted.
        """
        if not self.enable_prefix_caching:
            return []
        size, found = self.block_size, []
        for i in range((sequence.num_tokens - 1) // size):
            block = self.by_hash.get(self._hash_of(sequence, i))
            if block is None or self.tokens[block] != tuple(sequence.token_ids[i * size : (i + 1) * size]):
                break
            found.append(block)
        return found

    def count_free(self, blocks: list[int]) -> int:
        """How many of `blocks` count as free now, and will not once they are adopted."""
        return sum(1 for block in blocks if self.ref_counts[block] == 0)

    def adopt(self, sequence: Sequence, blocks: list[int]) -> None:
        """Start the block table of `sequence` with `blocks`, whose content is computed already; null blocks come first
        and stand for what the window has passed."""
        assert not sequence.block_table, "only a sequence without blocks can adopt some"
        for block in blocks:
            if block != NULL_BLOCK:
                if self.ref_counts[block] == 0:
                    del self.free_cached[block]
                self.ref_counts[block] += 1
        sequence.block_table = list(blocks)
        sequence.num_published_blocks = len(blocks)
        sequence.num_windowed_blocks = blocks.count(NULL_BLOCK)
        sequence.num_computed_tokens = len(blocks) * self.block_size
        sequence.table_version += 1

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Append blocks until the table covers `num_tokens`; False, and nothing changed, if too few are free."""
        table = sequence.block_table
        missing = -(-num_tokens // self.block_size) - len(table)
        if missing <= 0:
            return True
        if missing > self.num_free:
            return False
        table.extend(self._take_free() for _ in range(missing))
        return True

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks behind those that the tokens of `sequence` need: guesses that did not come had them."""
        table, kept = sequence.block_table, self.blocks_for(sequence.num_tokens)
        if len(table) > kept:
            for block in reversed(table[kept:]):
                self._drop(block)
            del table[kept:]
            sequence.table_version += 1

    def publish(self, sequence: Sequence) -> None:
        """Offer the full blocks of computed tokens to the prefix cache; call it after they are computed, not before.

        A block whose content is cached already under another number stays private.
        """
        full = sequence.num_computed_tokens // self.block_size
        if full <= sequence.num_published_blocks or not self.enable_prefix_caching:
            return
        for i in range(sequence.num_published_blocks, full):
            digest, block = self._hash_of(sequence, i), sequence.block_table[i]
            if digest not in self.by_hash:
                assert self.hashes[block] is None, "a block is published once between two allocations"
                self.by_hash[digest] = block
                self.hashes[block] = digest
                self.tokens[block] = tuple(sequence.token_ids[i * self.block_size : (i + 1) * self.block_size])
        sequence.num_published_blocks = full

    def release_before(self, sequence: Sequence, position: int) -> None:
        """Give up the blocks that hold only tokens before `position` (they left every attention window)."""
        first_kept = min(position // self.block_size, len(sequence.block_table))
        if first_kept <= sequence.num_windowed_blocks:
            return
        for i in range(first_kept - 1, sequence.num_windowed_blocks - 1, -1):
            self._drop(sequence.block_table[i])
            sequence.block_table[i] = NULL_BLOCK
        sequence.num_windowed_blocks = first_kept
        sequence.table_version += 1

    def release(self, sequence: Sequence) -> None:
        """Give up all blocks of `sequence`, which then has computed nothing."""
        for block in reversed(sequence.block_table):
            if block != NULL_BLOCK:
                self._drop(block)
        sequence.block_table = []
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0
        sequence.num_windowed_blocks = 0
        sequence.table_version += 1

    def _hash_of(self, sequence: Sequence, i: int) -> bytes:
        hashes, size = sequence.block_hashes, self.block_size
        while len(hashes) <= i:
            parent = hashes[-1] if hashes else ROOT_HASH + sequence.root
            hashes.append(block_hash(sequence, len(hashes), size, parent))
        return hashes[i]

    def _take_free(self) -> int:
        if self.free_blank:
            block = self.free_blank.pop()
        else:
            block, _ = self.free_cached.popitem(last=False)
            digest = self.hashes[block]
            assert digest is not None, "a cached block has a digest"
            del self.by_hash[digest]
            self.hashes[block] = None
            self.tokens[block] = ()
        self.ref_counts[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            if self.hashes[block] is None:
                self.free_blank.append(block)
            else:
                self.free_cached[block] = None
