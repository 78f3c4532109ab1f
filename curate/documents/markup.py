"""The text of marked-up files: the main part of HTML pages by trafilatura, and manual pages in roff."""

from __future__ import annotations

import re

from penjing.curate.documents.needs import needed

_COMMENT = re.compile(r'(?:\.|\')?\\["#].*')
_FONT = re.compile(r"\\f(?:\[[^]]*\]|\(..|.)|\\[sS][-+]?\d+|\\[mMFR](?:\[[^]]*\]|.)|\\[hvwlL]'[^']*'|\\[kz].")
_NAMED = re.compile(r"\\(?:\((..)|\[([^]]+)\]|\*(?:\((..)|\[([^]]+)\]|(.)))")
_SIGNS = {
    "em": "—", "en": "–", "hy": "-", "mi": "-", "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "aq": "'", "dq": '"',
    "bu": "•", "co": "©", "rg": "®", "tm": "™", "ti": "~", "ha": "^", "rs": "\\", "ga": "`", "aa": "´", "pl": "+",
    "mu": "×",
    "eq": "=", "ge": "≥", "le": "≤", "!=": "≠", "->": "→", "<-": "←", "Fo": "«", "Fc": "»", "ss": "ß", "at": "@",
    "sh": "#", "S": "®", "R": "®", "Tm": "™", "L\"": "“", "R\"": "”", "C`": "", "C'": "", "--": "-",
    ":a": "ä", ":o": "ö", ":u": "ü", ":A": "Ä", ":O": "Ö", ":U": "Ü", "'e": "é", "'a": "á", "'o": "ó", "'i": "í",
    "'u": "ú", "`e": "è", "`a": "à", "^e": "ê", "^a": "â", "^o": "ô", "^i": "î", "^u": "û", ",c": "ç", "~n": "ñ",
    "oe": "œ", "OE": "Œ",
}  # fmt: skip
_FONTS = frozenset("B I R BI BR IB IR RB RI SM SB Nm Fl Ar Cm Pa Ic Va Dv Ev Em Sy Li Fn Ft Fa Xr".split())  # noqa: SIM905
_BREAKS = frozenset("PP LP P TP IP HP br sp nf fi RS RE EX EE Pp It Bl El Bd Ed TQ YS SY".split())  # noqa: SIM905
_HEADINGS = frozenset("SH SS Sh Ss".split())  # noqa: SIM905
_ARGUMENT = re.compile(r'"((?:[^"]|"")*)"?|(\S+)')


def html_text(page: str) -> str:
    """The main text of an HTML page: without menus, headers and scripts; "" where there is none."""
    return needed("trafilatura").extract(page, include_comments=False, include_tables=True, fast=True) or ""


def roff_text(source: str) -> str:
    """The text of a manual page in roff with the man or mdoc macros: paragraphs and headings without fonts."""
    lines: list[str] = []
    words: list[str] = []
    skipping, kept = False, False

    def end() -> None:
        if words:
            lines.append(" ".join(words))
            words.clear()

    for raw in source.split("\n"):
        if skipping:  # the definition of a macro
            skipping = not raw.startswith("..")
            continue
        if not raw.startswith((".", "'")):
            text = _plain(raw)
            if kept:
                lines.append(text)
            elif text.strip():
                words.append(text.strip())
            else:
                end()
            continue
        name, _, rest = raw[1:].strip().partition(" ")
        if name in ("de", "ig", "am"):
            skipping = True
        elif name in _HEADINGS:
            end()
            lines += ["", _plain(" ".join(_arguments(rest)))]
        elif name in _FONTS:
            joined = "" if name in ("BI", "BR", "IB", "IR", "RB", "RI") else " "
            words.append(_plain(joined.join(_arguments(rest))))
        elif name in _BREAKS:
            end()
            kept = name in ("nf", "EX", "Bd") or (kept and name not in ("fi", "EE", "Ed"))
            if name in ("PP", "LP", "P", "TP", "IP", "Pp", "sp"):
                lines.append("")
            if name in ("IP", "It") and rest:
                words.append(_plain(" ".join(_arguments(rest)[:1])))
    end()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines)).strip() + "\n"


def _arguments(text: str) -> list[str]:
    text = _COMMENT.sub("", text)
    return [(found[1] or found[2] or "").replace('""', '"') for found in _ARGUMENT.finditer(text)]


def _plain(text: str) -> str:
    text = _FONT.sub("", _COMMENT.sub("", text))
    text = _NAMED.sub(_sign, text)
    text = text.replace("\\-", "-").replace("\\&", "").replace("\\e", "\\\\").replace("\\ ", " ").replace("\\~", " ")
    return re.sub(r"\\([^\\])", lambda found: "" if found[1] in "|^/,:%c)!p" else found[1], text).replace("\\\\", "\\")


def _sign(found: re.Match[str]) -> str:
    name = next(group for group in found.groups() if group is not None)
    if re.fullmatch(r"u[0-9A-F]{4,6}", name):
        return chr(int(name[1:], 16))
    return _SIGNS.get(name, "")
