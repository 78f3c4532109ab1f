"""The rows of run_sharing.py from the figures of its rounds."""

from __future__ import annotations

from run_sharing import DECODE, LONG_PROMPT, other_form, prompt_of, sharing_rows


def test_rows_stand_beside_what_they_are_compared_with() -> None:
    values = {"gap_paced": 0.1, "gap_unpaced": 0.4, "gap_without": 0.05, "first_alone": 0.2, "first_beside": 0.3}
    values |= {f"decode_{name}": 100.0 for name in DECODE} | {"decode_greedy": 125.0, "decode_free": 200.0}
    rows = {row.metric: row for row in sharing_rows(values, 3)}
    assert (rows["gap_p99_beside_1900_tokens"].value, rows["gap_p99_beside_1900_tokens"].ratio) == (100, 0.25)
    assert rows["gap_p99_alone"].value == 50
    assert rows["first_token_beside_500_of_a_key"].ratio == 1.5
    assert (rows["decode_16_top_p"].ratio, rows["decode_16_json_schema"].ratio) == (0.8, 0.5)
    assert rows["decode_16_other_schemas"].baseline == "free_records"


def test_prompts_differ_and_are_tokens() -> None:
    assert len({tuple(prompt_of(number, 32)) for number in range(1100)}) == 1100
    assert max(prompt_of(1005, LONG_PROMPT)) < 49_152


def test_forms_differ_and_are_the_same_again() -> None:
    forms = [other_form(number) for number in range(16)]
    assert [other_form(number) for number in range(16)] == forms
    assert all(forms.count(form) == 1 for form in forms)
