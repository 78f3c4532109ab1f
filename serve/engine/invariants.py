"""What must hold between two steps, checked on a snapshot by a pure function: in tests after every operation, in
service whenever the engine falls idle."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from penjing.serve.engine.blocks import NULL_BLOCK, ROOT_HASH, BlockManager, block_hash
from penjing.serve.engine.scheduler import Scheduler
from penjing.serve.engine.sequence import Sequence


@dataclass(frozen=True)
class Snapshot:
    """The state of scheduler and block manager; the containers are shared with them, not copied: check it at once."""

    blocks: BlockManager
    running: list[Sequence]
    waiting: list[Sequence]
    num_waiting_tokens: int
    num_held_forks: int
    max_num_sequences: int
    window: int | None

    @classmethod
    def of(cls, scheduler: Scheduler) -> Snapshot:
        return cls(
            scheduler.blocks,
            scheduler.running,
            list(scheduler.waiting),
            scheduler.num_waiting_tokens,
            scheduler.num_held_forks,
            scheduler.max_num_sequences,
            scheduler.window,
        )


def check_invariants(snapshot: Snapshot) -> list[str]:
    """Every broken invariant in words; an empty list when all is well. Changes nothing."""
    return [*_check_blocks(snapshot), *_check_cache(snapshot.blocks), *_check_sequences(snapshot)]


def _check_blocks(snapshot: Snapshot) -> list[str]:
    blocks = snapshot.blocks
    broken: list[str] = []
    held = Counter(block for sequence in snapshot.running for block in sequence.block_table if block != NULL_BLOCK)
    broken += [
        f"block {block} has {blocks.ref_counts[block]} references, {held[block]} tables hold it"
        for block in range(1, blocks.num_blocks)
        if blocks.ref_counts[block] != held[block]
    ]
    blank, cached = set(blocks.free_blank), set(blocks.free_cached)
    free = {block for block in range(1, blocks.num_blocks) if held[block] == 0}
    if len(blank) != len(blocks.free_blank):
        broken.append("a block is twice in the blank list")
    if blank & cached:
        broken.append(f"blocks {sorted(blank & cached)} are blank and cached at once")
    if blank | cached != free:
        broken.append(f"free lists and references disagree on blocks {sorted((blank | cached) ^ free)}")
    if any(blocks.hashes[block] is not None for block in blank):
        broken.append("a blank block is published")
    if any(blocks.hashes[block] is None for block in cached):
        broken.append("a cached block has no digest")
    return broken


def _check_cache(blocks: BlockManager) -> list[str]:
    broken = []
    for digest, block in blocks.by_hash.items():
        if blocks.hashes[block] != digest:
            broken.append(f"the cache finds block {block} by a digest that is not its own")
        if len(blocks.tokens[block]) != blocks.block_size:
            broken.append(f"block {block} is published with {len(blocks.tokens[block])} tokens")
    published = sum(digest is not None for digest in blocks.hashes)
    if published != len(blocks.by_hash):
        broken.append(f"{published} blocks have a digest, the cache finds {len(blocks.by_hash)}")
    return broken


def _check_sequences(snapshot: Snapshot) -> list[str]:
    broken = []
    everyone = [*snapshot.running, *snapshot.waiting]
    if len({id(sequence) for sequence in everyone}) != len(everyone):
        broken.append("a sequence is queued twice")
    if len(snapshot.running) > snapshot.max_num_sequences:
        broken.append(f"{len(snapshot.running)} sequences run, {snapshot.max_num_sequences} may")
    if snapshot.num_waiting_tokens != sum(sequence.num_tokens for sequence in snapshot.waiting):
        broken.append(f"num_waiting_tokens={snapshot.num_waiting_tokens} is not what the queue holds")
    if snapshot.num_held_forks != sum(len(sequence.forks) for sequence in everyone):
        broken.append(f"num_held_forks={snapshot.num_held_forks} is not what sequences hold")
    idle = [sequence for sequence in snapshot.waiting if sequence.block_table or sequence.num_computed_tokens]
    broken += [f"{sequence!r} waits and holds blocks" for sequence in idle]
    for sequence in snapshot.running:
        broken.extend(_check_running(snapshot, sequence))
    return broken


def _check_running(snapshot: Snapshot, sequence: Sequence) -> list[str]:
    blocks, size, table, broken = snapshot.blocks, snapshot.blocks.block_size, sequence.block_table, []
    if not 0 <= sequence.num_computed_tokens <= sequence.num_tokens:
        broken.append(f"{sequence!r} has computed more tokens than it has")
    if len(table) * size < sequence.num_computed_tokens:
        broken.append(f"{sequence!r} has computed tokens without a block")
    windowed = sequence.num_windowed_blocks
    if any(block != NULL_BLOCK for block in table[:windowed]) or NULL_BLOCK in table[windowed:]:
        broken.append(f"{sequence!r} counts {windowed} blocks outside the window, its table says otherwise")
    seen_from = 0 if snapshot.window is None else max(0, sequence.num_computed_tokens - snapshot.window + 1)
    if windowed * size > seen_from:
        broken.append(f"{sequence!r} gave up a block that its next query sees")
    parent = ROOT_HASH + sequence.root
    for i, block in enumerate(table[: sequence.num_computed_tokens // size]):
        tokens = sequence.token_ids[i * size : (i + 1) * size]
        known = sequence.block_hashes
        parent = known[i] if i < len(known) else block_hash(sequence, i, size, parent)
        published = blocks.hashes[block] if block != NULL_BLOCK else None
        if published is not None and (published != parent or blocks.tokens[block] != tuple(tokens)):
            broken.append(f"{sequence!r} holds block {block}, which is published for other tokens")
    for i, block in enumerate(table):
        unfinished = (i + 1) * size > sequence.num_computed_tokens
        if block != NULL_BLOCK and unfinished and blocks.hashes[block] is not None:
            broken.append(f"{sequence!r}: block {block} is published before it is computed")
    return broken
