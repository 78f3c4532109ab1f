"""Where a text holds personal data and secrets: e-mail addresses, telephone and card numbers, bank accounts (IBAN),
addresses of the internet, and keys of well-known forms.

Each finder first looks for a sign that costs little (an @, a run of digits, a prefix), and judges only what stands
there: by check digits (Luhn, ISO 7064 mod 97-10, by python-stdnum), by libphonenumber's metadata, by the registries of
addresses. What cannot be a person's is left: the names, numbers and networks that are reserved for documents.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from penjing.curate.documents.needs import needed

Kind = Literal["key", "email", "iban", "card", "ip", "phone"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # where two overlap, the earlier kind has it
Span = tuple[int, int]


@dataclass(frozen=True)
class Finding:
    """text[begin:end] is of `kind`; `value`: its normal form, equal for two ways to write one."""

    begin: int
    end: int
    kind: Kind
    value: str


def find_personal(text: str, kinds: tuple[Kind, ...] = KINDS, regions: tuple[str, ...] = ()) -> list[Finding]:
    """What `text` holds, in its order, without overlaps.

    Args:
        regions: countries (ISO 3166, such as "DE") whose telephone numbers are found as they are written there; those
            with + and the country's code are found without.
    """
    finders: dict[Kind, Callable[[], Iterator[tuple[Span, str]]]] = {
        "key": lambda: _keys(text),
        "email": lambda: _emails(text),
        "iban": lambda: _ibans(text),
        "card": lambda: _cards(text),
        "ip": lambda: _addresses(text),
        "phone": lambda: _phones(text, regions),
    }
    found: list[Finding] = []
    taken: set[int] = set()
    for kind in KINDS:
        if kind not in kinds:
            continue
        for (begin, end), value in finders[kind]():
            if taken.isdisjoint(range(begin, end)):
                taken.update(range(begin, end))
                found.append(Finding(begin, end, kind, value))
    return sorted(found, key=lambda each: each.begin)


# --- e-mail ---------------------------------------------------------------------------------------------------------
_DOMAIN = re.compile(r"(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}([^\W\d_]{2,24}|xn--[a-z0-9-]{2,59})(?![\w@])")
_RESERVED_DOMAIN = re.compile(r"(?:^|\.)(?:example(?:\.(?:com|org|net|edu))?|test|invalid|localhost|local)$")
_NO_DOMAIN = frozenset(  # files, and units of systemd
    (
        *("png", "jpg", "jpeg", "gif", "svg", "webp", "ico", "css", "js", "ts", "json", "html", "htm", "xml", "txt"),
        *("md", "py", "sh", "conf", "cfg", "ini", "log", "patch", "diff", "service", "socket", "timer", "mount"),
        *("automount", "target", "path", "slice", "scope", "device", "swap"),
    )
)


def _emails(text: str) -> Iterator[tuple[Span, str]]:
    at = text.find("@")
    while at >= 0:
        before = text[max(0, at - 64) : at]
        local, domain = _local_part(before), _DOMAIN.match(text, at + 1)
        if local and domain and domain[1].lower() not in _NO_DOMAIN and not _RESERVED_DOMAIN.search(domain[0].lower()):
            begin = at - len(local)
            yield (begin, domain.end()), text[begin : domain.end()].lower()
        at = text.find("@", at + 1)


def _local_part(before: str) -> str:
    run = re.search(r"[\w.!#$%&'*+/=?^`{|}~-]*\Z", before)
    part = (run[0] if run else "").lstrip(".!#$%&'*/=?^`{|}~-")
    for sign in ("mailto:", "=", "/", "|", "{", "`", "'"):  # of markup and addresses of the web that it stands in
        part = part.rpartition(sign)[2]
    return part if part and not part.endswith(".") and ".." not in part and re.search(r"\w", part) else ""


# --- internet -------------------------------------------------------------------------------------------------------
_V4 = re.compile(r"(?<![\w.+-])(?:\d{1,3}\.){3}\d{1,3}(?![\w-]|\.\d)")
_V6 = re.compile(
    r"(?<![\w:.])(?:"
    r"(?:[0-9A-Fa-f]{1,4}:){2,7}(?::|[0-9A-Fa-f]{1,4}|(?::[0-9A-Fa-f]{1,4}){1,6})"
    r"|[0-9A-Fa-f]{1,4}::(?:[0-9A-Fa-f]{1,4}:){0,6}[0-9A-Fa-f]{1,4}"
    r")(?![\w:]|\.\w)"
)
_NUMBERED = re.compile(
    r"(?:\b(?:v|ver|version|release|rev|revision|section|sect|chapter|clause|build|firmware|driver|oid|table|figure)"
    r"|§)[\s.:=(\"']{0,3}$",
    re.IGNORECASE,
)
_ADDRESS = re.compile(
    r"(?:\b(?:ip|ipv4|addr\w*|adress\w*|direcci\w+|host\w*|servers?|dns|nameserver|from|to|via|by|at|src|dst|ping|"
    r"inet|gateway|router|client|peer|remote|connect\w*|von|desde|depuis)\b|://|@|地址|アドレス|адрес)"
    r"[^\w\n]{0,4}(?:is |was |ist |es )?[\[(\"'<]?$",
    re.IGNORECASE,
)
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")


def _addresses(text: str) -> Iterator[tuple[Span, str]]:
    for pattern in (_V4, _V6):
        for found in pattern.finditer(text):
            try:
                address = ipaddress.ip_address(found[0])
            except ValueError:
                continue
            if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_V6:
                continue
            # private networks and those for documents are nobody's; "version 6.1.170.3" is no address
            if address.is_global and not address.is_multicast and _is_meant(text, found, address.version):
                yield found.span(), str(address)


def _is_meant(text: str, found: re.Match[str], version: int) -> bool:
    """Whether four numbers are an address: versions and sections look alike, and most of their numbers are small, as
    those of one address in a thousand are."""
    before = max(0, found.start() - 32), found.start()
    if version == 6:
        return True
    if _NUMBERED.search(text, *before):
        return False
    parts = sorted(int(part) for part in found[0].split("."))
    large = parts[3] >= 100 or parts[2] >= 20
    return large or bool(_ADDRESS.search(text, *before)) or text[found.end() : found.end() + 1] in ("/", ":")


# --- numbers with check digits --------------------------------------------------------------------------------------
_CARD = re.compile(
    r"(?<![\w.,+-])(?<!\d[ -])"
    r"(?:\d{12,19}|\d{4}([ -])\d{4}\1\d{4}\1\d{4}(?:\1\d{3})?|\d{4}([ -])\d{6}\2\d{4,5})"
    r"(?![\w-]|[ .,]\d)"
)
_ISSUERS = re.compile(  # ISO/IEC 7812: the first digits and lengths that networks of cards have
    r"4\d{15}|(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}|3[47]\d{13}|"
    r"(?:6011|64[4-9]\d|65\d\d)\d{12}|3(?:0[0-5]|[689]\d)\d{11}|35\d{14}|62\d{14}"
)
_SELDOM = re.compile(  # lengths and digits that codes of goods and numbers of records have more often
    r"4(?:\d{12}|\d{18})|62\d{15,17}|(?:50|5[6-8]|6[37])\d{10,17}|0604\d{8,15}|(?:1800|2131)\d{11}"
)
_PAID = re.compile(
    r"(?:card|visa|master|maestro|amex|american express|jcb|credit|debit|kredit|karte|carte|tarjeta|carta|karta|cartão|"
    r"карт|カード|卡)[^\d\n]{0,24}$",
    re.IGNORECASE,
)
_IBAN = re.compile(r"(?<![\w])[A-Z]{2}\d{2}(?:[ \u00a0]?[A-Z0-9]{4}){2,7}(?:[ \u00a0]?[A-Z0-9]{1,3})?(?!\w)")


def _cards(text: str) -> Iterator[tuple[Span, str]]:
    luhn = needed("stdnum.luhn")
    for found in _CARD.finditer(text):
        digits = re.sub(r"\D", "", found[0])
        paid = _SELDOM.fullmatch(digits) and _PAID.search(text, max(0, found.start() - 40), found.start())
        if (paid or _ISSUERS.fullmatch(digits)) and len(set(digits)) > 1 and luhn.is_valid(digits):
            yield found.span(), digits


def _ibans(text: str) -> Iterator[tuple[Span, str]]:
    iban = needed("stdnum.iban")
    for found in _IBAN.finditer(text):
        groups = found[0]
        while len(groups) > 14:  # a word in capitals may follow
            number = re.sub(r"\s", "", groups)
            if iban.is_valid(number, check_country=False):
                yield (found.start(), found.start() + len(groups)), number
                break
            groups, blank, _ = groups.replace("\u00a0", " ").rpartition(" ")
            if not blank:
                break


# --- telephone ------------------------------------------------------------------------------------------------------
_PHONE = re.compile(
    r"(?<![\w.,:/+=#$%&@-])(?P<number>(?:\+|00)?\(?\+?\d(?:[ \u00a0.\-/()\u2011]{0,3}\d){6,16})"
    r"(?:,? ?(?:x|ext\.?|extension) ?\d{1,6})?(?![\w%]|[.,:/-]\w)"
)
_DECIMAL = re.compile(r"\+?\d+\.\d+")
_CALLED = re.compile(
    r"\b(?:tel|tél|telephone|téléphone|telefon\w*|teléfono|telefono|phone|fon|fono|call|mobile?|móvil|cell|handy|portable|"
    r"fax|whatsapp|sms|hotline|rufnummer|numéro|celular)\b[^\d\n]{0,24}$|(?:电话|手机|電話|携帯|тел|☎|📞)[^\d\n]{0,12}$",
    re.IGNORECASE,
)

_RECORD = re.compile(r"(?:isbn|issn|doi|serial|order|ref|id|number|no|nr)[\s.:=#-]{0,3}$", re.IGNORECASE)


def _phones(text: str, regions: tuple[str, ...]) -> Iterator[tuple[Span, str]]:
    library = needed("phonenumbers")
    for found in _PHONE.finditer(text):
        written = found["number"]
        digits = re.sub(r"\D", "", written)
        abroad = written.startswith(("+", "(+", "00"))
        if not 7 <= len(digits) <= 17 or len(set(digits)) < 3 or _DECIMAL.fullmatch(written):
            continue
        called = _CALLED.search(text, max(0, found.start() - 48), found.start()) is not None
        record = _RECORD.search(text, max(0, found.start() - 16), found.start()) is not None
        for region in (None, *regions) if abroad else regions:
            if written.startswith("00") and region is None:
                written = f"+{written[2:]}"
            try:
                number = library.parse(written, region)
            except library.NumberParseException:
                continue
            # tables are full of digits: without a word for it, a number must be written as it is in its country
            bare = not record and _as_written_there(written, number)
            if library.is_valid_number(number) and (abroad or called or bare):
                yield found.span(), library.format_number(number, library.PhoneNumberFormat.E164)
                break


def _as_written_there(written: str, number: object) -> bool:
    """Whether its digits are grouped as its country groups them, by signs that records and large numbers do not have;
    or not grouped at all behind a 0, with which no other number begins."""
    if re.fullmatch(r"0[1-9]\d{7,}", written):
        return written != "0123456789"
    library = needed("phonenumbers")
    form = library.format_number(number, library.PhoneNumberFormat.NATIONAL)
    groups = [re.findall(r"\d+", each) for each in (form, written)]
    if len(groups[0]) < 2 or groups[0] != groups[1]:
        return False
    thousands = all(len(group) == 3 for group in groups[1][1:])
    return bool(re.search(r"[().-]|^0", written)) or (len(groups[1]) > 2 and not thousands)


# --- keys -----------------------------------------------------------------------------------------------------------
_KEY = re.compile(
    r"(?<![A-Za-z0-9_/+-])(?:"
    r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}"  # Amazon
    r"|gh[pousr]_[A-Za-z0-9]{36,251}|github_pat_[A-Za-z0-9_]{82}|glpat-[\w-]{20,64}"  # GitHub, GitLab
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,250}|xapp-\d-[A-Za-z0-9-]{20,250}"  # Slack
    r"|(?:sk|rk|pk)_live_[A-Za-z0-9]{16,247}|whsec_[A-Za-z0-9+/=]{32,80}"  # Stripe
    r"|AIza[\w-]{35}|ya29\.[\w-]{20,500}"  # Google
    r"|sk-(?:proj-|svcacct-|ant-(?:api|admin)\d\d-)?[\w-]{32,200}"  # OpenAI, Anthropic
    r"|hf_[A-Za-z]{34}|npm_[A-Za-z0-9]{36}|pypi-AgE[\w-]{50,500}"  # Hugging Face, npm, PyPI
    r"|SG\.[\w-]{22}\.[\w-]{43}|(?:AC|SK)[0-9a-f]{32}|shp(?:at|ca|pa|ss)_[a-fA-F0-9]{32}"  # SendGrid, Twilio, Shopify
    r"|eyJ[\w-]{10,2000}\.eyJ[\w-]{10,4000}\.[\w-]{16,1000}"  # JSON web tokens
    r")(?![A-Za-z0-9_])"
    r"|-----BEGIN (?P<sort>[A-Z ]{0,20}PRIVATE KEY(?: BLOCK)?)-----[\s\S]{16,8000}?-----END (?P=sort)-----"
)
_MARKS = (
    "AKIA", "ASIA", "ABIA", "ACCA", "gh", "glpat-", "xox", "xapp-", "_live_", "whsec_", "AIza", "ya29.", "sk-", "hf_",
    "npm_", "pypi-", "SG.", "AC", "SK", "shp", "eyJ", "PRIVATE KEY",
)  # fmt: skip


def _keys(text: str) -> Iterator[tuple[Span, str]]:
    if any(mark in text for mark in _MARKS):
        for found in _KEY.finditer(text):
            if len(set(found[0])) > 8:  # not xxxx… of a manual
                yield found.span(), found[0]
