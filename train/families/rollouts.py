"""The task of a decoder that learns from its own answers: it is asked, answers, and is told what the answers are
worth."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError
from penjing.core.files import writing
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Progress
from penjing.core.text.tokenizer import read_backend
from penjing.train.align.actor_critic import ActorCritic
from penjing.train.align.learner import Learner
from penjing.train.align.page import write_rollout_page
from penjing.train.align.prompts import Answer, read_prompts
from penjing.train.align.reasoning import ReasoningTasks
from penjing.train.align.rewards import make_rewards
from penjing.train.align.rollouts import RolloutStream, answer_batch, greedy_answers
from penjing.train.align.sampler import AnySampler, Sampler, cache_bytes, float_bytes
from penjing.train.align.served import ServerSampler, check_servers
from penjing.train.chat.held_out import held_out_places, judged_places
from penjing.train.chat.tokens import ChatTokens
from penjing.train.data.stream import Stream, draws
from penjing.train.families.decoder_task import DecoderTask
from penjing.train.monitor.sinks import drop_later
from penjing.train.objective.actor_critic import ProximalPolicy
from penjing.train.objective.objective import Batch, TaskObjective
from penjing.train.objective.on_policy import OnPolicyDistillation
from penjing.train.objective.policy import PolicyGradient
from penjing.train.parallel.mesh import MeshWorld
from penjing.train.processes.devices import choose_device
from penjing.train.processes.world import World
from penjing.train.recipe.align import AlgorithmConfig
from penjing.train.recipe.data import RolloutData
from penjing.train.recipe.recipe import ObjectiveConfig, RunRecipe, TrainRecipe
from penjing.train.state.initial import Constant, Weights, checkpoint_weights, fill_weights

_SHOWN, _KEPT = 2, 10  # held-out answers that an evaluation prints and keeps


class RolloutTuning(DecoderTask):
    """The decoder in `folder`, by reinforcement learning from rewards of its own answers."""

    def __init__(self, folder: Path, recipe: RunRecipe, data: RolloutData, progress: Progress) -> None:
        if not isinstance(recipe, TrainRecipe):
            raise ConfigError("data.kind = 'rollouts' is for penjing train; a step learns from data.kind = 'text'")
        assert recipe.prompts is not None, "the recipe is checked"
        assert recipe.algorithm is not None, "the recipe is checked"
        _check_run(recipe)
        config, prompts, algorithm = open_checkpoint(folder).config, recipe.prompts, recipe.algorithm
        if config.moe is not None:
            raise ConfigError(f"data.kind = 'rollouts' is for dense decoders, and {folder} has experts")
        if config.activation == "xielu":
            raise ConfigError(
                f"data.kind = 'rollouts' does not fit {folder}: the engine keeps numbers of its activation (xielu), "
                "which training changes"
            )
        room = config.max_position_embeddings - data.max_tokens
        if room < 1:
            raise ConfigError(
                f"data.max_tokens={data.max_tokens} leaves no room for a prompt in the "
                f"{config.max_position_embeddings} tokens that {folder} can see; lower it"
            )
        check_servers(data.servers, config)
        self._writer = ChatTokens.from_folder(folder, prompts.template, setting="prompts.template")
        template = None if prompts.template is None or self._writer.template is None else self._writer.template.text
        self._network = ActorCritic if algorithm.kind == "ppo" else Decoder
        super().__init__(recipe, config, folder, progress, template)
        self._data, self._algorithm = data, algorithm
        tasks = ReasoningTasks(prompts) if prompts.kind == "reasoning-gym" else None
        self._rewards = make_rewards(recipe.reward, folder, choose_device(recipe.device), tasks)
        given = prompts.sources if tasks is None else tasks.rows()
        found = read_prompts(given, self._writer, room, prompts.most_damaged, self._rewards.wrong, progress)
        held = held_out_places([each.key for each in found], prompts.held_out if recipe.evaluation.every else 0.0)
        if recipe.evaluation.every and not held:
            raise ConfigError(
                "prompts.held_out = 0 leaves nothing to evaluate on; raise it, or set evaluation.every = 0"
            )
        self._learnt = [each for place, each in enumerate(found) if place not in held]
        self._held = [found[place] for place in judged_places(held, recipe.evaluation.samples)]
        self._longest = max(len(each.tokens) for each in found)
        pad = config.pad_token_id
        self._pad = next(iter(config.eos_token_ids), 0) if pad is None else pad
        self.unit = "tokens" if algorithm.kind != "rloo" and algorithm.aggregate == "token" else "answers"
        self.objective: TaskObjective = _objective(algorithm, data)
        self._learner: Learner | None = None
        self._step = 0  # of the last update of this process
        self._begun = 0  # of its first one, until answers are kept
        progress.note(
            f"{len(self._learnt):,} prompts of up to {self._longest} tokens are learnt from, {len(self._held):,} are "
            f"held out; {data.batch_size} × {data.samples} answers a rollout"
        )

    def build_model(self) -> nn.Module:
        """See `Task`: with a head for values where these are learnt, which learns beside an adapter too."""
        model = super().build_model()
        if isinstance(model, ActorCritic):
            model.value.requires_grad_(True)
        return model

    def weights(self) -> Weights:
        """See `Task`: those of the checkpoint; values begin at zero, so that they disturb nothing."""
        known = super().weights()
        return lambda name, shape: Constant(0.0) if name.startswith("value.") else known(name, shape)

    def prompt(self, text: str) -> list[int]:
        """See `DecoderTask`: a turn of the user, where there is a template."""
        return self._writer.prompt({"prompt": text})

    def example(self, micro_batch: int) -> Batch:
        """See `Task`: the longest prompt, with answers of full length."""
        answers = micro_batch * self._data.samples
        rest = [self._pad] * (self._longest - 1)  # of prompts that are not the same, so that none is shared
        prompts = [[place // self._data.samples % self.config.vocab_size, *rest] for place in range(answers)]
        tokens = [[self._pad] * self._data.max_tokens] * answers
        zeros = torch.zeros(answers)
        kept = ["old"] * (self._algorithm.updates > 1 and self._algorithm.kind != "distill") + ["reference"] * (
            self._algorithm.kl > 0
        )
        of_answers = ["reward", "ended"]
        if self._algorithm.kind == "ppo":
            kept += ["advantage", "return", "value"]
        else:
            of_answers += ["advantage", "silent"]
        batch = answer_batch(
            prompts, tokens, dict.fromkeys(of_answers, zeros),
            {name: [[0.0] * self._data.max_tokens] * answers for name in kept},
        )  # fmt: skip
        if self._algorithm.kind == "distill":
            batch["teacher"] = torch.zeros(1, 1).expand(len(batch["rows"]), self.config.vocab_size)
        return batch | {"real": torch.ones(answers, dtype=torch.bool)}

    def stream(self, micro_batch: int, world: World) -> Stream:
        """See `Task`; a batch can be asked for once `after_update` has been called."""
        return RolloutStream(
            self._learnt, self._data, self._algorithm, self._rewards, self._bound, self._text,
            micro_batch=micro_batch, world=world, seed=self._recipe.seed,
        )  # fmt: skip

    def held_out(self, micro_batch: int, world: World) -> Iterator[Batch]:
        """See `Task`: the likeliest answers, by the weights as they are."""
        given = draws(len(self._held), micro_batch, world.rank, world.size)
        cuts = [(draw.samples.tolist(), torch.from_numpy(draw.real)) for draw in given]
        places = sorted({place for some, real in cuts for place in torch.tensor(some)[real].tolist()})
        learner = self._bound()
        found = greedy_answers(learner.sampler, [self._held[place] for place in places], self._data.max_tokens)
        answers = dict(zip(places, found, strict=True))
        rewards, golden, gold = dict[int, float](), dict[int, float](), self._rewards.gold
        for place, sampled in answers.items():
            answer = Answer(sampled, self._text(sampled.tokens))
            (rewards[place],) = self._rewards(self._held[place], [answer])
            if gold is not None:
                (golden[place],) = gold(self._held[place], [answer])
            if world.is_main and place < _KEPT and self._step:  # else the answers of a run that was over are kept
                reward = rewards[place] if self._rewards.known else None
                self._keep(self._held[place].text, answer.text, reward, shown=place < _SHOWN)
        first = places[0] if places else None
        for some, real in cuts:
            # Where this process has no answer of its own to fill up with, a token stands for one.
            some = [place if place in answers else first for place in some]
            of_answers = {
                "ended": torch.tensor([0.0 if place is None else float(answers[place].ended) for place in some]),
                "real": real,
            }
            if self._rewards.known:
                of_answers["reward"] = torch.tensor([0.0 if place is None else rewards[place] for place in some])
            if gold is not None:
                of_answers["gold"] = torch.tensor([0.0 if place is None else golden[place] for place in some])
            prompts = [self._held[place or 0].tokens for place in some]
            tokens = [[self._pad] if place is None else answers[place].tokens for place in some]
            yield learner.taught(answer_batch(prompts, tokens, of_answers))

    def after_update(self, model: nn.Module, world: World) -> tuple[Callable[[int], None], ...]:
        """See `Task`; the model is what answers from now on."""
        sampler = self._sampler(model, self._longest + self._data.max_tokens, world)
        algorithm, reference, teacher = self._algorithm, None, None
        if algorithm.kl:
            reference = self._other(algorithm.reference or self._tokenizer, "algorithm.reference", world.device)
        if algorithm.teacher is not None:
            teacher = self._other(algorithm.teacher, "algorithm.teacher", world.device)
        self._learner = Learner(model, sampler, reference, teacher)
        return (*super().after_update(model, world), self._updated)

    def _updated(self, step: int) -> None:
        self._begun, self._step = self._begun if self._step else step, step

    def kept_bytes(self, world: World) -> int:
        """See `KeepingTask`: a reference and a teacher, the engine's cache, and its weights where they are not the
        learner's own memory. A reward model is there already.

        Raises:
            ConfigError: reference or teacher is no checkpoint of the same tokens.
        """
        algorithm, kept = self._algorithm, 0
        reference = (algorithm.reference or self._tokenizer) if algorithm.kl else None
        for name, folder in (("algorithm.reference", reference), ("algorithm.teacher", algorithm.teacher)):
            if folder is not None:
                self._check_other(folder, name)
                kept += float_bytes(folder)
        if not self._data.servers:
            kept += cache_bytes(self.config, self._longest + self._data.max_tokens)
        return kept + self._copied_bytes(world)

    def _copied_bytes(self, world: World) -> int:
        """Of the weights that are copied before answers are sampled; see `Sampler`."""
        spread = isinstance(world, MeshWorld) and (world.config.zero > 0 or world.config.tp > 1)
        if spread or world.device.type != "cpu" or self._data.servers or self._data.ahead:
            return float_bytes(self._tokenizer)
        with torch.device("meta"):
            parameters = dict(self.build_model().named_parameters())
        adapted = (name.replace(".lora_A.", ".") for name in parameters if ".lora_A." in name)
        return sum(4 * parameters[name].numel() for name in adapted)

    def _sampler(self, model: nn.Module, longest: int, world: World) -> AnySampler:
        """What answers, prompts and answers having `longest` tokens at most."""
        scale = None if self._recipe.adapter is None else self._recipe.adapter.scale
        if self._data.servers:
            return ServerSampler(model, self.config, self._data.servers, world, scale)
        return Sampler(model, self.config, self._tokenizer, longest, scale, apart=self._data.ahead)

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """See `Task`; the run folder gets a page of how rewards moved."""
        super().export(model, folder, created_by)
        title = f"{self._algorithm.kind} from {self._tokenizer}"
        if (page := write_rollout_page(self._recipe.run_folder, title, _KEPT)) is not None:
            self._progress.note(f"rewards, lengths and answers: {page}")

    def next_command(self, folder: Path) -> str:
        """See `Task`."""
        return self._asked(folder)

    def _bound(self) -> Learner:
        assert self._learner is not None, "after_update comes before the first batch"
        return self._learner

    def _text(self, tokens: Sequence[int]) -> str:
        return self._writer.tokenizer.decode(list(tokens))

    def _other(self, folder: Path, name: str, device: torch.device) -> nn.Module:
        """The model in `folder`, of the setting `name`, in float32 as it stays."""
        self._check_other(folder, name)
        model = Decoder(open_checkpoint(folder).config).eval().requires_grad_(False)
        fill_weights(model, checkpoint_weights(folder, name))
        return model.to(device)

    def _check_other(self, folder: Path, name: str) -> None:
        """Refuse a model whose tokens are not those of `initial`."""
        if not (folder / "tokenizer.json").exists():
            raise ConfigError(f"{name} = {folder} is no checkpoint with a tokenizer; name one")
        theirs, ours = (read_backend(each / "tokenizer.json").to_str() for each in (folder, self._tokenizer))
        if theirs != ours:
            raise ConfigError(
                f"{name} = {folder} has another tokenizer than initial = {self._tokenizer}, so that its "
                "tokens mean something else; name a checkpoint of the same one"
            )
        config = open_checkpoint(folder).config
        if config.vocab_size != self.config.vocab_size:
            raise ConfigError(
                f"{name} = {folder} gives probabilities to {config.vocab_size:,} tokens, and initial = "
                f"{self._tokenizer} to {self.config.vocab_size:,}; name a checkpoint with as many"
            )

    def _keep(self, prompt: str, answer: str, reward: float | None, *, shown: bool) -> None:
        path = self._recipe.run_folder / "answers.jsonl"
        if self._begun:
            drop_later(path, self._begun - 1)  # what a run that was killed had kept, and which is answered again
            self._begun = 0
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                line = {"step": self._step, "prompt": prompt, "answer": answer}
                line |= {} if reward is None else {"reward": reward}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        if shown:
            self._progress.note(
                f"{prompt!r:.80} → {answer!r:.160}" + ("" if reward is None else f": reward {reward:g}")
            )


def _objective(algorithm: AlgorithmConfig, data: RolloutData) -> TaskObjective:
    if algorithm.kind == "distill":
        return OnPolicyDistillation(algorithm.divergence, algorithm.aggregate, data.max_tokens, data.temperature)
    if algorithm.kind == "ppo":
        return ProximalPolicy(
            clip=algorithm.clip, dual=algorithm.dual, value_weight=algorithm.value_weight,
            value_clip=algorithm.value_clip, entropy=algorithm.entropy, aggregate=algorithm.aggregate,
            most=data.max_tokens, temperature=data.temperature,
        )  # fmt: skip
    return PolicyGradient(
        clip=algorithm.clip, dual=algorithm.dual, kl=algorithm.kl, entropy=algorithm.entropy,
        whole=algorithm.kind == "rloo", aggregate=algorithm.aggregate if algorithm.kind == "grpo" else "answer",
        most=data.max_tokens, temperature=data.temperature,
    )  # fmt: skip


def _check_run(recipe: TrainRecipe) -> None:
    assert recipe.algorithm is not None, "the recipe is checked"
    if (
        (kind := recipe.algorithm.kind) in ("grpo", "rloo")
        and isinstance(recipe.data, RolloutData)
        and recipe.data.samples < 2
    ):
        raise ConfigError(
            f"data.samples = 1 leaves {kind} no other answer to compare one with; set it to 2 or more, or use "
            "algorithm.kind = 'ppo'"
        )
    if recipe.algorithm.answers is not None and isinstance(recipe.data, RolloutData) and recipe.data.servers:
        raise ConfigError("algorithm.answers and data.servers both say who answers; leave out one of them")
    parallel = recipe.parallel
    if parallel.pp * parallel.cp * parallel.ep > 1 or parallel.sequence:
        raise ConfigError(
            "data.kind = 'rollouts' takes parallel.dp, zero and tp; set parallel.pp, cp and ep to 1 and "
            "parallel.sequence to false"
        )
    if recipe.algorithm.kind == "draft" and not parallel.is_plain:
        raise ConfigError(
            "algorithm.kind = 'draft' takes data parallelism alone, since the model itself does not learn; set "
            "parallel.zero to 0 and parallel.tp to 1"
        )
    if recipe.adapter is not None and recipe.adapter.base == "int8":
        raise ConfigError(
            "adapter.base = 'int8' is not for data.kind = 'rollouts', whose answers come from floating-point weights; "
            "leave it out"
        )
    if recipe.compile:
        raise ConfigError(
            "compile = true is not for data.kind = 'rollouts': every batch has answers of other lengths; set it to "
            "false"
        )
    if recipe.objective != ObjectiveConfig():
        raise ConfigError(
            "[objective] is not for data.kind = 'rollouts', which learns as [algorithm] says; leave it out"
        )
