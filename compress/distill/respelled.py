"""A teacher whose vocabulary is larger than its student's: what it says, in the student's tokens.

`penjing compress vocabulary` leaves tokens out, whose text the student spells by pieces. The teacher reads the same
text in its own tokens. Where one of them ends, the student's next token is a piece that one of the teacher's tokens
begins with, so that the teacher's probability of a piece is the sum over all tokens that begin with it. Between the
pieces of one token the teacher says nothing, and the text's own next piece is the answer.
"""

from __future__ import annotations

from itertools import accumulate, product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import InputError
from penjing.core.manifest import read_json_object
from penjing.core.models.decoder import Decoder
from penjing.core.text.byte_pairs import BYTE, Pairs, read_pairs
from penjing.core.text.tokenizer import Tokenizer

CERTAIN = 1e4  # between the logit of what follows for certain and all others; its exponential is 0 beside theirs
LEAST = 1e-30  # probability of a piece, so that its logarithm is finite
_CUTS = sorted(product(range(8), range(4)), key=sum)  # tokens at the front and at the back; characters have four bytes
_PROBE = "A text, read twice.\n\tThen (again): one."


class Respelled(nn.Module):
    """The teacher as a network over the student's tokens.

    Args:
        network: the teacher, over its own tokens.
        student, teacher: folders, of which `is_respelled` holds.

    Raises:
        InputError: the tokenizer changes the text that it reads.
    """

    def __init__(self, network: Decoder, student: Path, teacher: Path) -> None:
        super().__init__()
        self.network = network
        self.config = network.config
        small, large = vocabulary_of(student), vocabulary_of(teacher)
        self._reads, self._taught = Tokenizer.from_folder(student), Tokenizer.from_folder(teacher)
        self._texts = {number: _text(token) for token, number in large.ids.items()}
        self._own = {number: large.ids[token] for token, number in small.ids.items()}  # the same token of the teacher
        self._single = frozenset(self._own[number] for number in self._reads.special_ids)
        self._size = open_checkpoint(student).config.vocab_size
        first_V = torch.full((network.config.vocab_size,), self._size)  # of rows without a token, and cut off
        for token, number in large.ids.items():
            first_V[number] = small.ids[token if token in small.ids else small.spelled(token)[0]]
        self.first_V: Tensor
        self.register_buffer("first_V", first_V, persistent=False)
        probe = self._reads.encode(_PROBE, allow_special=False, add_special=False)
        if self._read_again([self._own[number] for number in probe]) is None:
            raise InputError(
                f"the tokenizer of {student} changes what it reads: a teacher of more tokens cannot follow"
            )

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """(B, T, V) logits over the student's tokens that follow each of `tokens`, (B, T) int64 of the student's.

        Args:
            documents: (B, T) int64, as `Decoder` takes it.
        """
        if isinstance(tokens, FakeTensor):  # a run without data, which asks how much memory a real one takes
            return self.network(tokens, documents=documents)[..., : self._size]
        spelled = [self._ends(row) for row in tokens.tolist()]
        longest = max(len(ids) for ids, _ in spelled)
        read = torch.tensor([ids + ids[-1:] * (longest - len(ids)) for ids, _ in spelled], device=tokens.device)
        inside: dict[str, Tensor] = {}
        if documents is not None:
            inside["documents"] = torch.stack(
                [row[_padded(ends, longest, tokens.device)] for row, (_, ends) in zip(documents, spelled, strict=True)]
            )
        answers = self.network(read, **inside)
        rows = zip(tokens, answers, (ends for _, ends in spelled), strict=True)
        return torch.stack([self._answer(row, answer[: len(ends)], ends) for row, answer, ends in rows])

    def _answer(self, row_T: Tensor, logits_RV: Tensor, ends: list[int]) -> Tensor:
        """(T, V of the student) of one row; `ends`: with which of the student's tokens each of the teacher's ends."""
        pieces = torch.zeros(len(ends), self._size + 1, device=logits_RV.device)
        pieces.index_add_(1, self.first_V, logits_RV.float().softmax(-1))
        out = torch.full((len(row_T), self._size), -CERTAIN, device=logits_RV.device)
        out[:-1].scatter_(1, row_T[1:, None], 0.0)
        out[torch.tensor(ends, device=out.device)] = pieces[:, : self._size].clamp(min=LEAST).log()
        return out

    def _ends(self, row: list[int]) -> tuple[list[int], list[int]]:
        """(The teacher's tokens of a row of the student's, the place of the student's token that each ends with)."""
        own = [self._own[number] for number in row]
        read, ends, begin = list[int](), list[int](), 0
        for place in range(len(own) + 1):
            if place < len(own) and own[place] not in self._single:
                continue
            if begin < place:
                tokens, until = self._respelled(own[begin:place])
                read += tokens
                ends += [begin + at for at in until]
            if place < len(own):
                read.append(own[place])
                ends.append(place)
            begin = place + 1
        return read, ends

    def _respelled(self, part: list[int]) -> tuple[list[int], list[int]]:
        """The teacher's tokens of a text without control tokens, and the place in `part` with which each ends.

        Where the text begins or ends within a character, or a word that the tokenizer would put a space before, a few
        tokens there stay as they are; so does all of a text that has no common spelling.
        """
        for front, back in _CUTS:
            middle = part[front : len(part) - back]
            if not middle or (again := self._read_again(middle)) is None:
                continue
            until = {length: at for at, length in enumerate(self._lengths(middle), front)}
            lengths = self._lengths(again)
            if all(length in until for length in lengths):
                last = range(len(part) - back, len(part))
                tokens = [*part[:front], *again, *(part[at] for at in last)]
                return tokens, [*range(front), *(until[length] for length in lengths), *last]
        return part, list(range(len(part)))

    def _read_again(self, part: list[int]) -> list[int] | None:
        """The teacher's tokens of a text that is spelled by some of them; None where the characters are others."""
        text = self._taught.decode(part, skip_special=False)
        again = self._taught.encode(text, allow_special=False, add_special=False)
        return again if self._spelling(again) == self._spelling(part) else None

    def _spelling(self, ids: list[int]) -> bytes:
        return b"".join(self._texts[number] for number in ids)

    def _lengths(self, ids: list[int]) -> list[int]:
        return list(accumulate(len(self._texts[number]) for number in ids))


def is_respelled(student: Path, teacher: Path) -> bool:
    """Whether the tokens of `student` are some of those of `teacher` and not all, made as there.

    Raises:
        InputError: a tokenizer is missing or malformed.
    """
    paths = [folder / "tokenizer.json" for folder in (student, teacher)]
    values = [read_json_object(path) for path in paths]
    if not all(isinstance(each.get("model"), dict) and "merges" in each["model"] for each in values):
        return False
    small, large = (vocabulary_of(folder) for folder in (student, teacher))
    ours, theirs = ({token["content"] for token in each.get("added_tokens") or ()} for each in values)
    return small.ids.keys() < large.ids.keys() and small.places.keys() <= large.places.keys() and ours <= theirs


def vocabulary_of(folder: Path) -> Pairs:
    """The vocabulary of a folder.

    Raises:
        InputError: it has none of pairs.
    """
    path = folder / "tokenizer.json"
    return read_pairs(read_json_object(path), str(path))


def _text(token: str) -> bytes:
    """What a token adds to a text, in the characters of the vocabulary."""
    return bytes([int(token[3:5], 16)]) if BYTE.fullmatch(token) else token.encode()


def _padded(ends: list[int], longest: int, device: torch.device) -> Tensor:
    return torch.tensor(ends + ends[-1:] * (longest - len(ends)), device=device)
