"""The stream of a run that learns from its own answers: prompts are answered by the newest weights, answers rewarded,
and what is learnt of each is found, for all prompts of a step at once.

Each process answers the prompts that it will learn from; sums over the processes then give all of them everything. So
advantages see the whole batch, and the state that is saved is the same in every process.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penjing.train.align.advantages import (
    answer_mask,
    generalized_advantages,
    group_advantages,
    leave_one_out,
    whitened,
)
from penjing.train.align.learner import Learner
from penjing.train.align.prompts import Answer, Prompt, Sampled, answer_seed
from penjing.train.align.rewards import Rewards
from penjing.train.align.sampler import AnySampler
from penjing.train.data.order import Order
from penjing.train.data.stream import refuse_others
from penjing.train.objective.actor_critic import valued_tokens
from penjing.train.objective.objective import Batch
from penjing.train.objective.policy import answer_tokens
from penjing.train.processes.world import World
from penjing.train.recipe.align import AlgorithmConfig
from penjing.train.recipe.data import RolloutData

Rollout = dict[str, Tensor]
"""Of the P prompts of a step with S answers of up to L tokens: "tokens" (P, S, L) int64, "sizes" (P, S) int64, "ended"
and "reward" (P, S) float64, "gold" likewise where it is recorded; "old", "reference", "engine" (P, S, L) float32
log-probabilities and "value" (P, S, L), expected rewards, where they are needed. With redraws also "asked" (P, S)
float64, how many answers were sampled in each place, and "reward sum" and the like (P, S), what these have together."""


def answer_batch(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    of_answers: dict[str, Tensor],
    of_tokens: dict[str, Sequence[Sequence[float]]] | None = None,
) -> Batch:
    """The batch that `penjing.train.objective.policy` describes, of B prompts and an answer to each; answers that stand
    side by side share their prompt if it is the same.

    Args:
        of_answers: numbers of the answers, (B,).
        of_tokens: numbers of the answers' tokens, as many as each has.
    """
    tokens, paths, begin = list[int](), list[np.ndarray](), 0
    for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if place == 0 or prompt != prompts[place - 1]:
            begin = len(tokens)
            tokens += prompt
        asked, said = (np.arange(first, first + len(some)) for first, some in ((begin, prompt), (len(tokens), answer)))
        paths.append(np.concatenate((asked, said)))
        tokens += answer
    width = max(map(len, paths))
    sizes = [len(answer) for answer in answers]
    batch = {
        "tokens": [tokens],
        "paths": np.stack([np.pad(path, (0, width - len(path)), "edge") for path in paths]),
        "rows": np.concatenate([path[-size - 1 : -1] for path, size in zip(paths, sizes, strict=True)]),
        "next": [token for answer in answers for token in answer],
        "answer": np.repeat(np.arange(len(prompts)), sizes),
    }
    found = {name: torch.from_numpy(np.asarray(each, np.int64)) for name, each in batch.items()} | of_answers
    for name, values in (of_tokens or {}).items():
        found[name] = torch.tensor([each for row in values for each in row], dtype=torch.float32)
    return found


class RolloutStream:
    """Endless micro-batches of rollouts; a prompt is a sample.

    Args:
        learner: gives the model, which is there when the first batch is asked for.
        decode: the text of an answer's tokens.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        data: RolloutData,
        algorithm: AlgorithmConfig,
        rewards: Rewards,
        learner: Callable[[], Learner],
        decode: Callable[[list[int]], str],
        *,
        micro_batch: int,
        world: World,
        seed: int,
    ) -> None:
        self._prompts, self._data, self._algorithm, self._rewards = prompts, data, algorithm, rewards
        self._learner, self._decode, self._seed = learner, decode, seed
        self._micro_batch, self._world = micro_batch, world
        self._content = hashlib.sha256(b"".join(prompt.key + b"\0" for prompt in prompts)).hexdigest()[:32]
        self._order = Order(len(prompts), data.batch_size, data.batch_size, 0, 1, seed)
        self._rollout: Rollout | None = None
        self._next: Future[Rollout] | None = None  # with `data.ahead`, what this process samples meanwhile
        self._gathered: Rollout | None = None  # the same, of all processes, where it has been waited for
        self._places = np.empty(0, np.int64)
        self._used = 0  # updates made from the rollout
        self._ready = list[Batch]()
        self._states = list[Tensor]()  # of a decoder that does not change, for each micro-batch of the rollout

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._ready:
            if self._rollout is None:
                self._rollout = self._finished(self._sampled())
                self._states = []
            self._used += 1
            self._ready = self._batches(self._rollout)
            if self._used == self._algorithm.updates:
                self._rollout, self._used = None, 0
        # Logits of a whole vocabulary are many: only those of the micro-batch at hand are held.
        return self._learner().taught(self._ready.pop(0))

    def _mine(self) -> list[np.ndarray]:
        """The prompts of this process's micro-batches, as places among those of the step; from its end on, none."""
        size, step = self._micro_batch, self._micro_batch * self._world.size
        end = -(-self._data.batch_size // step) * step
        return [np.arange(begin, begin + size) for begin in range(self._world.rank * size, end, step)]

    def _sampled(self) -> Rollout:
        """The next answers, of all processes, with "place" (P,) int64, their prompts."""
        sampled = self._gathered or self._of_all(self._next or self._start())
        self._gathered = None
        if self._data.ahead:
            self._next = self._start()
        return sampled

    def _of_all(self, mine: Future[Rollout]) -> Rollout:
        """Wait for the answers of this process, and add those of the others."""
        rollout = mine.result()
        for name in sorted(rollout):
            self._world.sum(rollout[name])
        return rollout

    def _start(self) -> Future[Rollout]:
        """Begin the next answers, by the weights as they are now; with `data.ahead` beside the caller."""
        places, future = self._order.next()[1], Future[Rollout]()
        taken, sampler = self._order.state_dict()["taken"], self._learner().sampler
        sampler.busy.acquire()

        def work() -> None:
            try:
                future.set_result(self._roll_out(sampler, places, taken))
            except BaseException as error:  # belongs to whoever waits for the answers
                future.set_exception(error)
            finally:
                sampler.busy.release()

        try:
            sampler.refresh()
        except BaseException:
            sampler.busy.release()
            raise
        if self._data.ahead:
            threading.Thread(target=work, name="rollouts", daemon=True).start()
        else:
            work()
        return future

    def _roll_out(self, sampler: AnySampler, places: np.ndarray, taken: int) -> Rollout:
        data = self._data
        judged = ["ended", "reward", *(["gold"] if self._rewards.gold is not None else [])]
        counted = ["asked", *(f"{name} sum" for name in judged)] if self._algorithm.redraws else []
        shape = data.batch_size, data.samples
        rollout: Rollout = {
            "place": torch.zeros(data.batch_size, dtype=torch.int64),
            "tokens": torch.zeros((*shape, data.max_tokens), dtype=torch.int64),
            "sizes": torch.zeros(shape, dtype=torch.int64),
            "engine": torch.zeros((*shape, data.max_tokens)),
        } | {name: torch.zeros(shape, dtype=torch.float64) for name in (*judged, *counted)}
        mine = [place for some in self._mine() for place in some.tolist() if place < data.batch_size]
        for place in mine:
            rollout["place"][place] = int(places[place])
        spare = self._spare(places, taken)
        for draw in range(1 + self._algorithm.redraws):
            # The first draw has the seeds of a run without redraws.
            seeds = [answer_seed(self._seed, taken, place, *([draw] if draw else [])) for place in mine]
            if draw:
                for place in mine:
                    rollout["place"][place] = int(spare[((draw - 1) * data.batch_size + place) % len(spare)])
            prompts = [self._prompts[int(rollout["place"][place])].tokens for place in mine]
            found = sampler.sample(prompts, seeds, data.samples, data.max_tokens, data.temperature)
            for place, answers in zip(mine, found, strict=True):
                self._judge(rollout, place, answers)
                if counted:
                    rollout["asked"][place] += 1
                    for name in judged:
                        rollout[f"{name} sum"][place] += rollout[name][place]
            mine = [place for place in mine if bool((rollout["reward"][place] == rollout["reward"][place, 0]).all())]
        return rollout

    def _finished(self, rollout: Rollout) -> Rollout:
        """With what the models say of the answers."""
        learner, algorithm = self._learner(), self._algorithm
        self._places = rollout.pop("place").numpy()
        ratios = algorithm.kind not in ("distill", "draft") and (algorithm.updates > 1 or self._data.ahead)
        whole_kl = algorithm.kind == "rloo" and algorithm.kl > 0
        if algorithm.kind == "ppo":
            rollout["old"], rollout["value"] = self._asked(rollout, learner.model, valued=True)
        elif (ratios or whole_kl) and not self._data.ahead:
            (rollout["old"],) = self._asked(rollout, learner.model)
        if self._data.ahead and (ratios or whole_kl):
            rollout["old"] = rollout["engine"].clone()  # the weights that sampled them are gone
        if learner.reference is not None:
            (rollout["reference"],) = self._asked(rollout, learner.reference)
        return rollout

    def _spare(self, places: np.ndarray, taken: int) -> np.ndarray:
        """The prompts that may replace others of this step, in an order of chance; the same in every process, so that
        none of them comes twice while there are enough."""
        others = np.setdiff1d(np.arange(len(self._prompts)), places)
        chance = np.random.default_rng(answer_seed(self._seed, taken))
        return chance.permutation(others if len(others) else places)

    def _judge(self, rollout: Rollout, place: int, answers: Sequence[Sampled]) -> None:
        """Put the answers to a prompt, and what they are worth, where others may have stood."""
        for name in ("tokens", "engine"):
            rollout[name][place] = 0
        for sample, answer in enumerate(answers):
            size = len(answer.tokens)
            rollout["tokens"][place, sample, :size] = torch.tensor(answer.tokens)
            rollout["engine"][place, sample, :size] = torch.tensor(answer.logprobs)
            rollout["sizes"][place, sample], rollout["ended"][place, sample] = size, answer.ended
        prompt = self._prompts[int(rollout["place"][place])]
        texts = [Answer(answer, self._decode(answer.tokens)) for answer in answers]
        rollout["reward"][place] = torch.tensor(self._rewards(prompt, texts), dtype=torch.float64)
        if self._rewards.gold is not None:
            rollout["gold"][place] = torch.tensor(self._rewards.gold(prompt, texts), dtype=torch.float64)

    @torch.no_grad()
    def _asked(self, rollout: Rollout, model: nn.Module, *, valued: bool = False) -> list[Tensor]:
        """The log-probability of each token by `model`, (P, S, L), with zeros behind the answers; if `valued`, and the
        reward that is expected before it."""
        found, samples = [torch.zeros_like(rollout["engine"]) for _ in range(1 + valued)], self._data.samples
        device = next(model.parameters()).device
        for places in self._mine():
            batch = self._batch(rollout, places)
            on_device = {name: each.to(device) for name, each in batch.items()}
            if valued:
                logprobs, _, values = valued_tokens(model, on_device, self._data.temperature)
                said = [logprobs, values]
            else:
                said = [answer_tokens(model, on_device, self._data.temperature)[0]]
            sizes = torch.bincount(batch["answer"]).tolist()
            for whole, mine in zip(found, said, strict=True):
                for row, each in enumerate(mine.float().cpu().split(sizes)):
                    if (place := int(places[row // samples])) < self._data.batch_size:
                        whole[place, row % samples, : len(each)] = each
        return [self._world.sum(each) for each in found]

    def _batches(self, rollout: Rollout) -> list[Batch]:
        """This process's micro-batches of an update."""
        if self._algorithm.kind == "ppo":
            return self._valued_batches(rollout)
        algorithm, rewards = self._algorithm, rollout["reward"]
        if algorithm.kind == "rloo" and algorithm.kl:
            rewards = rewards - algorithm.kl * (rollout["old"] - rollout["reference"]).sum(-1)
        assert algorithm.scale is not None, "the recipe resolves it"
        if algorithm.kind == "rloo":
            advantages = leave_one_out(rewards, algorithm.scale)
        else:
            advantages = group_advantages(rewards, algorithm.scale)
        silent = (rewards == rewards[:, :1]).all(1, keepdim=True).expand_as(rewards)
        last = self._data.batch_size - 1
        found = []
        for places in self._mine():
            batch = self._batch(rollout, places)
            some = torch.from_numpy(np.minimum(places, last))
            batch["advantage"] = advantages[some].flatten().float()
            batch["silent"] = silent[some].flatten().float()
            batch["real"] = self._real(places)
            found.append(batch)
        if algorithm.kind == "draft":  # a forward pass of the decoder would be most of the work of each update
            self._states = self._states or [self._learner().states(batch) for batch in found]
            found = [batch | {"states": states} for batch, states in zip(found, self._states, strict=True)]
        return found

    def _valued_batches(self, rollout: Rollout) -> list[Batch]:
        """`_batches` of ppo: what came of each token is the reward of the answer, less the penalty from there on."""
        algorithm, sizes = self._algorithm, rollout["sizes"]
        real = answer_mask(sizes, rollout["old"].shape[-1])
        rewards = torch.zeros_like(rollout["old"])
        if "reference" in rollout:
            rewards -= torch.where(real, algorithm.kl * (rollout["old"] - rollout["reference"]), 0.0)
        at_end = rollout["reward"][..., None].to(rewards.dtype)
        rewards.scatter_add_(-1, (sizes - 1).clamp(min=0)[..., None], at_end)
        advantages, returns = generalized_advantages(
            rewards, rollout["value"], sizes, algorithm.discount, algorithm.trace
        )
        if algorithm.scale == "batch":
            advantages = whitened(advantages, sizes)
        learnt = rollout | {"advantage": advantages, "return": returns}
        batches = [self._batch(learnt, places, ("value", "advantage", "return")) for places in self._mine()]
        return [batch | {"real": self._real(places)} for batch, places in zip(batches, self._mine(), strict=True)]

    def _real(self, places: np.ndarray) -> Tensor:
        """Which answers to the prompts at `places` count, and do not stand there to fill up."""
        return torch.from_numpy(places < self._data.batch_size).repeat_interleave(self._data.samples)

    def _batch(self, rollout: Rollout, places: np.ndarray, more: tuple[str, ...] = ()) -> Batch:
        """The answers to the prompts at `places` of the step, without what follows from the others; behind the last
        prompt, the last again.

        Args:
            more: further numbers of tokens.
        """
        places = np.minimum(places, self._data.batch_size - 1)
        samples, some = self._data.samples, torch.from_numpy(places)
        sizes = rollout["sizes"][some].flatten().tolist()
        prompts = [self._prompts[int(self._places[place])].tokens for place in places for _ in range(samples)]

        def cut(name: str) -> list[list[Any]]:
            rows = rollout[name][some].flatten(0, 1).tolist()
            return [row[:size] for row, size in zip(rows, sizes, strict=True)]

        judged = ("reward", "ended", "gold", "asked") if self._rewards.known else ("ended",)
        names = {name: name for name in judged if name in rollout}
        names |= {name: f"{name} sum" for name in names if f"{name} sum" in rollout}
        of_answers = {name: rollout[of][some].flatten().float() for name, of in names.items()}
        kept = [*more, *(name for name in ("old", "reference") if name in rollout and self._is_learnt(name))]
        if self._data.temperature == 1:
            kept.append("engine")
        return answer_batch(prompts, cut("tokens"), of_answers, {name: cut(name) for name in kept})

    def _is_learnt(self, name: str) -> bool:
        """Whether an update needs these log-probabilities, and not the advantages alone."""
        return name == "reference" or self._algorithm.updates > 1 or self._data.ahead

    def state_dict(self) -> dict[str, Any]:
        """The position, the rollout that updates are still to be made from, and the next, which is waited for."""
        if self._next is not None:
            self._gathered, self._next = self._of_all(self._next), None
        order = self._order.state_dict()
        held = None if self._rollout is None else dict(self._rollout)
        return order | {
            "num_samples": order["num_samples"] * self._algorithm.updates,
            "content": self._content,
            "rollout": held,
            "places": self._places.tolist(),
            "used": self._used,
            **({} if self._gathered is None else {"next": dict(self._gathered)}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; see `Order` and `refuse_others`."""
        refuse_others(state, self._content)
        self._order.load_state_dict(state | {"num_samples": state["num_samples"] // self._algorithm.updates})
        self._rollout, self._gathered = _read(state["rollout"]), _read(state.get("next"))
        self._next = None
        self._places = np.array(state["places"], np.int64)
        self._used = int(state["used"])
        self._ready, self._states = [], []


def _read(held: dict[str, Any] | None) -> Rollout | None:
    """A rollout that was saved; a slice of each dimension reads a tensor that many processes saved, too."""
    whole = {name: tuple(slice(0, size) for size in each.shape) for name, each in (held or {}).items()}
    return None if held is None else {name: held[name][region] for name, region in whole.items()}


def greedy_answers(sampler: AnySampler, prompts: Sequence[Prompt], max_tokens: int) -> list[Sampled]:
    """The likeliest answer to each prompt."""
    with sampler.busy:
        sampler.refresh()
        found = sampler.sample([prompt.tokens for prompt in prompts], [0] * len(prompts), 1, max_tokens, 0.0)
    return [answers[0] for answers in found]
