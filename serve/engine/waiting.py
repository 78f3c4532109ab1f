"""Who is next among those that wait: the more urgent, and among equals each key in turn, by tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

from penjing.serve.engine.sequence import Sequence

QUANTUM = 512  # tokens that a key may use when its turn comes: a few short prompts, or a part of a long one


class WaitingQueue:
    """Deficit round robin by tokens (Shreedhar, Varghese 1995) over the keys of each priority, lower numbers first.

    A key's turn adds a quantum to what it may use; its head goes when that covers the prompt. A key that begins to wait
    has its turn at once. Tokens that its answers
    generate are charged later, so that a key with long answers waits too. What was running before (a preempted
    sequence, a fork of a running one) stands in front of all.
    """

    def __init__(self) -> None:
        self._front: deque[Sequence] = deque()
        self._classes: dict[int, _Ring] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._front
        for priority in sorted(self._classes):
            yield from self._classes[priority]

    def add(self, sequence: Sequence) -> None:
        """Queue `sequence` behind the others of its key."""
        self._classes.setdefault(sequence.priority, _Ring()).add(sequence)
        self._size += 1

    def add_in_front(self, sequence: Sequence) -> None:
        """Queue `sequence` before all others."""
        self._front.appendleft(sequence)
        self._size += 1

    def first(self, full: Collection[str] = ()) -> Sequence | None:
        """Who is next; keys in `full` are passed over. The same until something changes."""
        if self._front:
            return self._front[0]
        for priority in sorted(self._classes):
            if (sequence := self._classes[priority].first(full)) is not None:
                return sequence
        return None

    def take(self, sequence: Sequence) -> None:
        """Remove what `first` gave; its tokens are charged to its key."""
        if self._front and self._front[0] is sequence:
            self._front.popleft()
        else:
            self._classes[sequence.priority].charge(sequence.key, sequence.num_tokens)
            self._drop(sequence)
        self._size -= 1

    def remove(self, sequence: Sequence) -> bool:
        """Remove `sequence`, wherever it stands; False if it does not wait."""
        if sequence in self._front:
            self._front.remove(sequence)
        elif sequence.priority not in self._classes or not self._drop(sequence):
            return False
        self._size -= 1
        return True

    def num_of(self, key: str) -> int:
        """How many sequences of `key` wait."""
        return sum(len(ring.queues.get(key, ())) for ring in list(self._classes.values()))

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """The answer of `sequence` has cost so many tokens; what a key that does not wait has used is forgotten."""
        if sequence.priority in self._classes:
            self._classes[sequence.priority].charge(sequence.key, num_tokens)

    def _drop(self, sequence: Sequence) -> bool:
        ring = self._classes[sequence.priority]
        found = ring.remove(sequence)
        if not ring.queues:
            del self._classes[sequence.priority]
        return found


class _Ring:
    """The keys of one priority, in the order of their turns."""

    def __init__(self) -> None:
        self.queues: dict[str, deque[Sequence]] = {}
        self._turns: deque[str] = deque()
        self._credit: dict[str, int] = {}

    def __iter__(self) -> Iterator[Sequence]:
        for key in self._turns:
            yield from self.queues[key]

    def add(self, sequence: Sequence) -> None:
        key = sequence.key
        if key not in self.queues:
            # Who has not waited yet is next, for one quantum (as in fq_codel): a key with a request now and then hardly
            # notices another's crowd.
            self.queues[key], self._credit[key] = deque(), QUANTUM
            self._turns.appendleft(key)
        self.queues[key].append(sequence)

    def first(self, full: Collection[str]) -> Sequence | None:
        if all(key in full for key in self._turns):
            return None
        while True:
            key = self._turns[0]
            if key not in full:
                if self._credit[key] >= self.queues[key][0].num_tokens:
                    return self.queues[key][0]
                self._credit[key] += QUANTUM
            self._turns.rotate(-1)

    def charge(self, key: str, num_tokens: int) -> None:
        if key in self._credit:
            self._credit[key] -= num_tokens

    def remove(self, sequence: Sequence) -> bool:
        queue = self.queues.get(sequence.key)
        if queue is None or sequence not in queue:
            return False
        queue.remove(sequence)
        if not queue:
            del self.queues[sequence.key], self._credit[sequence.key]
            self._turns.remove(sequence.key)
        return True
