"""Translation of sentences behind one interface: apertium by Debian's packages, or a model of yours by CTranslate2."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Protocol

from penjing.core.cluster.start import no_process
from penjing.core.errors import InputError, SetupError
from penjing.core.progress import Silent
from penjing.curate.documents.debian import fetch_debian

_APERTIUM = (  # what the pairs of Debian 12 need, beside what every Debian has
    "apertium", "libapertium3", "lttoolbox", "liblttoolbox3", "apertium-lex-tools", "libapertium-lex-tools1",
    "libirstlm1",
)  # fmt: skip
_MODES = Path("usr/share/apertium/modes")
_PAIR = re.compile(r"[a-z]{2,3}(?:_[A-Z]{2})?-[a-z]{2,3}(?:_[A-Z]{2})?")
_SECONDS = 120.0  # a call may take, beside a second for each 500 characters
_CHARS_A_SECOND = 500
_UNHEARD = (-13, 141)  # of a program whose reader has ended: that one says why
_PIECES = ("source.spm", "target.spm")  # sentencepiece models of OPUS-MT
_MODEL, _SETTINGS = "model.bin", "config.json"
_BEAMS, _TOKENS_TOGETHER = 2, 2048
_LONGEST = 500  # pieces of a sentence; OPUS-MT has 512 positions, and CTranslate2 fails beyond them


class Translator(Protocol):
    """Translates one way."""

    def __call__(self, sentences: list[str]) -> list[str] | None:
        """The sentences in the other language, one for each; None where their number changed on the way.

        Raises:
            SetupError: it died, or gave no answer.
        """
        ...


class Apertium:
    """One mode of apertium, such as eng-spa: a chain of programs, as the mode's file says it.

    Raises:
        InputError: no such mode.
        SetupError: the packages of `pair` cannot be fetched.
    """

    def __init__(self, pair: str, mode: str) -> None:
        self._roots = apertium_folders(pair)
        self._mode = mode
        modes = {path.stem: path for root in self._roots for path in (root / _MODES).glob("*.mode")}
        if mode not in modes:
            raise InputError(f"steps.pair: apertium-{pair} has no mode {mode}; it has {', '.join(sorted(modes))}")
        chain = [["apertium-destxt"], *_programs(modes[mode].read_text(encoding="utf-8")), ["apertium-retxt"]]
        self._chain = [[self._placed(word) for word in program] for program in chain]

    def __call__(self, sentences: list[str]) -> list[str] | None:
        """See `Translator`; a call takes half a second and more, whatever it is given."""
        text = "\n\n".join(" ".join(sentence.split()) for sentence in sentences)
        found = [each.strip() for each in re.split(r"\n[ \t]*\n", self._run(text).strip())]
        return found if len(found) == len(sentences) else None

    def _run(self, text: str) -> str:
        paths = [str(root / "usr/bin") for root in self._roots]
        libraries = [str(folder) for root in self._roots for folder in (root / "usr/lib").glob("*-linux-*")]
        environment = {
            **os.environ, "LC_ALL": "C.UTF-8", "PATH": os.pathsep.join([*paths, os.environ.get("PATH", "")]),
            "LD_LIBRARY_PATH": os.pathsep.join([*libraries, os.environ.get("LD_LIBRARY_PATH", "")]),
        }  # fmt: skip
        processes: list[subprocess.Popen[bytes]] = []
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
            given.write(f"{text}\n".encode())
            given.seek(0)
            source: Any = given
            try:
                for program in self._chain:
                    process = subprocess.Popen(
                        program, stdin=source, stdout=subprocess.PIPE, stderr=errors, env=environment
                    )
                    if processes:
                        source.close()  # else a program would not hear that the next one has ended
                    processes.append(process)
                    source = process.stdout
                out, _ = processes[-1].communicate(timeout=_SECONDS + len(text) / _CHARS_A_SECOND)
            except FileNotFoundError as error:
                raise SetupError(f"apertium's {error.filename} is missing; apt-get install apertium") from None
            except OSError as error:
                raise no_process(error) from error
            except subprocess.TimeoutExpired:
                raise SetupError(
                    f"apertium ({self._mode}) gave no answer; run again, finished tasks are kept"
                ) from None
            finally:
                if len(processes) < len(self._chain) or processes[-1].poll() is None:  # it was cut short
                    for process in processes:
                        process.kill()
                codes = [process.wait() for process in processes]
            errors.seek(0)
            said = errors.read().decode("utf-8", "replace").strip().splitlines()
        if failed := [self._chain[place][0] for place, code in enumerate(codes) if code not in (0, *_UNHEARD)]:
            raise SetupError(
                f"apertium's {Path(failed[-1]).name} failed ({said[0] if said else 'it gave no reason'}); apt-get "
                "install apertium, or leave the step out"
            )
        return out.decode("utf-8", "replace")

    def _placed(self, word: str) -> str:
        """`word` of a mode, its files where the packages were unpacked."""
        if not word.startswith("/usr/share/"):
            return word
        return next((str(root / word[1:]) for root in self._roots if (root / word[1:]).exists()), word)


def apertium_folders(pair: str) -> tuple[Path, ...]:
    """Where the files of apertium and of the languages `pair`, such as eng-spa, are: the machine's own, or packages of
    Debian, fetched once (10 MB).

    Raises:
        InputError: no name of a pair.
        SetupError: they cannot be fetched.
    """
    if not _PAIR.fullmatch(pair):
        raise InputError(f"steps.pair: {pair!r} is no pair of languages; write it as Debian's packages do: eng-spa")
    if shutil.which("apertium-destxt") and (Path("/") / _MODES / f"{pair}.mode").is_file():
        return (Path("/"),)
    return tuple(fetch_debian(package, Silent()) for package in (f"apertium-{pair}", *_APERTIUM))


def _programs(mode: str) -> list[list[str]]:
    """The programs of a mode's file, which is one line for a shell: $1 stands for how unknown words are shown, here
    without a mark, and $2 for nothing."""
    lexer = shlex.shlex(mode, posix=True, punctuation_chars="|")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if word == "|":
            found.append([])
        elif word != "$2":
            found[-1].append("-n" if word == "$1" else word)
    return found


class CTranslate2:
    """A model that CTranslate2 has converted from OPUS-MT, on one thread: a folder with model.bin, config.json and the
    two models of sentencepiece, `ct2-transformers-converter --model Helsinki-NLP/opus-mt-en-de --output_dir FOLDER
    --copy_files source.spm target.spm`.

    Raises:
        InputError: `folder` lacks a file, or a file is damaged.
        SetupError: ctranslate2 or sentencepiece is not installed.
    """

    def __init__(self, folder: Path) -> None:
        translator_files(folder)
        try:
            import ctranslate2  # pyright: ignore[reportMissingImports]
            import sentencepiece  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise SetupError(
                f'translator = "ctranslate2" needs {error.name}, which is not installed: pip install '
                "'penjing[translate]'"
            ) from None
        try:
            self._model: Any = ctranslate2.Translator(str(folder), inter_threads=1, intra_threads=1)
            self._source, self._target = (
                sentencepiece.SentencePieceProcessor(model_file=str(folder / name)) for name in _PIECES
            )
            settings: dict[str, Any] = dict(json.loads((folder / _SETTINGS).read_text(encoding="utf-8")))
        except (RuntimeError, OSError, TypeError, ValueError) as error:
            raise InputError(f"steps: {folder} cannot be opened by CTranslate2: {error}") from None
        # Only one of CTranslate2's two converters of OPUS-MT has the model add the end that it was trained with.
        self._end = [] if settings.get("add_source_eos") else [settings.get("eos_token", "</s>")]

    def __call__(self, sentences: list[str]) -> list[str] | None:
        """See `Translator`; None also where a sentence is longer than the model reads."""
        pieces = [[*each, *self._end] for each in self._source.encode(sentences, out_type=str)]
        if any(len(each) > _LONGEST for each in pieces):
            return None
        found = self._model.translate_batch(
            pieces, beam_size=_BEAMS, max_batch_size=_TOKENS_TOGETHER, batch_type="tokens"
        )
        return [self._target.decode(each.hypotheses[0]) for each in found]


def translator_files(folder: Path) -> tuple[Path, ...]:
    """The files of a folder for `CTranslate2`.

    Raises:
        InputError: one is missing.
    """
    found = tuple(folder / name for name in (_MODEL, _SETTINGS, *_PIECES))
    if missing := [path.name for path in found if not path.is_file()]:
        raise InputError(
            f"steps: {folder} lacks {', '.join(missing)}; convert a model of OPUS-MT by ct2-transformers-converter, "
            f"with --copy_files {' '.join(_PIECES)}"
        )
    return found
