"""What answers are worth: verifiers, reward models, and functions of the user that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.reward import load_reward, save_reward
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.reward import RewardModel
from penjing.train.align.prompts import Answer, Prompt, Sampled
from penjing.train.align.rewards import ModelReward, Rewards, Verifier, number
from penjing.train.align.user_reward import UserReward
from penjing.train.chat.tokens import ChatTokens
from tests.conftest import write_tiny_checkpoint

CODE = """
import os, time

def raises(prompt, answer, row):
    return row["nothing"]

def hangs(prompt, answer, row):
    time.sleep(600)

def ends(prompt, answer, row):
    os._exit(3)

def silent(prompt, answer, row):
    pass

def bad(prompt, answer, row):
    return float("nan")

def several(prompt, answer, row):
    import numpy
    return numpy.array([1.0, 2.0])

def tensors(prompt, answer, row):
    import torch
    return torch.zeros(2)

def others(question, answer, row):
    return 1.0
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    """A file of functions, none of which gives a reward."""
    (tmp_path / "reward.py").write_text(CODE)
    return tmp_path / "reward.py"


def answers(*texts: str, ended: bool = True) -> list[Answer]:
    return [Answer(Sampled([5], [0.0], ended), text) for text in texts]


def test_a_verifier_compares_with_the_answer_of_the_row() -> None:
    assert [number(text) for text in ("it is 1,234.50.", "-3", "5 + 8 = 13", "x.5", "none")] == [
        1234.5, -3.0, 13.0, 0.5, None
    ]  # fmt: skip
    large = Prompt([1], {"prompt": "?", "answer": "1" * 400})
    assert Verifier("number")(large, answers("9" * 400, "1" * 400, "1" * 399 + "2", "1" * 400 + ".0")) == [0, 1, 0, 1]
    prompt = Prompt([1], {"prompt": "?", "answer": "42"})
    assert Verifier("number")(prompt, answers("17 + 25 = 42", "42.0!", "42 or 43", "")) == [1.0, 1.0, 0.0, 0.0]
    assert Verifier("exact")(prompt, answers(" 42\n", "it is 42")) == [1.0, 0.0]
    assert Verifier("regex")(Prompt([1], {"answer": r"^yes\b"}), answers("yes, it is", "oh yes")) == [1.0, 0.0]
    assert Rewards(Verifier("number"), -1.0, "verifier")(prompt, answers("42", ended=False)) == [-1.0]


@pytest.mark.parametrize(
    ("prompt", "wanted", "answer", "worth"),
    [
        ("0+4=?", "4", "4", 1.0),
        ("0+4=?", "4", "0+4", 0.0),
        ("0+4=?", "4", " 0 + 4 = ?", 0.0),
        ("0+4=?", "4", "0+4=4", 1.0),
        ("What is 0 + 4?", "4", "what is 0 + 4", 0.0),
        ("0加4等于几", "4", "0加4", 0.0),
        ("0加4等于几", "4", "0加4等于4", 1.0),
        ("Which is larger, 3 or 5?", "5", "5", 1.0),
        ("Which is larger, 3 or 5?", "5", "3 or 5?", 0.0),
        ("Which is larger, 3 or 5?", "5", "Not 3 but 5.", 1.0),
        ("Say 12.5", "12.5", "12.50", 1.0),
    ],
)
def test_saying_the_question_again_is_no_answer(prompt: str, wanted: str, answer: str, worth: float) -> None:
    assert Verifier("number")(Prompt([1], {"prompt": prompt, "answer": wanted}), answers(answer)) == [worth]


def test_a_reward_model_of_a_family_without_a_hugging_face_type_is_read_again(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    config = open_checkpoint(tiny_checkpoint).config.model_copy(update={"model_type": "penjing", "norms": "around"})
    model = RewardModel(config)
    (tmp_path / "reward").mkdir()
    save_reward(tmp_path / "reward", model, tiny_checkpoint, {})
    again = load_reward(tmp_path / "reward").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_a_reward_model_scores_prompt_and_answer(tiny_checkpoint: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    (tmp_path / "reward").mkdir()
    save_reward(tmp_path / "reward", RewardModel(open_checkpoint(tiny_checkpoint).config), tiny_checkpoint, {})
    scorer = ModelReward(tmp_path / "reward", tiny_checkpoint, torch.device("cpu"))
    some = [Answer(Sampled(tokens), "") for tokens in ([5, 6, 7], [9, 2])]
    model = load_reward(tmp_path / "reward")
    with torch.no_grad():
        expected = [float(model(torch.tensor([[3, 4, *a.sampled.tokens]]), torch.tensor([1 + len(a.sampled.tokens)])))
                    for a in some]  # fmt: skip
    assert scorer(Prompt([3, 4], {}), some) == pytest.approx(expected, abs=1e-5)
    writer = ChatTokens.from_folder(tiny_checkpoint)
    turns = {"prompt": ("user", "1 + 1?"), "chosen": ("assistant", "2"), "rejected": ("assistant", "3")}
    pair = writer.pair({name: [{"role": role, "content": said}] for name, (role, said) in turns.items()})
    behind = writer.behind_answer()
    assert behind == pair.chosen[-len(behind) :].tolist() == writer.tokenizer.encode("\n", add_special=False)
    sampled = Sampled(pair.chosen[: -len(behind)].tolist(), ended=True)
    learnt = torch.tensor([[*pair.prompt.tolist(), *pair.chosen.tolist()]])  # as it was when the model learnt
    with torch.no_grad():
        expected = [float(model(learnt, torch.tensor([learnt.shape[1] - 1])))]
    assert scorer(Prompt(pair.prompt.tolist(), {}), [Answer(sampled, "")]) == pytest.approx(expected, abs=1e-5)
    other = write_tiny_checkpoint(tmp_path / "other", pre="smollm")
    with pytest.raises(ConfigError, match="has another tokenizer than initial"):
        ModelReward(tmp_path / "reward", other, torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("raises", r"raises raised KeyError, line 5: 'nothing'; mend the function"),
        ("hangs", "took longer than 1 s for the answer 'x'; mend the function, or raise reward.timeout"),
        ("ends", "its process ended with code 3 at the answer 'x'"),
        ("silent", "returned no number for the answer 'x'; return a single float"),
        ("several", "returned no number for the answer 'x'; return a single float"),
        ("tensors", "returned no number for the answer 'x'; return a single float"),
        ("bad", "gives nan for the answer 'x' to 'Say 1.'; rewards are finite numbers"),
    ],
)
def test_a_function_that_fails_is_one_error(functions: Path, name: str, says: str) -> None:
    spec = f"{functions}:{name}"
    rewards = Rewards(UserReward(spec, timeout=1.0 if name == "hangs" else 300.0), None, spec)
    with pytest.raises(InputError, match=says):
        rewards(Prompt([1], {"prompt": "Say 1."}), answers("x"))


def test_a_function_of_a_file_that_is_named_from_here_tells_its_line(
    functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(functions.parent)
    rewards = Rewards(UserReward("reward.py:raises", timeout=300.0), None, "reward.py:raises")
    with pytest.raises(InputError, match="raises raised KeyError, line 5: 'nothing'; mend the function"):
        rewards(Prompt([1], {"prompt": "Say 1."}), answers("x"))


def test_a_function_of_other_parameters_is_refused_before_anything_is_sampled(functions: Path) -> None:
    with pytest.raises(InputError, match=r"is called as function\(prompt, answer, row\): .*; name its parameters"):
        UserReward(f"{functions}:others", timeout=300.0)


def test_a_prompt_in_parts_is_what_it_says(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Add 3 "}, {"type": "text", "text": "and 4, please."}]
    prompt = Prompt([5], {"prompt": [{"role": "user", "content": parts}], "answer": "4"})
    assert prompt.text == "Add 3 and 4, please."
    assert Verifier("number")(prompt, answers("3 and 4", "It is 4")) == [0.0, 1.0]
