"""What a new user gives to `data.sources`, and which side of the held-out split it falls on."""

from __future__ import annotations

import datetime
import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from penjing.core.errors import InputError
from penjing.core.progress import Silent
from penjing.core.text.records import Record
from penjing.core.text.tokenizer import Tokenizer
from penjing.train.data.corpora import domain_names, domain_of, name_place
from penjing.train.data.pack import pack, prepare_tokens
from penjing.train.data.shards import TokenShards, read_index
from tests.begun import with_ends

WORDS = [
    f"{a}{b}" for a in ("ba", "de", "ki", "lo", "mu", "ni", "po", "ra") for b in ("bin", "dor", "gul", "nis", "tev")
]


def prose(seed: int, words: int = 60) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words)) + ".\n"


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def packed(
    folder: Path, *sources: Path, held_out: float = 0.1, notes: Notes | None = None, **more: object
) -> dict[str, list[str]]:
    """The documents of each split."""
    folder.mkdir(exist_ok=True)
    names = tuple(map(str, sources))
    pack(folder, names, 300, held_out=held_out, tokenizer=None, progress=notes or Silent(), **more)  # type: ignore[arg-type]
    tokenizer, found = Tokenizer.from_folder(folder), {}
    for split in read_index(folder).splits:
        shards = TokenShards(folder, split)
        text = tokenizer.decode(shards.read(0, shards.num_tokens).tolist(), skip_special=False)
        found[split] = [each for each in text.split("<|endoftext|>") if each]
    return found


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "folder", "saved"])
def test_tables_are_read_by_their_rows(tmp_path: Path, name: str) -> None:
    texts = [prose(seed) for seed in range(40)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    source = tmp_path / name
    if name == "a.jsonl":
        source.write_text(lines)
    elif name == "a.jsonl.gz":
        source.write_bytes(gzip.compress(lines.encode()))
    elif name == "folder":
        source.mkdir()
        (source / "more.jsonl").write_text(lines)
    else:
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        table = pa.table({"text": texts})
        if name == "a.parquet":
            pq.write_table(table, source)
        else:
            source.mkdir()
            (source / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
            (source / "README.md").write_text("about")
            path = str(source / "data-00000-of-00001.arrow")
            with pa.OSFile(path, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)
    found = packed(tmp_path / "out", source)
    assert sorted(found["train"] + found["held_out"]) == sorted(texts)


def test_a_single_text_is_cut_and_its_end_held_out(tmp_path: Path) -> None:
    source = tmp_path / "book.unknown"
    paragraphs = [prose(seed) for seed in range(50)]
    source.write_text("\n".join(paragraphs))
    notes = Notes()
    found = packed(tmp_path / "out", source, held_out=0.1, notes=notes)
    (train,), (held_out,) = found["train"], found["held_out"]
    assert train + held_out == "\n".join(paragraphs)
    assert train.endswith("\n\n")
    assert 0.1 <= len(held_out) / len(train + held_out) <= 0.15
    assert "the end of the largest of 1 document in 1 cluster" in notes.notes[-1]


@pytest.mark.parametrize("count", [2, 3, 10, 30])
def test_few_documents_give_both_splits(tmp_path: Path, count: int) -> None:
    (tmp_path / "texts").mkdir()
    for seed in range(count):
        (tmp_path / "texts" / f"{seed}.txt").write_text(prose(seed))
    found = packed(tmp_path / "out", tmp_path / "texts", held_out=0.02)
    assert found["train"]
    assert found["held_out"]
    assert sum(map(len, found["held_out"])) < 0.3 * sum(map(len, found["train"] + found["held_out"]))


def test_near_duplicates_stay_on_one_side(tmp_path: Path) -> None:
    lines = []
    for seed in range(120):
        words = prose(seed, 200).split()
        for copy in range(3):
            words[copy * 3] = "changed"
            lines.append(json.dumps({"text": f"{' '.join(words)} family {seed}x"}))
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(lines))
    found = packed(tmp_path / "out", source, held_out=0.15)
    families = {split: {text.split()[-1] for text in texts} for split, texts in found.items()}
    assert len(families["held_out"]) > 5
    assert not families["train"] & families["held_out"]
    assert len(found["held_out"]) == 3 * len(families["held_out"])


def test_clusters_that_the_source_names_stay_on_one_side(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    rows = [{"text": f"{prose(seed)} family {seed % 60}x", "cluster": seed % 60} for seed in range(240)]
    source.write_text("\n".join(map(json.dumps, rows)))
    found = packed(tmp_path / "out", source, held_out=0.15)
    families = {split: {text.split()[-1] for text in texts} for split, texts in found.items()}
    assert families["held_out"]
    assert not families["train"] & families["held_out"]


def test_a_domain_is_never_held_out_as_a_whole(tmp_path: Path) -> None:
    source, count = tmp_path / "a.jsonl", 100
    while name_place(f"a.jsonl, line {count + 1}") >= 0.1:
        count += 1
    rows = [{"text": prose(seed), "domain": "main"} for seed in range(count)]
    alone = {"text": prose(count, 400), "domain": "alone"}
    source.write_text("\n".join(map(json.dumps, [*rows, alone])))
    found = packed(tmp_path / "out", source, by_domain=True)
    assert set(found) == {"train@main", "held_out@main", "train@alone", "held_out@alone"}
    (train,), (held_out,) = found["train@alone"], found["held_out@alone"]
    assert train + held_out == alone["text"]
    assert len(held_out) < 0.2 * len(train)


def test_sources_whose_last_names_are_the_same_are_two_domains() -> None:
    names = ["x/train.jsonl", "y/train.jsonl", "prose", "bucket/web", "old/web", "web"]
    sources = [name.replace("prose", "builtin:prose").replace("bucket/web", "s3://bucket/web/") for name in names]
    assert list(domain_names(sources).values()) == names
    assert domain_of(Record("a", "b", fields={"domain": "said"}), "x") == "said"
    assert domain_of(Record("a", "b"), "x") == "x"


def test_damaged_documents_are_counted_listed_and_left_out(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    good = [json.dumps({"text": prose(seed)}).encode() for seed in range(199)]
    source.write_bytes(b"\n".join([*good[:100], b'{"text": "\xff"}', *good[100:]]))
    notes = Notes()
    found = packed(tmp_path / "out", source, notes=notes)
    assert len(found["train"] + found["held_out"]) == 199
    assert "left out 1 of 200 documents" in notes.notes[0]
    assert "the first is a.jsonl, line 101" in notes.notes[0]
    (listed,) = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(listed) == {
        "name": "a.jsonl, line 101",
        "reason": "cannot be read as UTF-8: byte 0xff at place 10",
    }
    source.write_bytes(b"\n".join([*good, *[b"{oops"] * 3]))
    with pytest.raises(InputError, match=r"3 of 202 documents are damaged, more than data.most_damaged = 0.01; the f"):
        packed(tmp_path / "out2", source)
    assert packed(tmp_path / "out3", source, most_damaged=0.05)


def test_conversations_need_a_template(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    with pytest.raises(InputError, match=r"a.jsonl, line 1: conversations need a chat template; name the folder"):
        packed(tmp_path / "out", source)


def test_conversations_that_a_template_refuses_are_damaged(tmp_path: Path, shards: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shards / name, tokenizer)
    refusal = "{% if m.role == 'system' %}{{ raise_exception('no orders here') }}{% endif %}"
    template = "{% for m in messages %}" + refusal + "{{ m.content }}{% endfor %}"
    (tokenizer / "chat_template.jinja").write_text(template)
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    time = datetime.datetime(2024, 1, 1)
    rows = [[{"role": "user", "content": f"question {number} ", "time": time}] for number in range(300)]
    for place, message in ((7, {"role": "system", "content": "2"}), (9, {"role": "user", "content": " "})):
        rows[place] = [{**message, "time": time}]
    pq.write_table(pa.table({"messages": [*rows, None]}), tmp_path / "a.parquet")
    notes, out = Notes(), tmp_path / "out"
    out.mkdir()
    source = (str(tmp_path / "a.parquet"),)
    pack(out, source, 320, held_out=0.1, tokenizer=tokenizer, progress=notes, most_damaged=0.01)
    assert "left out 3 of 301 documents" in notes.notes[0]
    listed = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    assert [each["reason"] for each in listed] == [
        "the chat template rejects them: no orders here",
        "the chat template makes no text of them",
        "messages must be a list of objects with role and content",
    ]
    ready, text = Tokenizer.from_folder(out), ""
    for split in read_index(out).splits:
        part = TokenShards(out, split)
        text += ready.decode(part.read(0, part.num_tokens).tolist())
    asked = [int(each) for each in text.split("question")[1:]]
    assert sorted(asked) == [number for number in range(300) if number not in (7, 9)]


def test_documents_begin_as_their_tokenizer_begins_a_text(tmp_path: Path, shards: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shards / name, made)
    tokenizer = with_ends(made, tmp_path / "tokenizer", begins=True)
    (tokenizer / "chat_template.jinja").write_text("<|endoftext|>{{ messages[0].content }}")
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    talk = {"messages": [{"role": "user", "content": prose(99)}]}
    source.write_text("".join(json.dumps(each) + "\n" for each in [talk] + [{"text": prose(n)} for n in range(40)]))
    out.mkdir()
    pack(out, (str(source),), 320, held_out=0.1, tokenizer=tokenizer, progress=Silent())
    index, end = read_index(out), Tokenizer.from_folder(out).eos_token_ids[-1]
    assert index.begin_of_text == (end,)  # the only control token
    for split in index.splits:
        part = TokenShards(out, split)
        tokens = part.read(0, part.num_tokens).tolist()
        places = [place for place, token in enumerate(tokens) if token == end]
        assert places[0] == 0
        assert places[2::2] == [place + 1 for place in places[1:-1:2]]  # the conversation is begun once, too
        assert places[-1] == len(tokens) - 1
        assert len(places) >= 2


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": prose(seed)}) + "\n" for seed in range(20)]
    source.write_text("".join(lines))

    class Changing(Silent):
        def __init__(self, to: list[str]) -> None:
            self.to = to

        def start(self, task: str, total: int) -> None:
            if task == "packing tokens":
                source.write_text("".join(self.to))

    for name, to, says in (("more", lines * 2, "have grown"), ("less", lines[:5], "have shrunk")):
        source.write_text("".join(lines))
        (tmp_path / name).mkdir()
        with pytest.raises(InputError, match=says):
            pack(tmp_path / name, (str(source),), 300, held_out=0.1, tokenizer=None, progress=Changing(to))


def test_the_cache_follows_the_template_and_the_end_of_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: Path
) -> None:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    shutil.copy(shards / "tokenizer.json", tokenizer)
    talks = [[{"role": "user", "content": f"question {number}"}] for number in range(20)]
    source = tmp_path / "talks.jsonl"
    source.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    settings = {"eos_token": "<|endoftext|>", "chat_template": "{{ messages[0].content }}"}
    found = []
    for changed in ({}, {"chat_template": "Q: {{ messages[0].content }}"}, {"eos_token": "!"}):
        (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings | changed))
        found.append(prepare_tokens((str(source),), 320, held_out=0.1, tokenizer=tokenizer))
        notes = Notes()  # said again where nothing is packed any more
        prepare_tokens((str(source),), 320, held_out=0.1, tokenizer=tokenizer, progress=notes)
        count = {split: TokenShards(found[-1], split).num_tokens for split in ("train", "held_out")}
        said = f"{count['train']:,} tokens to learn and {count['held_out']:,} held out, packed in {found[-1]}"
        assert notes.notes == [said]
    (tokenizer / "chat_template.jinja").write_text("A: {{ messages[0].content }}")
    found.append(prepare_tokens((str(source),), 320, held_out=0.1, tokenizer=tokenizer))
    begins, ends = [], []
    for folder in found:
        part = TokenShards(folder, "train")
        begins.append(Tokenizer.from_folder(folder).decode(part.read(0, part.num_tokens).tolist())[:4])
        ends.append(read_index(folder).end_of_text)
    assert begins == ["ques", "Q: q", "ques", "A: q"]
    assert ends[0] == ends[1] != ends[2] == ends[3]
