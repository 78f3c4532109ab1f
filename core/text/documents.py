"""The user's own texts: files, folders of files, and JSONL files of texts or of conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from penjing.core.errors import InputError, RequestError
from penjing.core.text.chat import ChatTemplate
from penjing.core.text.records import LINES, TABLES, Damage, Record, form_of, read_records
from penjing.core.text.source_files import files_below
from penjing.core.text.tokenizer import Tokenizer


class Documents:
    """Texts in the tokens of one model; conversations are written by its own chat template.

    Args:
        folder: the model's.

    Raises:
        InputError: a malformed tokenizer or template.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.tokenizer = Tokenizer.from_folder(folder)
        self.template = ChatTemplate.from_folder(folder)

    def tokens(self, paths: Iterable[Path], setting: str) -> list[int]:
        """The tokens of all documents in `paths`, in a fixed order.

        Args:
            paths: as of `read_documents`.
            setting: whom errors name, such as "data.calibrate".

        Raises:
            InputError: as `read_documents`, or a conversation that the model's template does not take.
        """
        return [token for document in read_documents(paths, setting) for token in self._tokens(document, prompt=False)]

    def prompts(self, paths: Iterable[Path], setting: str) -> list[list[int]]:
        """The tokens of each prompt in `paths`, as the engine gets them: a line of a file each, and conversations that
        an assistant is to answer.

        Raises:
            InputError: as `tokens`.
        """
        return [self._tokens(document, prompt=True) for document in read_documents(paths, setting, lines=True)]

    def conversation(self, messages: Any, *, prompt: bool = False) -> list[int]:
        """The tokens of a conversation; of a `prompt` with the beginning of the next answer.

        Raises:
            InputError: the model has no chat template.
            RequestError: malformed messages, or the template rejects them.
        """
        if self.template is None:
            raise InputError(f"{self._folder} has no chat template, which conversations need; give texts instead")
        text = self.template.render(messages, add_generation_prompt=prompt)
        return self.tokenizer.encode(text, add_special=False)

    def _tokens(self, document: Record, *, prompt: bool) -> list[int]:
        if document.text is not None:
            return self.tokenizer.encode(document.text, allow_special=False, add_special=prompt)
        try:
            return self.conversation(document.messages, prompt=prompt)
        except RequestError as error:
            raise InputError(f"{document.name}: {error}") from None


def read_documents(paths: Iterable[Path], setting: str, *, lines: bool = False) -> Iterator[Record]:
    """The documents in `paths`, in a fixed order.

    Args:
        paths: files and folders of them, see `read_records` and `files_below`. Each line of a file `.jsonl` is an
            object with `text`, or with `messages`, a conversation.
        setting: whom errors name, such as "data.calibrate".
        lines: each line of a text that is not empty is a document, too, and not the file.

    Raises:
        InputError: a path that does not exist or holds no text, or a line that is no document; each named.
        SetupError: a file needs a package that is not installed.
    """
    for file in (file for path in paths for file in text_files(path, setting)):
        for record in read_records(file, f"{setting}: {file}"):
            if isinstance(record, Damage):
                raise InputError(f"{record.name}: {record.reason}")
            if not lines or record.text is None or form_of(file) in (*LINES, *TABLES):
                yield record
                continue
            for number, line in enumerate(record.text.splitlines(), 1):
                if line.strip():
                    yield Record(f"{record.name}, line {number}", line)


def text_files(path: Path, setting: str) -> list[Path]:
    """The files that `read_documents` reads of `path`, in its order.

    Raises:
        InputError: there are none.
    """
    if not path.exists():
        raise InputError(f"{setting}: {path} does not exist; name a text file, a {LINES[0]} file or a folder of them")
    files = files_below(path)
    if not files:
        raise InputError(f"{setting}: {path} holds no file; name a folder of texts")
    return files
