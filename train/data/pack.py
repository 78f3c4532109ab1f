"""Text → token shards: trains a byte-level BPE tokenizer (or takes one), encodes, packs; done once, kept in the
cache."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from penjing.core.cache import cache_dir
from penjing.core.checkpoint.decoder import copy_tokenizer
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text, sync_tree, writing
from penjing.core.manifest import read_json_object
from penjing.core.progress import Progress, Silent
from penjing.core.text.tokenizer import Tokenizer
from penjing.train.data.corpora import Document, documents, is_held_out, size_of
from penjing.train.data.shards import INDEX_NAME, ShardIndex, ShardWriter, shard_dtype, write_index

END_OF_TEXT = "<|endoftext|>"
_LAYOUT = 1  # raise it when packing changes, so that older shards in the cache are not taken
_TOGETHER = 256  # documents encoded in one call
_DONE = "packed.json"  # while packing: documents and tokens of each split that are on the disk
_PUT_DOWN_S = 10.0  # what is packed in so many seconds is packed again after a kill
_TOKENIZER_CONFIG = "tokenizer_config.json"  # written last of a tokenizer


def prepare_tokens(
    sources: tuple[str, ...],
    vocab_size: int,
    *,
    held_out: float,
    tokenizer: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder of token shards (splits "train" and "held_out") of `sources`, made on the first call and cached.

    Args:
        sources: see `corpora.documents`.
        vocab_size: of the tokenizer to train, or the largest that `tokenizer` may have.
        held_out: share of documents kept apart.
        tokenizer: folder with a `tokenizer.json` to use instead of training one.

    Raises:
        ConfigError: the tokenizer's vocabulary is larger than the model's, or the texts are too few for `vocab_size`.
        InputError: a source is missing, empty or not text.
        SetupError: disk full, no permission.
    """
    folder = cache_dir() / "tokens" / _fingerprint(sources, vocab_size, held_out, tokenizer)
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    # Every process of a run comes here before it joins the others: the first one works, the others wait for its lock.
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / INDEX_NAME).exists():
            work = folder.with_suffix(".work")  # a killed process leaves it, and the next goes on there
            try:
                with writing(folder):
                    work.mkdir(exist_ok=True)
                    pack(
                        work, sources, vocab_size, held_out=held_out, tokenizer=tokenizer, progress=progress or Silent()
                    )
                    sync_tree(work)
                    work.rename(folder)
            except (ConfigError, InputError):  # nothing to go on with: other sources are packed in another folder
                shutil.rmtree(work, ignore_errors=True)
                raise
    return folder


def pack(
    folder: Path,
    sources: tuple[str, ...],
    vocab_size: int,
    *,
    held_out: float,
    tokenizer: Path | None,
    progress: Progress,
) -> None:
    """Fill `folder` with shards, index and tokenizer; see `prepare_tokens`. Where an earlier call on the same sources
    was killed, go on with what it has left there."""
    size = sum(size_of(source) for source in sources)
    if tokenizer is not None:
        copy_tokenizer(tokenizer, folder)
    elif not (folder / _TOKENIZER_CONFIG).exists():
        progress.start("training the tokenizer", size)
        texts = (text for name, text in _all(sources) if not is_held_out(name, held_out))
        _train_tokenizer(_told(texts, progress), vocab_size).save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
        atomic_write_text(folder / _TOKENIZER_CONFIG, json.dumps(settings, indent=2) + "\n")
    ready = Tokenizer.from_folder(folder)
    if ready.vocab_size > vocab_size:
        raise ConfigError(
            f"data.tokenizer {tokenizer} has {ready.vocab_size} tokens, model.vocab_size is {vocab_size}; "
            f"set model.vocab_size = {ready.vocab_size}"
        )
    if not ready.eos_token_ids:
        raise ConfigError(
            f"data.tokenizer {tokenizer} names no end-of-text token, which separates documents; add eos_token"
        )
    end = ready.eos_token_ids[-1]
    done = read_json_object(folder / _DONE) if (folder / _DONE).exists() else {"documents": 0}
    writers = {
        split: ShardWriter(folder, split, vocab_size, written=done.get(split, 0)) for split in ("train", "held_out")
    }
    progress.start("packing tokens", size)
    stream, num_documents, put_down_at = _all(sources), int(done["documents"]), time.monotonic()
    for _, text in islice(stream, num_documents):
        progress.advance(len(text))
    while some := list(islice(stream, _TOGETHER)):
        encoded = ready.backend.encode_batch([text for _, text in some], add_special_tokens=False)
        for (name, _), encoding in zip(some, encoded, strict=True):
            writers["held_out" if is_held_out(name, held_out) else "train"].add([*encoding.ids, end])
        num_documents += len(some)
        progress.advance(sum(len(text) for _, text in some))
        if time.monotonic() - put_down_at >= _PUT_DOWN_S:
            done = {split: writer.put_down() for split, writer in writers.items()}
            atomic_write_text(folder / _DONE, json.dumps({"documents": num_documents, **done}))
            put_down_at = time.monotonic()
    splits = {split: files for split, writer in writers.items() if (files := writer.close())}
    if "train" not in splits:
        raise InputError(f"data.sources {list(sources)} hold no text; name others")
    write_index(
        folder,
        ShardIndex(
            dtype=shard_dtype(vocab_size),
            vocab_size=ready.vocab_size,
            end_of_text=end,
            source={"sources": list(sources), "held_out": held_out, "python": platform.python_version()},
            splits=splits,
        ),
    )
    (folder / _DONE).unlink(missing_ok=True)


def _all(sources: tuple[str, ...]) -> Iterator[Document]:
    for source in sources:
        yield from documents(source)


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


def _fingerprint(sources: tuple[str, ...], vocab_size: int, held_out: float, tokenizer: Path | None) -> str:
    facts: list[object] = [_LAYOUT, sources, vocab_size, held_out]
    for source in sources:
        if source.startswith("builtin:"):
            facts.append(platform.python_version())
            continue
        root = Path(source)
        paths = sorted(root.rglob("*")) if root.is_dir() else [root]
        facts += [(str(path.absolute()), stat.st_size, stat.st_mtime_ns) for path in paths if (stat := _stat(path))]
    if tokenizer is not None:
        path = tokenizer / "tokenizer.json"
        if not path.exists():
            raise InputError(f"data.tokenizer: {path} does not exist; name a folder with a tokenizer.json")
        facts.append(hashlib.sha256(path.read_bytes()).hexdigest())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _stat(path: Path) -> os.stat_result | None:
    return path.stat() if path.is_file() else None
