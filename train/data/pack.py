"""Text → token shards: trains a byte-level BPE tokenizer (or takes one), encodes, packs; done once, kept in the
cache."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from penjing.core.cache import cache_dir
from penjing.core.checkpoint.decoder import TOKENIZER_FILES, copy_tokenizer
from penjing.core.errors import ConfigError, InputError, RequestError
from penjing.core.files import atomic_write_text, holding, sync_tree, writing
from penjing.core.manifest import read_json_object
from penjing.core.progress import Progress, Silent
from penjing.core.remote.files import is_remote
from penjing.core.text.chat import ChatTemplate
from penjing.core.text.records import Record
from penjing.core.text.source_files import remote_files_below
from penjing.core.text.tokenizer import Tokenizer
from penjing.train.data.corpora import documents, domain_names, domain_of, size_of
from penjing.train.data.shards import INDEX_NAME, ShardIndex, ShardWriter, read_index, shard_dtype, write_index
from penjing.train.data.survey import Survey, forget_survey, load_survey, survey

END_OF_TEXT = "<|endoftext|>"
_LAYOUT = 4  # raise it when packing changes, so that older shards in the cache are not taken
_TOGETHER = 256  # documents encoded in one call
_DONE = "packed.json"  # while packing: documents and tokens of each split that are on the disk
_LONGEST = 1 << 22  # characters
_SPLITS = ("train", "held_out")
_PUT_DOWN_S = 10.0  # what is packed in so many seconds is packed again after a kill
_TOKENIZER_CONFIG = "tokenizer_config.json"  # written last of a tokenizer


def prepare_tokens(
    sources: tuple[str, ...],
    vocab_size: int,
    *,
    held_out: float,
    tokenizer: Path | None = None,
    column: str | None = None,
    most_damaged: float = 0.01,
    by_domain: bool = False,
    progress: Progress | None = None,
) -> Path:
    """The folder of token shards (splits "train" and "held_out") of `sources`, made on the first call and cached.

    Args:
        sources: see `corpora.documents`.
        vocab_size: of the tokenizer to train, or the largest that `tokenizer` may have.
        held_out: share of the text kept apart, in whole clusters of near duplicates; see `survey`.
        tokenizer: folder with a `tokenizer.json` to use instead of training one.
        column: the field of tables and JSON lines that holds the text.
        most_damaged: share of the documents that may be damaged, and are left out.
        by_domain: the splits are "train@DOMAIN" and "held_out@DOMAIN"; see `domain_of`.

    Raises:
        ConfigError: the tokenizer's vocabulary is larger than the model's, or the texts are too few for `vocab_size`.
        InputError: a source is missing, empty, not text, damaged, or changes while it is read.
        SetupError: disk full, no permission, or a package is missing that the sources need.
    """
    made_of = (sources, vocab_size, held_out, tokenizer, column, most_damaged, by_domain)
    folder = cache_dir() / "tokens" / _fingerprint(*made_of)
    # Every process of a run comes here before it joins the others: the first one works, the others wait for its lock.
    with holding(folder.with_suffix(".lock")):
        if not (folder / INDEX_NAME).exists():
            work = folder.with_suffix(".work")  # a killed process leaves it, and the next goes on there
            try:
                with writing(folder):
                    work.mkdir(exist_ok=True)
                    pack(
                        work, sources, vocab_size, held_out=held_out, tokenizer=tokenizer, column=column,
                        most_damaged=most_damaged, by_domain=by_domain, progress=progress or Silent(),
                    )  # fmt: skip
                    if _fingerprint(*made_of) != folder.name:
                        raise InputError(
                            f"data.sources {list(sources)} were changed while they were read; run again when they stay "
                            "as they are"
                        )
                    sync_tree(work)
                    work.rename(folder)
            except (ConfigError, InputError):  # nothing to go on with: other sources are packed in another folder
                shutil.rmtree(work, ignore_errors=True)
                raise
    if progress is not None:
        splits = read_index(folder).splits
        trained, held = (
            sum(file.tokens for name, files in splits.items() if name.partition("@")[0] == split for file in files)
            for split in _SPLITS
        )
        progress.note(f"{trained:,} tokens to learn and {held:,} held out, packed in {folder}")
    return folder


def pack(
    folder: Path,
    sources: tuple[str, ...],
    vocab_size: int,
    *,
    held_out: float,
    tokenizer: Path | None,
    progress: Progress,
    column: str | None = None,
    most_damaged: float = 0.01,
    by_domain: bool = False,
) -> None:
    """Fill `folder` with shards, index and tokenizer; see `prepare_tokens`. Where an earlier call on the same sources
    was killed, go on with what it has left there."""
    size = sum(size_of(source) for source in sources)
    template = None if tokenizer is None else ChatTemplate.from_folder(tokenizer)
    if (split := load_survey(folder)) is None:
        progress.start("looking for near duplicates", size)
        names = domain_names(sources)
        everything = ((record, names[source]) for source in sources for record in documents(source, column))
        written, said = partial(_written, template=template), domain_of if by_domain else None
        split = survey(everything, written, held_out, most_damaged, folder, progress, said)
        split.save(folder)
        if split.note:
            progress.note(split.note)
    if not (split.trained > 0).any():
        raise InputError(f"data.sources {list(sources)} hold no text; name others")
    texts = _Texts(sources, column, split, template)
    ready = _made_tokenizer(folder, texts, vocab_size, tokenizer, size, progress)
    begin, end = list(ready.begin), ready.eos_token_ids[-1]
    done = read_json_object(folder / _DONE) if (folder / _DONE).exists() else {"documents": 0}
    writers = {split: _writer(folder, split, vocab_size, done[split]) for split in done if split != "documents"}
    progress.start("packing tokens", size)
    stream, num_documents, put_down_at = iter(texts), int(done["documents"]), time.monotonic()
    for _, trained, held in islice(stream, num_documents):
        progress.advance(len(trained) + len(held))
    while some := list(islice(stream, _TOGETHER)):
        pieces = [
            (split_name + (f"@{domain}" if by_domain else ""), piece, place == 0, last)
            for domain, *texts_of in some
            for split_name, text in zip(_SPLITS, texts_of, strict=True)
            if text
            for place, (piece, last) in enumerate(_pieces(text))
        ]
        encoded = ready.backend.encode_batch([piece for _, piece, *_ in pieces], add_special_tokens=False)
        for (name, _, first, last), encoding in zip(pieces, encoded, strict=True):
            if name not in writers:
                writers[name] = _writer(folder, name, vocab_size, 0)
            before = begin if first and encoding.ids[: len(begin)] != begin else []  # as chat templates write it
            writers[name].add([*before, *encoding.ids, *([end] if last else [])])
        num_documents += len(some)
        progress.advance(sum(len(piece) for _, piece, *_ in pieces))
        if time.monotonic() - put_down_at >= _PUT_DOWN_S:
            done = {split: writer.put_down() for split, writer in writers.items()}
            atomic_write_text(folder / _DONE, json.dumps({"documents": num_documents, **done}))
            put_down_at = time.monotonic()
    if num_documents != len(split.trained):
        raise InputError("data.sources have shrunk while they were read; run again when they stay as they are")
    splits = {split: files for split, writer in writers.items() if (files := writer.close())}
    write_index(
        folder,
        ShardIndex(
            dtype=shard_dtype(vocab_size),
            vocab_size=ready.vocab_size,
            end_of_text=end,
            begin_of_text=ready.begin,
            source={"sources": list(sources), "held_out": held_out, "python": platform.python_version()},
            splits=splits,
        ),
    )
    (folder / _DONE).unlink(missing_ok=True)
    forget_survey(folder)


def _made_tokenizer(
    folder: Path, texts: _Texts, vocab_size: int, tokenizer: Path | None, size: int, progress: Progress
) -> Tokenizer:
    """That of `tokenizer`, or one that is trained on `texts`, of `size` bytes; in `folder`.

    Raises:
        ConfigError: it has too many tokens, or none that ends a text.
    """
    if tokenizer is not None:
        copy_tokenizer(tokenizer, folder)
    elif not (folder / _TOKENIZER_CONFIG).exists():
        progress.start("training the tokenizer", size)
        trained = (trained for _, trained, _ in texts)
        _train_tokenizer(_told(trained, progress), vocab_size).save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
        atomic_write_text(folder / _TOKENIZER_CONFIG, json.dumps(settings, indent=2) + "\n")
    made = Tokenizer.from_folder(folder)
    if made.vocab_size > vocab_size:
        raise ConfigError(
            f"data.tokenizer {tokenizer} has {made.vocab_size} tokens, model.vocab_size is {vocab_size}; "
            f"set model.vocab_size = {made.vocab_size}"
        )
    if not made.eos_token_ids:
        raise ConfigError(
            f"data.tokenizer {tokenizer} names no end-of-text token, which separates documents; add eos_token"
        )
    return made


class _Texts:
    """(Domain, trained text, held-out text) of each document, as often as they are asked for; conversations are written
    by `template`."""

    def __init__(
        self, sources: tuple[str, ...], column: str | None, split: Survey, template: ChatTemplate | None
    ) -> None:
        self._sources, self._column, self._split, self._template = sources, column, split, template

    def __iter__(self) -> Iterator[tuple[str, str, str]]:
        index, names = 0, domain_names(self._sources)
        for source in self._sources:
            for record in documents(source, self._column):
                if not isinstance(record, Record):
                    continue
                try:
                    text = _written(record, self._template)
                except RequestError:  # the survey has counted it as damaged
                    continue
                yield domain_of(record, names[source]), *self._split.parts(index, text)
                index += 1


def _written(record: Record, template: ChatTemplate | None) -> str:
    """The text of a document; a conversation is written by `template`.

    Raises:
        InputError: it is needed, and there is none.
        RequestError: it refuses the conversation, or makes no text of it.
    """
    if record.text is not None:
        return record.text
    if template is None:
        raise InputError(
            f"{record.name}: conversations need a chat template; name the folder of a tokenizer that has one "
            "(data.tokenizer), or give texts"
        )
    text = template.render(record.messages, add_generation_prompt=False)
    if not text.strip():
        raise RequestError("messages: the chat template makes no text of them")
    return text


def _writer(folder: Path, split: str, vocab_size: int, written: int) -> ShardWriter:
    return ShardWriter(
        folder, re.sub(r"[^\w.-]", lambda sign: f"%{ord(sign[0]):x}", split), vocab_size, written=written
    )


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """`text` in pieces of at most `_LONGEST` characters, each with whether it is the last, cut before a line break
    where there is one: a text of 200 MB in one call takes gigabytes."""
    begin = 0
    while len(text) - begin > _LONGEST:
        found = text.rfind("\n", begin + 1, begin + _LONGEST)
        end = found if found > 0 else begin + _LONGEST
        yield text[begin:end], False
        begin = end
    yield text[begin:], True


def _told(texts: Iterable[str], progress: Progress) -> Iterator[str]:
    for text in texts:
        progress.advance(len(text))
        yield text


def _train_tokenizer(texts: Iterable[str], vocab_size: int) -> Backend:
    if vocab_size < 257:
        raise ConfigError(f"model.vocab_size={vocab_size}: a byte-level tokenizer needs 257 tokens or more")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _fingerprint(
    sources: tuple[str, ...],
    vocab_size: int,
    held_out: float,
    tokenizer: Path | None,
    column: str | None,
    most_damaged: float,
    by_domain: bool,
) -> str:
    facts: list[object] = [_LAYOUT, sources, vocab_size, held_out, column, most_damaged, by_domain]
    facts += domain_names(sources).values() if by_domain else ()
    for source in sources:
        if source.startswith("builtin:"):
            facts.append(platform.python_version())
            continue
        if is_remote(source):
            facts += [(file.address, file.size, file.version) for file, _ in remote_files_below(source)]
            continue
        root = Path(source)
        paths = sorted(root.rglob("*")) if root.is_dir() else [root]
        facts += [(str(path.absolute()), stat.st_size, stat.st_mtime_ns) for path in paths if (stat := _stat(path))]
    if tokenizer is not None:
        path = tokenizer / "tokenizer.json"
        if not path.exists():
            raise InputError(f"data.tokenizer: {path} does not exist; name a folder with a tokenizer.json")
        for name in TOKENIZER_FILES:  # conversations are written by the template, and documents end as the others say
            if (path := tokenizer / name).is_file():
                facts += [name, hashlib.sha256(path.read_bytes()).hexdigest()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _stat(path: Path) -> os.stat_result | None:
    return path.stat() if path.is_file() else None
