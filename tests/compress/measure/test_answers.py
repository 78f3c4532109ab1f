"""What a decoder answers: greedy texts against transformers and the engine, likelihoods against transformers and
lm-eval (reference/, see benchmarks/peers/lm_eval_reference.py), figures, and a run that asks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penjing.compress.measure.answers import Asked, Questions, answered, questions_for, scores
from penjing.compress.measure.choices import Question
from penjing.compress.measure.cost import MeasureSettings
from penjing.compress.measure.evaluate import EvaluateSettings
from penjing.compress.measure.generate import continue_greedily
from penjing.compress.report.compare import comparison_page, print_comparison, read_runs
from penjing.compress.report.schema import read_report
from penjing.compress.run import run_recipe
from penjing.compress.verify import print_verification, verify_artifact
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Silent
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams
from tests.begun import with_ends
from tests.compress.conftest import Notes, write_recipe
from tests.serve.tiny import DEFAULTS, ids_of, run_all

REFERENCE = Path(__file__).with_name("reference")
SMALL = EvaluateSettings(prose_tokens=128, code_tokens=64, window=64)
LINES: list[dict[str, Any]] = [
    {"query": "One and one is ", "choices": ["two", "three of them", "é"], "gold": 0},
    {"question": "Which is red?", "choices": {"text": ["a rose", "the sea"], "label": ["1", "2"]}, "answerKey": "2"},
    {"ctx": "A dog runs", "endings": ["up the hill", "to", "into the house and sleeps"], "label": 2},
]
TEXTS = ["One and one is", "Question: Which is red?\nAnswer:", "A dog runs"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "things.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def random_ids(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("window", [None, 12])
def test_greedy_answers_are_the_likeliest_tokens_of_the_whole_text(
    make_tiny_checkpoint: Callable[..., Path], window: int | None
) -> None:
    overrides = {} if window is None else {"sliding_window": window, "model_type": "mistral"}
    folder = make_tiny_checkpoint(**overrides)
    prompts, done = random_ids(*[1, 20, 7] * 6), []  # more than go on together
    found = continue_greedily(load_model(folder).model, prompts, 10, frozenset(), lambda: done.append(1))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, answer in zip(prompts, found, strict=True):
        with torch.no_grad():
            logits_RV = reference(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        assert answer == logits_RV.argmax(-1).tolist()
    assert len(done) == len(prompts)


def test_capped_scores_are_capped_in_answers_too(make_tiny_checkpoint: Callable[..., Path]) -> None:
    folder = make_tiny_checkpoint(model_type="penjing", attention_cap=0.05)  # as Gemma 2's scores are, at 50
    model, prompts = load_model(folder).model, random_ids(1, 20, 7)
    found = continue_greedily(model, prompts, 10, frozenset(), lambda: None)
    for prompt, answer in zip(prompts, found, strict=True):
        logits_RV = model(torch.tensor([prompt + answer[:-1]]))[0, len(prompt) - 1 :]
        assert answer == logits_RV.argmax(-1).tolist()


def test_int8_answers_are_those_of_the_engine(tiny_int8: Path) -> None:
    # Of these the likeliest token is ahead by 2 % of the largest logit at each step; rounding moves logits by 0.4 %.
    prompts = [random_ids(5, length)[1] for length in (22, 39)]
    found = continue_greedily(load_model(tiny_int8).model, prompts, 16, frozenset(), lambda: None)
    engine = load_engine(tiny_int8, EngineConfig.model_validate(DEFAULTS | {"kv_dtype": "float32"}))
    wanted = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    served = run_all(engine, [Request(str(number), prompt, wanted) for number, prompt in enumerate(prompts)])
    assert [ids_of(served[str(number), 0]) for number in range(2)] == found


def test_an_answer_ends_with_a_token_that_stops(tiny_checkpoint: Path) -> None:
    model, (prompt,) = load_model(tiny_checkpoint).model, random_ids(9)
    (whole,) = continue_greedily(model, [prompt], 12, frozenset(), lambda: None)
    stop = whole[4]
    (cut,) = continue_greedily(model, [prompt], 12, frozenset({stop}), lambda: None)
    assert cut == whole[: whole.index(stop) + 1]


def test_likelihoods_are_those_of_transformers(tiny_checkpoint: Path, file: Path) -> None:
    questions = questions_for(tiny_checkpoint, MeasureSettings(choices=(file,)), SMALL)
    own = answered(tiny_checkpoint, questions, None, Silent())
    reference = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    asked = questions.choices["things"]
    right, by_bytes = 0, 0
    for text, one, found in zip(TEXTS, asked, own["likelihoods"]["things"], strict=True):
        wanted = []
        for choice in one.question.choices:
            context = tokenizer(text)["input_ids"]
            # lm-eval: what stands between them, here two spaces after the first query, belongs to the choice
            whole = tokenizer(f"{one.question.context} {choice}")["input_ids"]
            with torch.no_grad():
                logs_TV = reference(torch.tensor([whole])).logits[0].log_softmax(-1)
            places = range(len(context), len(whole))
            wanted.append(sum(float(logs_TV[place - 1, whole[place]]) for place in places))
        assert found == pytest.approx(wanted, abs=2e-4)
        sizes = [len(choice.encode()) for choice in one.question.choices]
        right += max(range(len(wanted)), key=lambda i: wanted[i]) == one.question.gold
        by_bytes += max(range(len(wanted)), key=lambda i: wanted[i] / sizes[i]) == one.question.gold
    figures = {each.measure: each for each in scores(questions, own, None, SMALL)}
    assert figures["accuracy"].value == pytest.approx(right / 3)
    assert figures["accuracy, likelihoods by bytes"].value == pytest.approx(by_bytes / 3)


def test_a_tokenizer_that_ends_every_text_changes_no_question(
    tiny_checkpoint: Path, file: Path, tmp_path: Path
) -> None:
    """The end stood between a prompt and its answer, and counted as a token of each context."""
    folder = with_ends(tiny_checkpoint, tmp_path / "ends", begins=False, ends=True)
    settings = MeasureSettings(choices=(file,), greedy=2)
    assert questions_for(folder, settings, SMALL) == questions_for(tiny_checkpoint, settings, SMALL)


def test_figures_of_answers_by_hand() -> None:
    asked = tuple(Asked(Question("q", ("ab", "cdefghij"), 1), ()) for _ in range(2))
    questions = Questions(([1], [2]), 4, {"file": asked})
    first = {"greedy": [[1, 2, 3, 4], [5, 6, 7, 8]], "next": [], "likelihoods": {"file": [[-3, -4], [-3, -2]]}}
    own = {
        "greedy": [[1, 2, 9, 4], [5, 6]],
        "next": [[1, 2, 9, 4], [5, 6, 7, 8]],
        "likelihoods": {"file": [[-3, -13], [-3, -4]]},
    }
    found = {(each.task, each.measure): each for each in scores(questions, own, first, SMALL)}
    values = {key[1]: each.value for key, each in found.items()}
    assert values == {
        "equal tokens": (3 / 4 + 2 / 4) / 2,
        "common beginning": 2,
        "answers equal as a whole": 0,
        "next token equal, given the model's answer so far": (3 / 4 + 1) / 2,
        "accuracy": 0,  # was 1/2
        "accuracy, likelihoods by bytes": 1 / 2,  # −3/2 against −13/8 and −4/8
        "same choice as the model": 1 / 2,
    }
    lost = found["file", "accuracy"].lost
    assert lost is not None
    assert lost[0] == pytest.approx(1 / 2)
    assert found["greedy", "equal tokens"].lost is None
    same = scores(questions, first | {"next": first["greedy"]}, first, SMALL)
    assert [each.value for each in same if each.unit == "share" and "accuracy" not in each.measure] == [1] * 4


def test_a_model_that_computes_nan_is_refused() -> None:
    questions = Questions((), 1, {"file": (Asked(Question("q", ("a", "b"), 0), ()),)})
    with pytest.raises(InputError, match="computes NaN or infinity"):
        scores(questions, {"likelihoods": {"file": [[float("nan"), 0.0]]}}, None, SMALL)


def test_prompts_are_the_users_or_beginnings_of_the_evaluation_texts(tiny_checkpoint: Path, tmp_path: Path) -> None:
    prompts = questions_for(tiny_checkpoint, MeasureSettings(greedy=5), SMALL).prompts
    assert [len(prompt) for prompt in prompts] == [32] * 5
    assert len(set(map(tuple, prompts))) == 5
    (tmp_path / "mine.txt").write_text("first\n\nsecond\nthird\n")
    (tmp_path / "more.jsonl").write_text('{"text": "fourth"}\n{"messages": [{"role": "user", "content": "fifth"}]}\n')
    settings = MeasureSettings(greedy=5, prompts=(tmp_path / "mine.txt", tmp_path / "more.jsonl"))
    loaded = load_model(tiny_checkpoint)
    found = [loaded.tokenizer.decode(ids) for ids in questions_for(tiny_checkpoint, settings, SMALL).prompts]
    assert found[:4] == ["first", "second", "third", "fourth"]
    assert loaded.chat_template is not None
    rendered = loaded.chat_template.render([{"role": "user", "content": "fifth"}], add_generation_prompt=True)
    assert questions_for(tiny_checkpoint, settings, SMALL).prompts[4] == loaded.tokenizer.encode(
        rendered, add_special=False
    )


def test_what_cannot_be_asked_is_refused_before_the_first_step(tiny_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"query": "word " * 600, "choices": ["a", "b"], "gold": 0}))
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"choices": (path,)}, InputError, "long.jsonl, line 1 has .* tokens, the model's context 512"),
        ({"choices": (path, tmp_path / "other" / "long.jsonl")}, ConfigError, "two files have the same name"),
        ({"greedy": 50}, ConfigError, "have .* beginnings of 32 tokens"),
        ({"greedy": 2, "greedy_tokens": 500}, InputError, "exceed the context of 512"),
    ]
    for values, error, says in cases:
        with pytest.raises(error, match=says):
            questions_for(tiny_checkpoint, MeasureSettings(**values), SMALL)


def test_a_run_that_asks_shows_it_everywhere(
    tiny_checkpoint: Path, tmp_path: Path, file: Path, notes: Notes, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, tiny_checkpoint, tmp_path / "out")
    asks = f'[measure]\ngreedy = 3\ngreedy_tokens = 4\nchoices = ["{file}"]\n'
    recipe.write_text(recipe.read_text().replace("[measure]\n", asks))
    out = run_recipe(recipe, progress=notes)
    first, last = read_report(out).stages
    assert [each.measure for each in first.answers] == ["accuracy", "accuracy, likelihoods by bytes"]
    assert [each.samples for each in last.answers] == [3] * 7
    assert any(line.startswith("greedy, equal tokens: ") for line in notes.lines)
    page = (out / "report.html").read_text()
    for text in (page, comparison_page(read_runs([out]))):
        assert "<h2>Answers</h2>" in text
        assert "common beginning" in text
    print_comparison(read_runs([out]))
    print_verification(verify_artifact(out))
    shown = capsys.readouterr().err
    assert "common beginning" in shown
    assert "as its run measured it: things, accuracy: " in shown

    file.write_text(file.read_text().replace("red", "blue"))
    with pytest.raises(InputError, match="made from another recipe, input or version"):
        run_recipe(recipe)


@pytest.mark.parametrize("name", ["arc", "hellaswag", "plain"])
def test_questions_are_answered_as_by_lm_eval(tiny_checkpoint: Path, name: str) -> None:
    file = REFERENCE / f"{name}.jsonl"
    wanted = json.loads((REFERENCE / "lm_eval.json").read_text())[name]
    questions = questions_for(tiny_checkpoint, MeasureSettings(choices=(file,)), SMALL)
    own = answered(tiny_checkpoint, questions, None, Silent())
    found = own["likelihoods"][name]
    assert len(found) == len(wanted["likelihoods"])
    for ours, theirs in zip(found, wanted["likelihoods"], strict=True):
        assert ours == pytest.approx(theirs, abs=2e-3, rel=1e-5)  # sums of up to a hundred float32 logarithms
    figures = {each.measure: each.value for each in scores(questions, own, None, SMALL)}
    for measure, metric in (("accuracy", "acc"), ("accuracy, likelihoods by bytes", "acc_norm")):
        assert figures[measure] == pytest.approx(sum(wanted[metric]) / len(wanted[metric]))
