"""Personal data: what is found beside other ways to make such values, what is left alone, and that nothing of it is
written down anywhere."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.curate.documents.document import Document
from penjing.curate.run import curate_recipe
from penjing.curate.steps.personal import find_personal
from penjing.curate.steps.pii import PiiStep
from penjing.curate.why import explain
from tests.curate.corpus import corpus_of, kept, prose, recipe, write_lines

phonenumbers = pytest.importorskip("phonenumbers")
pytest.importorskip("stdnum")
pytest.importorskip("pyarrow")
pytest.importorskip("ftfy")


def found(text: str, *regions: str) -> list[tuple[str, str]]:
    """(Kind, as it is written) of what is found."""
    return [(each.kind, text[each.begin : each.end]) for each in find_personal(text, regions=regions)]


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("Write to John.Doe+news@mail.foo.co.uk.", "email", "John.Doe+news@mail.foo.co.uk"),
        ("<a href='mailto:a_b@c.de'>", "email", "a_b@c.de"),
        ("url?to=someone@firm.org&x", "email", "someone@firm.org"),
        ("用户：li.wei@北京大学.中国，", "email", "li.wei@北京大学.中国"),
        ("Message to 8.8.8.8:53 was lost", "ip", "8.8.8.8"),
        ("nameserver 1.1.1.10", "ip", "1.1.1.10"),
        ("seen: 52.76.71.58, then", "ip", "52.76.71.58"),
        ("JCB 3503182083374373", "card", "3503182083374373"),
        ("from [2001:4860:4860::8888]", "ip", "2001:4860:4860::8888"),
        ("card 4111 1111 1111 1111, valid", "card", "4111 1111 1111 1111"),
        ("5500-0055-5555-5559", "card", "5500-0055-5555-5559"),
        ("amex 3782 822463 10005", "card", "3782 822463 10005"),
        ("DE89 3704 0044 0532 0130 00 AND MORE", "iban", "DE89 3704 0044 0532 0130 00"),
        ("to GB82WEST12345698765432.", "iban", "GB82WEST12345698765432"),
        ("Tel. 030 901820", "phone", "030 901820"),
        ("call (415) 555-2671 now", "phone", "(415) 555-2671"),
        ("+33 1 42 68 53 00", "phone", "+33 1 42 68 53 00"),
        ("0049 30 901820", "phone", "0049 30 901820"),
        ("or 415.555.2671x12,", "phone", "415.555.2671x12"),
        ("or 415 555 2671,", "phone", "415 555 2671"),
        ("oder 030901820, abends", "phone", "030901820"),
        ("aws = AKIAIOSFODNN7EXAMPLE", "key", "AKIAIOSFODNN7EXAMPLE"),
        ("token: ghp_abcdefghijklmnopqrstuvwxyz0123456789", "key", "ghp_abcdefghijklmnopqrstuvwxyz0123456789"),
        ("Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.SflKxwRJSMeKKF2QT4fwpMeJ", "key",
         "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.SflKxwRJSMeKKF2QT4fwpMeJ"),
    ],
)  # fmt: skip
def test_what_is_found(text: str, kind: str, value: str) -> None:
    assert found(text, "US", "DE") == [(kind, value)]


def test_a_private_key_is_one_value() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA7\nabcdefghij0123456789\n-----END RSA PRIVATE KEY-----"
    assert found(f"before\n{key}\nafter") == [("key", key)]


@pytest.mark.parametrize(
    "text",
    [
        "user@example.com, a@b.test, root@localhost, icon@2x.png, getty@tty1.service, @decorator, a @ b, git@github",
        "192.168.1.1, 10.0.0.1, 127.0.0.1, 0.0.0.0, 203.0.113.7, 2001:db8::1, fe80::1, ::1, 224.0.0.1",
        "version 6.1.170.3, v200.1.2.3, section 3.1.4.2, §3.1.4.2, 9.2.3.8. Functions, 12.2.3.40, 1.2.3.4.5, 300.1.1.1",
        "std::vector, a::b, dead::beef::1, 12:30:45, 2021-05-06 12:30:45.123456, 00:1b:44:11:3a:b7",
        "0x12345678 0xdeadbeef 1234567890123456 4111111111111112 4111 1111 1111 1111 1111 ISBN 978-3-16-148410-0",
        "00000000 00000001 00000002 00000003 4532 0151 1283 0366 0012 0013",
        "DE89 3704 0044 0532 0130 01, XX82WEST12345698765432, GB00WEST12345698765432",
        "Decimal('+35236450.6') 3.14159265358979 1,234,567,890 12345678 20260731123000 100-200-300",
        "ISBN: 0201633388, flags 0100002, 0123456789, 415 555 267 and 212 555 100, order no. 030901820",
        "sk-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx AKIAXXXXXXXXXXXXXXXX ghp_short task-list-of-things-to-do hf_transfer",
    ],
)
def test_what_looks_alike_is_left(text: str) -> None:
    assert found(text, "US", "DE") == []


def with_luhn(digits: str) -> str:
    """`digits` and the digit that ISO/IEC 7812 puts behind them."""
    total = sum(sum(divmod(int(digit) * (2 - place % 2), 10)) for place, digit in enumerate(reversed(digits)))
    return digits + str(-total % 10)


@given(
    begin=st.sampled_from(["4", "51", "2221", "6011", "35289"]), rest=st.text("0123456789", min_size=14, max_size=14)
)
@settings(max_examples=80, deadline=None)
def test_cards_are_found_with_their_check_digit_alone(begin: str, rest: str) -> None:
    number = with_luhn((begin + rest)[:15])
    if len(set(number)) > 1:
        assert found(f"card {number}") == [("card", number)]
        spaced = " ".join(number[place : place + 4] for place in range(0, 16, 4))
        assert found(f"card {spaced}.") == [("card", spaced)]
    wrong = number[:-1] + str((int(number[-1]) + 1) % 10)
    assert ("card", wrong) not in found(f"card {wrong}")


@given(bank=st.text("0123456789", min_size=18, max_size=18))
@settings(max_examples=80, deadline=None)
def test_accounts_are_found_with_their_check_digits_alone(bank: str) -> None:
    check = 98 - int(f"{bank}131400") % 97  # D = 13, E = 14
    number = f"DE{check:02d}{bank}"
    assert ("iban", number) in found(f"to {number}")
    assert not [each for each in found(f"to DE{(check + 1) % 97:02d}{bank}") if each[0] == "iban"]


def test_the_number_of_every_country_is_found_as_it_is_written_abroad() -> None:
    missed = []
    for region in sorted(phonenumbers.SUPPORTED_REGIONS):
        number = phonenumbers.example_number(region)
        written = phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.INTERNATIONAL)
        if found(f"Reach me on {written}, please") != [("phone", written)]:
            missed.append(written)
    assert len(missed) <= 0.02 * len(phonenumbers.SUPPORTED_REGIONS), missed


def test_a_value_is_found_once_and_the_rest_of_the_text_stays(tmp_path: Path) -> None:
    text = f"{prose(1)} a@b.org {prose(2)}\n+1 202-456-1111 A@B.org c@d.org +12024561111"
    document = Document("d", text, "s", "made")
    step = PiiStep(kind="pii").filter(tmp_path)
    assert step.apply(document) is None
    assert document.text == f"{prose(1)} <EMAIL_1> {prose(2)}\n<PHONE_1> <EMAIL_1> <EMAIL_2> <PHONE_1>"
    assert document.changed == ["pii: 3 email, 2 phone"]
    assert step.replaced == {"email": (3, 1), "phone": (2, 1)}
    again = Document("d", document.text, "s", "made")
    step.apply(again)
    assert (again.text, again.changed) == (document.text, [])


def test_hashed_names_are_equal_in_all_documents_and_need_the_key(tmp_path: Path) -> None:
    names = []
    for secret in ("a" * 32, "b" * 32):
        (tmp_path / "key").write_text(secret)
        step = parse_config(PiiStep, {"kind": "pii", "replace": "hashed", "key_file": str(tmp_path / "key")}, "r")
        texts = [f"{word} a@b.org" for word in ("one", "two")]
        found = {step.filter(tmp_path).masked(text).split()[1] for text in texts}
        names += found
        assert len(found) == 1
    assert len(set(names)) == 2
    (tmp_path / "key").write_text("short")
    with pytest.raises(InputError, match="has 5 bytes, 16 are needed"):
        step.filter(tmp_path)
    with pytest.raises(InputError, match="cannot read"):
        step.model_copy(update={"key_file": tmp_path / "none"}).filter(tmp_path)
    for values, said in (({"replace": "hashed"}, "need each other"), ({"regions": ["Germany"]}, "no countries of ISO")):
        with pytest.raises(ConfigError, match=said):
            parse_config(PiiStep, {"kind": "pii", **values}, "recipe")


def test_regions_follow_the_language(tmp_path: Path) -> None:
    step = PiiStep(kind="pii").filter(tmp_path)
    for language, text in (("de", "Telefon: 030 901820"), ("fr", "Tél. 01 42 68 53 00"), ("en", "phone: 202-456-1111")):
        document = Document("d", text, "s", "made", language=language)
        step.apply(document)
        assert document.text.endswith(" <PHONE_1>")
    fixed = PiiStep(kind="pii", regions=()).filter(tmp_path)
    assert fixed.masked("phone: 202-456-1111, +1 202-456-1111") == "phone: 202-456-1111, <PHONE_1>"


@pytest.mark.parametrize(
    "unit", ["@", "a@", "1 ", "+1-", "1.", "a:", "::", "DE12", "eyJ", "eyJa.", "4111 ", "-----BEGIN "]
)
def test_hostile_text_takes_no_more_than_a_look_each(unit: str) -> None:
    find_personal(unit * 100_000, regions=("US", "DE"))  # n² steps are hours


def test_no_part_of_a_long_value_is_shown_of_what_is_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    body = base64.b64encode(np.random.default_rng(0).bytes(5600)).decode()
    key = f"-----BEGIN RSA PRIVATE KEY-----\n{body}\n-----END RSA PRIVATE KEY-----\n"
    texts = [f"{key} {prose(1)}", f"begins otherwise. {key} {prose(2, 9000)}", f"{key * 3} {prose(3)}"]
    write_lines(folder / "a.jsonl", [*texts, *texts])
    made = recipe(tmp_path, folder, steps=[{"kind": "dedup", "method": "exact"}, {"kind": "pii"}])
    curate_recipe(made, "test")
    shown = [explain(f"line {number}", made.output)[0] for number in (4, 5, 6)]
    assert "it began '<KEY_1> " in shown[0]
    assert "it began 'begins otherwise. <KEY_1>" in shown[1]
    with gzip.open(made.output / "dropped/stage-1.jsonl.gz", "rt") as file:
        dropped = file.read()
    assert dropped.count("\n") == 3
    assert body[:12] not in dropped + (made.output / "report.json").read_text()


def test_no_value_is_written_down_anywhere(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    secrets = ["jane@firm.org", "+1 202-456-1111", "4111 1111 1111 1111"]
    write_lines(folder / "a.jsonl", [f"{secret} {prose(place)}" for place, secret in enumerate(secrets)])
    write_lines(folder / "b.jsonl", [f"jane@firm.org {prose(7, 3)}", "nothing"])
    (folder / "c.jsonl").write_text('{"name": "jane@firm.org"}\n')
    steps = [{"kind": "clean", "shortest": 100}, {"kind": "pii"}, {"kind": "dedup"}]
    made = recipe(tmp_path, folder, steps=steps, most_damaged=0.5, task_mb=0.0005)
    assert [text.split()[0] for text in kept(made).values()] == ["<EMAIL_1>", "<PHONE_1>", "<CARD_1>"]
    report = json.loads((made.output / "report.json").read_text())
    rows = [(row["step"], row["kind"], row["values"], row["documents"]) for row in report["personal"]]
    assert rows == [("1: pii", "card", 1, 1), ("1: pii", "email", 1, 1), ("1: pii", "phone", 1, 1)]
    assert "Personal data that was replaced" in (made.output / "report.html").read_text()
    assert "changed by pii: 1 email" in explain("a.jsonl, line 1", made.output)[0]
    assert "it began '<EMAIL_1> " in explain("b.jsonl, line 1", made.output)[0]
    written = [path.read_bytes() for path in made.output.rglob("*") if path.is_file()]
    written += [gzip.decompress(data) for data in written if data[:2] == b"\x1f\x8b"]
    written += ["\n".join(corpus_of(made.output).values()).encode()]
    for secret in secrets:
        assert not [data for data in written if secret.encode() in data]
