"""Which tokens of a conversation are learnt, what is refused or left out, and how rows are packed."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penjing.core.errors import ConfigError, InputError, RequestError
from penjing.core.progress import Silent
from penjing.core.text.chat import ChatTemplate
from penjing.train.chat.packed import pack_rows
from penjing.train.chat.rows import Row, RowError, TooLongError, take_rows
from penjing.train.chat.tokens import ChatTokens, Masked
from penjing.train.data.stream import shuffled
from penjing.train.objective.objective import IGNORED
from tests.conftest import CHATML

# As Qwen3's: what the assistant thought is dropped when another turn of the user follows.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = "{% if tools %}tools: {{ tools | length }}\n{% endif %}" + CHATML


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user" if place % 2 == 0 else "assistant", "content": each} for place, each in enumerate(contents)]


@pytest.fixture
def chat(tiny_checkpoint: Path) -> ChatTokens:
    return ChatTokens.from_folder(tiny_checkpoint)


def learnt(chat: ChatTokens, row: Row) -> str:
    found = chat.masked(row)
    return chat.tokenizer.decode(found.ids[found.learnt], skip_special=False)


def test_the_answers_are_learnt_with_the_token_that_ends_them(chat: ChatTokens, tiny_checkpoint: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    row = {"messages": [{"role": "system", "content": "Be kind."}, *turns("1 + 1?", "It is 2.", "2 + 2?", "Vier, ä!")]}
    found = chat.masked(row)
    theirs = PreTrainedTokenizerFast.from_pretrained(tiny_checkpoint)
    assert found.ids.tolist() == theirs.apply_chat_template(row["messages"], return_dict=False)
    assert learnt(chat, row) == "It is 2.<|im_end|>\nVier, ä!<|im_end|>\n"
    begin = found.learnt.argmax()  # what is served before the first answer is what is not learnt before it
    assert found.ids[:begin].tolist() == chat.prompt({"messages": row["messages"][:2]})
    last = ChatTokens(chat.tokenizer, chat.template, "last")
    assert learnt(last, row) == "Vier, ä!<|im_end|>\n"
    assert ChatTokens(chat.tokenizer, chat.template, "all").masked(row).learnt.all()


def test_prompts_and_completions_are_rows_too(chat: ChatTokens) -> None:
    assert learnt(chat, {"prompt": "Tree: ", "completion": "pine"}) == "pine<|im_end|>"
    assert learnt(chat, {"prompt": turns("a"), "completion": [{"role": "assistant", "content": "b"}]}) == (
        "b<|im_end|>\n"
    )
    row = {"messages": turns("a", "b"), "tools": [{"type": "function"}]}
    given = ChatTokens(chat.tokenizer, ChatTemplate(TOOLS, "tools"))
    assert given.tokenizer.decode(given.masked(row).ids).startswith("tools: 1")


def test_a_template_that_writes_turns_anew_is_refused_but_for_the_last_turn(chat: ChatTokens) -> None:
    template = ChatTemplate(FORGETFUL, "forgetful")
    row = {"messages": turns("a", "<think>x</think>b", "c", "<think>y</think>d")}
    for setting, says in (
        ("data.template", r'use another template \(data.template\), or learn = "last"$'),
        (None, r"give the tokenizer another one, as chat_template\.jinja$"),
    ):
        with pytest.raises(RowError, match="the chat template is not prefix-preserving.*" + says):
            ChatTokens(chat.tokenizer, template, setting=setting).masked(row)
    assert learnt(ChatTokens(chat.tokenizer, template, "last"), row) == "<think>y</think>d<|im_end|>\n"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": turns("a")}, "there is no turn of the assistant"),
        ({"messages": turns("a", "b", "c")}, "the last turn is of the role 'user', and nobody answers it"),
        (
            {"messages": turns("a", "b")[::-1]},
            r"messages\[0\] is of the role 'assistant', which cannot follow",
        ),
        ({"messages": [*turns("a"), *turns("a", "b")]}, r"messages\[1\] is of the role 'user', .* a turn of 'user'"),
        ({"messages": [*turns("a"), {"role": "system", "content": "s"}]}, "'system', which cannot follow"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "the role 'robot' is unknown; roles are system, user"),
        ({"messages": "text"}, "must be a list"),
        ({"messages": [{"role": "user", "content": 3}, *turns("a", "b")[1:]]}, "content must be text"),
        ({"prompt": "a", "completion": ""}, "the completion is empty"),
        ({"prompt": "a", "completion": turns("b")}, "must both be texts"),
        ({"messages": turns("a", "")}, r"messages\[1\], of the assistant, is empty"),
        ({"messages": turns("a", "\ud800")}, "half of a surrogate pair"),
        ({"prompt": "\udfff", "completion": "a"}, "half of a surrogate pair"),
        ({"messages": turns("a", "b"), "tools": "x"}, "tools must be a list of objects"),
        ({"text": "a"}, '"messages", or "prompt" and "completion" are needed, not \'text\''),
    ],
)
def test_rows_that_cannot_be_learnt_say_why(chat: ChatTokens, row: Row, says: str) -> None:
    with pytest.raises((RowError, RequestError), match=says):
        chat.masked(row)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "chosen": "b"}, "a pair has two sides, and this one lacks rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"chosen": turns("a", "b"), "rejected": turns("c", "d")}, "answer two different prompts"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("nan")}, "margin must be a finite number"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 10**400}, "margin must be a finite number"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1e300}, "margin must be a finite number"),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, "must be texts, or lists of messages"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "the prompt is empty"),
        ({"prompt": turns("a"), "chosen": turns("a", "b")[1:], "rejected": turns("a", "")[1:]}, "is empty"),
    ],
)
def test_pairs_that_cannot_be_compared_say_why(chat: ChatTokens, row: Row, says: str) -> None:
    with pytest.raises(RowError, match=says):
        chat.pair(row)


def test_pairs_share_their_prompt(chat: ChatTokens) -> None:
    for row in (
        {"prompt": turns("a?"), "chosen": turns("x", "yes")[1:], "rejected": turns("x", "no, never")[1:], "margin": 2},
        {"chosen": turns("a?", "yes"), "rejected": turns("a?", "no, never"), "margin": 2.0},
    ):
        pair = chat.pair(row)
        assert pair.prompt.tolist() == chat.prompt({"prompt": "a?"})
        assert chat.tokenizer.decode(pair.chosen, skip_special=False) == "yes<|im_end|>\n"
        assert chat.tokenizer.decode(pair.rejected, skip_special=False) == "no, never<|im_end|>\n"
        assert pair.margin == 2.0
    plain = chat.pair({"prompt": "a", "chosen": "b", "rejected": "c"})
    assert chat.tokenizer.decode(plain.chosen, skip_special=False) == "b<|im_end|>"


def test_a_template_that_an_editor_of_windows_saved(chat: ChatTokens, tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(CHATML, encoding="utf-8-sig")
    row = {"messages": turns("a", "b")}
    marked = ChatTokens.from_folder(tiny_checkpoint, tmp_path / "mine.jinja").masked(row)
    assert marked.ids.tolist() == chat.masked(row).ids.tolist()
    (tmp_path / "mine.jinja").write_text(CHATML, encoding="utf-16")
    with pytest.raises(ConfigError, match=r"data.template: .*mine.jinja cannot be read: it is UTF-16; convert it"):
        ChatTokens.from_folder(tiny_checkpoint, tmp_path / "mine.jinja")
    with pytest.raises(ConfigError, match=r"none.jinja cannot be read: No such file or directory$"):
        ChatTokens.from_folder(tiny_checkpoint, tmp_path / "none.jinja")


def test_rows_in_another_encoding_are_told_as_such(chat: ChatTokens, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns("a", "b")}), encoding="utf-16")
    with pytest.raises(InputError, match=r"a.jsonl, line 1: it is no JSON \(it is UTF-16; convert it, for example by"):
        take_rows([str(tmp_path / "a.jsonl")], chat.masked, 0.1, Silent())


def write(path: Path, rows: list[Any]) -> list[str]:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return [str(path)]


def test_bad_and_long_rows_are_counted_and_too_many_stop(chat: ChatTokens, tmp_path: Path) -> None:
    good = [{"messages": turns(f"question {place}", "answer")} for place in range(8)]
    sources = write(tmp_path / "a.jsonl", [*good, "{", {"messages": turns("a")}, {"messages": turns("q" * 99, "b")}])

    def take(row: Row) -> Masked:
        found = chat.masked(row)
        if len(found.ids) > 60:
            raise TooLongError
        return found

    kept, taken = take_rows(sources, take, 0.5, Silent())
    assert (len(kept), taken.count, taken.too_long) == (8, 8, 1)
    assert [where.rpartition("/")[2] for where, _ in taken.bad] == ["a.jsonl, line 9", "a.jsonl, line 10"]
    assert "8 rows; 1 left out because they are longer than a sequence; 2 left out because they are bad" in str(taken)
    named = write(tmp_path / "c.jsonl", [*good, *({"messages": [{"role": f"a: {place}"}]} for place in "bcb")])
    assert "(2 × the role 'a: b' is unknown; roles are" in str(take_rows(named, take, 0.5, Silent())[1])
    with pytest.raises(InputError, match=r"2 of 11 rows are bad: .*a.jsonl, line 9: it is no JSON .*data.most_damaged"):
        take_rows(sources, take, 0.1, Silent())
    said = r"c.jsonl, line 9 and 1 more: the role 'a: b' is unknown; .*; .*c.jsonl, line 10: the role 'a: c' is unknown"
    with pytest.raises(InputError, match=said):
        take_rows(named, take, 0.1, Silent())
    with pytest.raises(InputError, match="leave nothing to learn from: 0 rows; 1 left out because they are longer"):
        take_rows(write(tmp_path / "b.jsonl", [{"messages": turns("q" * 99, "b")}]), take, 0.1, Silent())
    assert len(take_rows(sources, take, 0.0, Silent(), most=3)[0]) == 3  # before the bad ones
    with pytest.raises(InputError, match="does not exist"):
        take_rows([str(tmp_path / "none.jsonl")], take, 0.1, Silent())


def test_tables_hold_the_same_rows(chat: ChatTokens, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"messages": turns("a", "b")}, {"messages": turns("c", "d", "e", "f")}]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "chats.parquet")
    for name, opener in (("stream.arrow", pyarrow.ipc.new_stream), ("file.arrow", pyarrow.ipc.new_file)):
        with pyarrow.OSFile(str(tmp_path / name), "wb") as sink, opener(sink, table.schema) as writer:
            writer.write_table(table)
    ours, _ = take_rows(write(tmp_path / "chats.jsonl", rows), chat.masked, 0.0, Silent())
    for name in ("chats.parquet", "stream.arrow", "file.arrow"):
        theirs, _ = take_rows([str(tmp_path / name)], chat.masked, 0.0, Silent())
        assert [text.ids.tolist() for text in ours] == [text.ids.tolist() for text in theirs]


@pytest.mark.parametrize(("suffix", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_a_compressed_file_that_is_damaged_is_named(
    chat: ChatTokens, tmp_path: Path, suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    rows = [{"messages": turns(f"question {number * 7919 % 1000}", "answer")} for number in range(500)]
    packed = bytearray(pack("".join(json.dumps(row) + "\n" for row in rows).encode()))
    middle = len(packed) // 2
    packed[middle : middle + 40] = bytes(each ^ 0xFF for each in packed[middle : middle + 40])
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(packed)
    with pytest.raises(InputError, match=rf"a.jsonl.{suffix} cannot be read: .*; get it again"):
        take_rows([str(tmp_path / f"a.jsonl.{suffix}")], chat.masked, 0.0, Silent())


def texts(*sizes: int) -> list[Masked]:
    return [Masked(np.arange(1, size + 1, dtype=np.int32), np.arange(size) > 0) for size in sizes]


def test_rows_hold_every_text_once_and_whole() -> None:
    rng = np.random.default_rng(0)
    given = texts(*rng.integers(1, 33, 200).tolist())
    packed = pack_rows(given, 32, 0)
    assert sorted(place for row in packed.rows for place in row) == list(range(200))
    assert all(sum(len(given[place].ids) for place in row) <= 32 for row in packed.rows)
    total = sum(len(text.ids) for text in given)
    assert len(packed.rows) <= -(-total // 32) * 1.1
    batch = packed.read(range(len(packed.rows)))
    assert int((batch["targets"] != IGNORED).sum()) == sum(len(text.ids) - 1 for text in given)
    assert len(pack_rows(given, 32, 0, together=False).rows) == 200


def test_no_target_lies_beyond_its_text_and_documents_part_them() -> None:
    batch = pack_rows(texts(4, 3), 9, 0).read([0])
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 1, 2, 3, 0, 0]]
    assert batch["targets"].tolist() == [[2, 3, 4, IGNORED, 2, 3, IGNORED, IGNORED, IGNORED]]
    assert batch["documents"].tolist() == [[0, 0, 0, 0, 1, 1, 1, 2, 2]]


def test_two_processes_see_the_rows_of_one() -> None:
    packed = pack_rows(texts(*range(1, 20)), 24, 0, together=False)
    alone = shuffled(packed, batch_size=4, micro_batch=4, seed=3)
    both = [shuffled(packed, batch_size=4, micro_batch=2, rank=rank, world_size=2, seed=3) for rank in (0, 1)]
    for _ in range(7):
        whole, parts = next(alone), [next(stream) for stream in both]
        assert torch.equal(whole["tokens"], torch.cat([part["tokens"] for part in parts]))
    state = alone.state_dict()
    expected = next(alone)
    both[0] = shuffled(packed, batch_size=4, micro_batch=4, seed=3)
    both[0].load_state_dict(state)
    assert torch.equal(next(both[0])["tokens"], expected["tokens"])
