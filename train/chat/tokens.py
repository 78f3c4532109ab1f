"""A conversation as tokens with a mask of those that are learnt, found by rendering growing prefixes of it.

The template of the tokenizer writes the whole conversation once, and, for each turn of the assistant, what comes before
it with the beginning of an answer, and what there is up to its end. Each of these must begin as the whole does: then
the characters between the two are what the model has to say, with the token that ends the turn and what the template
writes after it. A token is learnt when all its characters lie there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penjing.core.errors import ConfigError, not_utf8
from penjing.core.text.chat import TEMPLATE_FILE, ChatTemplate
from penjing.core.text.records import field_names
from penjing.core.text.tokenizer import Tokenizer
from penjing.train.chat.rows import Row, RowError

Learn = Literal["assistant", "last", "all"]
_ROLES = ("system", "user", "assistant", "tool")
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Masked:
    """Tokens of a text, (T,) int32, and which of them are learnt, (T,) bool."""

    ids: NDArray[np.int32]
    learnt: NDArray[np.bool_]


@dataclass(frozen=True)
class Pair:
    """A prompt, (P,) int32, and two answers to it, with the tokens that end them."""

    prompt: NDArray[np.int32]
    chosen: NDArray[np.int32]
    rejected: NDArray[np.int32]
    margin: float = 0.0


@dataclass(frozen=True)
class ChatTokens:
    """Writes rows in the tokens of a model.

    Attributes: template: of conversations; rows of plain prompts need none. learn: of a conversation, all turns of the
        assistant, the last one, or everything. setting: the key of the recipe that names another template; None where
        no recipe can.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    learn: Learn = "assistant"
    setting: str | None = "data.template"

    @staticmethod
    def from_folder(
        folder: Path, template: Path | None = None, learn: Learn = "assistant", setting: str | None = "data.template"
    ) -> ChatTokens:
        """The tokenizer in `folder`, and its template or the one in the file `template`.

        Raises:
            ConfigError: the file `template` cannot be read.
            InputError: a damaged tokenizer or template.
        """
        found = ChatTemplate.from_folder(folder)
        if template is not None:
            try:
                text = template.read_text(encoding="utf-8-sig")  # a byte order mark would stand in every conversation
            except OSError as error:
                raise ConfigError(f"{setting}: {template} cannot be read: {error.strerror}") from None
            except UnicodeDecodeError as error:
                raise ConfigError(f"{setting}: {template} cannot be read: {not_utf8(error)}") from None
            found = ChatTemplate(text, str(template), {} if found is None else found.special_tokens)
        return ChatTokens(Tokenizer.from_folder(folder), found, learn, setting)

    def masked(self, row: Row) -> Masked:
        """The tokens of a row with `messages`, or with `prompt` and `completion` (texts, or lists of messages).

        Raises:
            RowError, RequestError: it is none of these, or cannot be learnt from; says why.
        """
        if "messages" in row:
            return self._conversation(row["messages"], row.get("tools"), self.learn)
        if "prompt" in row and "completion" in row:
            prompt, completion = row["prompt"], row["completion"]
            if isinstance(prompt, str) and isinstance(completion, str):
                return self._plain(prompt, completion)
            if isinstance(prompt, list) and isinstance(completion, list):
                return self._conversation([*prompt, *completion], row.get("tools"), "last")
            raise RowError("prompt and completion must both be texts, or both lists of messages")
        raise RowError(f'"messages", or "prompt" and "completion" are needed, not {field_names(row)}')

    def pair(self, row: Row) -> Pair:
        """The tokens of a row with `prompt`, `chosen` and `rejected` (texts, or lists of messages), or with the last
        two alone, conversations that differ in the last turn.

        Raises:
            RowError, RequestError: it is none of these, or cannot be learnt from; says why.
        """
        if missing := [name for name in ("chosen", "rejected") if not row.get(name)]:
            raise RowError(f"a pair has two sides, and this one lacks {' and '.join(missing)}")
        chosen, rejected, margin = row["chosen"], row["rejected"], row.get("margin", 0.0)
        if chosen == rejected:
            raise RowError("chosen and rejected are the same")
        if not isinstance(margin, int | float) or isinstance(margin, bool) or not abs(margin) <= _LARGEST:
            raise RowError(f"margin must be a finite number of float32 (got {margin!r:.40})")
        prompt = row.get("prompt")
        if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str):
            sides = [self._plain(prompt, answer) for answer in (chosen, rejected)]
        else:
            prompt = (
                [] if prompt is None else [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            )
            answers = [[{"role": "assistant", "content": x}] if isinstance(x, str) else x for x in (chosen, rejected)]
            if not all(isinstance(each, list) for each in (prompt, *answers)):
                raise RowError("prompt, chosen and rejected must be texts, or lists of messages")
            both = [[*prompt, *answer] for answer in answers]
            if both[0][:-1] != both[1][:-1]:
                raise RowError("chosen and rejected answer two different prompts")
            sides = [self._conversation(messages, row.get("tools"), "last") for messages in both]
        begins = [int(side.learnt.argmax()) for side in sides]
        if 0 in begins:
            raise RowError("the prompt is empty, and no token begins a text, so that nothing comes before an answer")
        if not np.array_equal(sides[0].ids[: begins[0]], sides[1].ids[: begins[1]]):
            raise RowError("the tokens of the prompt are not the same before both answers")
        first, second = (side.ids[begin:] for side, begin in zip(sides, begins, strict=True))
        if np.array_equal(first, second):
            raise RowError("chosen and rejected are the same")
        return Pair(sides[0].ids[: begins[0]], first, second, float(margin))

    def prompt(self, row: Row) -> list[int]:
        """The tokens of a prompt that an answer is to follow: `prompt` (a text is one turn of the user where there is a
        template), or `messages`, whose last turn is the user's.

        Raises:
            RowError, RequestError: there is none.
        """
        given = row.get("prompt", row.get("messages"))
        if isinstance(given, str) and self.template is None:
            ids = self.tokenizer.encode(given)
        else:
            messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
            _check_roles(messages, answered=False)
            ids = self.tokenizer.encode(self._rendered(messages, True, row.get("tools")), add_special=False)
        if not ids:
            raise RowError("the prompt is empty")
        return ids

    def behind_answer(self) -> list[int]:
        """The tokens that the template writes behind the one that ends an answer, such as a line's end, which a model
        that answers does not say; none without a template.

        Raises:
            RowError, RequestError: the template cannot write a question and an answer.
        """
        if self.template is None:
            return []
        turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
        ids = self._conversation(turns, None, "last").ids.tolist()
        ends = [place for place, token in enumerate(ids) if token in self.tokenizer.eos_token_ids]
        return ids[ends[-1] + 1 :] if ends else []

    def _plain(self, prompt: str, completion: str) -> Masked:
        """A prompt and what follows it, without a template; the answer ends with the token that ends a text."""
        if not completion:
            raise RowError("the completion is empty, so that there is nothing to learn")
        if not self.tokenizer.eos_token_ids:
            raise RowError("the tokenizer has no token that ends a text, which an answer must end with")
        _check_text(prompt + completion)
        # Apart, as they are when it answers: a token never spans the end of the prompt.
        before, after = self.tokenizer.encode(prompt), self.tokenizer.encode(completion, add_special=False)
        ids = np.array([*before, *after, self.tokenizer.eos_token_ids[-1]], np.int32)
        return Masked(ids, np.arange(len(ids)) >= len(before))

    def _conversation(self, messages: Any, tools: Any, learn: Learn) -> Masked:
        _check_roles(messages, answered=True)
        whole = self._rendered(messages, False, tools)
        spans = list[tuple[int, int]]()
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        for place in {"assistant": turns, "last": turns[-1:], "all": []}[learn]:
            before = self._rendered(messages[:place], True, tools)
            upto = whole if place == len(messages) - 1 else self._rendered(messages[: place + 1], False, tools)
            if not upto.startswith(before) or not whole.startswith(upto):
                other = (
                    f'use another template ({self.setting}), or learn = "last"'
                    if self.setting
                    else f"give the tokenizer another one, as {TEMPLATE_FILE}"
                )
                raise RowError(
                    "the chat template is not prefix-preserving: it writes a turn otherwise when others follow it, so "
                    f"that its tokens cannot be told apart; {other}"
                )
            spans.append((len(before), len(upto)))
        encoding = self.tokenizer.backend.encode(whole, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        if learn == "all":
            return Masked(ids, np.ones(len(ids), dtype=bool))
        offsets = np.array(encoding.offsets).reshape(-1, 2)
        learnt = np.zeros(len(ids), dtype=bool)
        for begin, end in spans:
            learnt |= (offsets[:, 0] >= begin) & (offsets[:, 1] <= end)
        if not learnt.any():
            raise RowError("the assistant says nothing, so that there is nothing to learn")
        return Masked(ids, learnt)

    def _rendered(self, messages: Any, begin_answer: bool, tools: Any) -> str:
        if self.template is None:
            other = f"name one by {self.setting}" if self.setting else f"give it one, as {TEMPLATE_FILE}"
            raise RowError(f"conversations need a chat template, and the tokenizer has none; {other}")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
            raise RowError(f"tools must be a list of objects (got {tools!r:.40})")
        return _check_text(self.template.render(messages, begin_answer, **({} if tools is None else {"tools": tools})))


def _check_text(text: str) -> str:
    """`text`, which is one.

    Raises:
        RowError: JSON can hold what no text does.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowError("it holds half of a surrogate pair, which is no character") from None
    return text


def _check_roles(messages: Any, *, answered: bool) -> None:
    """Refuse turns in an order that no conversation has.

    Raises:
        RowError: says which.
    """
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise RowError("messages must be a list of at least one object with role and content")
    roles = [message.get("role") for message in messages]
    if odd := [role for role in roles if role not in _ROLES]:
        raise RowError(f"the role {odd[0]!r:.40} is unknown; roles are {', '.join(_ROLES)}")
    before = "begin"
    for place, role in enumerate(roles):
        follows = {"system": ("begin",), "user": ("begin", "system", "assistant"), "assistant": ("user", "tool")}
        if before not in follows.get(role, ("assistant", "tool")):
            after = "the beginning" if before == "begin" else f"a turn of {before!r}"
            raise RowError(f"messages[{place}] is of the role {role!r}, which cannot follow {after}")
        before = role
    for place, message in enumerate(messages):
        if message["role"] == "assistant" and message.get("content") in ("", []) and not message.get("tool_calls"):
            raise RowError(f"messages[{place}], of the assistant, is empty, so that there is nothing to learn")
    if answered and "assistant" not in roles:
        raise RowError("there is no turn of the assistant, so that there is nothing to learn")
    if answered and roles[-1] != "assistant":
        raise RowError(f"the last turn is of the role {roles[-1]!r}, and nobody answers it")
    if not answered and roles[-1] not in ("user", "tool"):
        raise RowError(f"a prompt ends with a turn of the user, not of the role {roles[-1]!r}")
