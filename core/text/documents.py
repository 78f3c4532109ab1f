"""The user's own texts: files, folders of files, and JSONL files of texts or of conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from penjing.core.errors import InputError, RequestError
from penjing.core.text.chat import ChatTemplate
from penjing.core.text.tokenizer import Tokenizer

JSONL = ".jsonl"


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
            paths: UTF-8 files and folders of them. Each line of a file `.jsonl` is an object with `text`, or with
                `messages`, a conversation.
            setting: whom errors name, such as "data.calibrate".

        Raises:
            InputError: a path that does not exist or holds no text, or a line that is no document; each named.
        """
        return [token for path in paths for file in text_files(path, setting) for token in self._file(file, setting)]

    def conversation(self, messages: Any) -> list[int]:
        """The tokens of a conversation.

        Raises:
            InputError: the model has no chat template.
            RequestError: malformed messages, or the template rejects them.
        """
        if self.template is None:
            raise InputError(f"{self._folder} has no chat template, which conversations need; give texts instead")
        text = self.template.render(messages, add_generation_prompt=False)
        return self.tokenizer.encode(text, add_special=False)

    def _file(self, path: Path, setting: str) -> Iterator[int]:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise InputError(f"{setting}: {path} cannot be read as UTF-8 text: {error}") from error
        if path.suffix != JSONL:
            yield from self._plain(text)
            return
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield from self._line(line, f"{setting}: {path}, line {number}")

    def _line(self, line: str, where: str) -> list[int]:
        try:
            document = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{where}: not JSON ({error})") from None
        values = document if isinstance(document, dict) else {}
        if isinstance(values.get("text"), str):
            return self._plain(values["text"])
        if "messages" not in values:
            raise InputError(f'{where}: an object with "text" or "messages" is needed, not {line[:60]!r}')
        try:
            return self.conversation(values["messages"])
        except RequestError as error:
            raise InputError(f"{where}: {error}") from None

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, allow_special=False, add_special=False)


def text_files(path: Path, setting: str) -> list[Path]:
    """The files that `Documents.tokens` reads of `path`, in its order.

    Raises:
        InputError: there are none.
    """
    if not path.exists():
        raise InputError(f"{setting}: {path} does not exist; name a text file, a {JSONL} file or a folder of them")
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{setting}: {path} holds no file; name a folder of texts")
    return files
