"""The held-out score: how well the current policy does on prompts that never train it.

Generation goes through GRPOTrainer itself (template, tools, environment and sampling as in training), but not
through its `evaluate`, whose mean depends on batches and ranks and which writes into the state of training.
"""

import copy
import hashlib
import inspect
import math
import random
import re
import statistics
from asyncio import run_coroutine_threadsafe
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, set_seed
from trl.trainer.grpo_trainer import GRPOTrainer

from composer_rl.rollout import has_tool_error

Row = dict[str, Any]

# Row number of a row that only fills a batch.
PADDING = -1
# Columns that a reward function receives under names of TRL's own.
OWN_COLUMNS = ("prompt", "completion", "completion_ids")


@dataclass(frozen=True)
class HeldoutScore:
    """The gold reward of one completion per held-out prompt, the same on every rank."""

    mean: float
    n: int
    # In the order of the held-out rows.
    per_prompt: tuple[float, ...]
    # Share of rollouts with at least one tool error.
    tool_error_share: float

    @property
    def standard_error(self) -> float:
        """Standard error of the mean over prompts: sd / sqrt(n), so sqrt(p (1 - p) / n) for 0/1 scores."""
        return statistics.pstdev(self.per_prompt) / math.sqrt(self.n)


class HeldoutEvaluation:
    """Scores the current policy of a GRPOTrainer on fixed rows, leaving no trace in its training.

    Every rank must call it at the same time, outside forward and backward. The sample of a row depends on the
    weights, `seed` and the row's number, not on ranks or batch size, up to the rounding of the logits, which
    can decide a near tie. That holds where transformers' `generate` samples; vLLM and continuous batching
    sample in their own way, after the same global seed.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        gold: Callable[..., Any],
        error_pattern: str,
        *,
        seed: int,
        batch_size: int,
    ) -> None:
        """Fix what is measured.

        Args:
            rows: held-out rows, each with `prompt` and the columns that gold and the environment read.
            gold: reward function with TRL's signature, called with each row once; an async one runs on the
                trainer's event loop, so it must be one of the trainer's reward functions.
            error_pattern: regular expression that marks a tool result as an error.
            seed: seed of the samples.
            batch_size: rows per device per generation, an upper bound.

        Raises ValueError for no rows or a batch size below 1.
        """
        if not rows or batch_size < 1:
            raise ValueError(f"{len(rows)} held-out rows, batch_size={batch_size}: both must be at least 1")
        self.rows = rows
        self.gold = gold
        self.error_pattern = re.compile(error_pattern)
        self.seed = seed
        self.batch_size = batch_size
        # Apart from the trainer's own, whose instances may carry state from one rollout to the next.
        self.environment_pool: dict[str | None, list[Any]] = defaultdict(list)

    def __call__(self, trainer: GRPOTrainer) -> HeldoutScore:
        """Generate one completion per row with the current weights and return their exact mean gold score.

        Raises ValueError, on every rank, for a score that is missing or not finite.
        """
        rank, world_size = trainer.accelerator.process_index, trainer.accelerator.num_processes
        scored: list[tuple[int, float, bool]] = []
        with _unchanged(trainer), _unchanged(trainer.state), _own_random_state(self.seed):
            vars(trainer).update(
                # TRL appends to these in place; the originals come back with the trainer's attributes.
                _metrics=copy.deepcopy(trainer._metrics),
                _logs=copy.deepcopy(trainer._logs),
                _pending_metrics=copy.deepcopy(trainer._pending_metrics),
                _pending_extra_logs=copy.deepcopy(trainer._pending_extra_logs),
                _environment_pool=self.environment_pool,
                num_generations_eval=1,
                # No forward beside generation: a score needs neither reference (beta) nor old log-probs.
                beta=0.0,
                _get_per_token_logps_and_entropies=_no_logps,
            )
            with _evaluation_mode(trainer.model), _keyed_sampling(trainer, self.seed) as start_batch:
                for numbers in self._batches(rank, world_size):
                    start_batch(numbers)
                    scored += self._score_batch(trainer, numbers)
        return self._summarise(gather_object(scored))

    def _batches(self, rank: int, world_size: int) -> list[list[int]]:
        """Row numbers of one rank, padded so that all ranks have as many batches of one size."""
        share = math.ceil(len(self.rows) / world_size)
        count = math.ceil(share / self.batch_size)
        size = math.ceil(share / count)
        numbers = list(range(rank, len(self.rows), world_size))
        numbers += [PADDING] * (count * size - len(numbers))
        return [numbers[start : start + size] for start in range(0, count * size, size)]

    def _score_batch(self, trainer: GRPOTrainer, numbers: list[int]) -> list[tuple[int, float, bool]]:
        """(row number, gold score, tool error) of the rows of one batch, padding left out."""
        own = [place for place, number in enumerate(numbers) if number != PADDING]
        scored: list[tuple[int, float, bool]] = []

        def of_own(values: Sequence[Any]) -> list[Any]:
            return [values[place] for place in own]

        def score_with_gold(
            inputs: list[Row], prompts: list[Any], completions: list[Any], completion_ids: list[list[int]]
        ) -> torch.Tensor:
            if own:
                rows = of_own(inputs)
                columns = {key: [row[key] for row in rows] for key in rows[0] if key not in OWN_COLUMNS}
                if trainer.environments is not None:
                    columns["environments"] = of_own(trainer.environments)
                scores = self.gold(
                    prompts=of_own(prompts),
                    completions=of_own(completions),
                    completion_ids=of_own(completion_ids),
                    **columns,
                    trainer_state=trainer.state,
                    log_extra=_discard,
                    log_metric=_discard,
                )
                if inspect.isawaitable(scores):
                    scores = run_coroutine_threadsafe(_value_of(scores), trainer.async_loop).result()
                errors = [has_tool_error(completion, self.error_pattern) for completion in of_own(completions)]
                scored.extend(
                    (number, math.nan if score is None else float(score), error)
                    for number, score, error in zip(of_own(numbers), scores, errors, strict=True)
                )
            # What TRL goes on to normalise and log is thrown away; only the shape matters, all ranks' rows.
            total = len(numbers) * trainer.accelerator.num_processes
            return torch.zeros(total, len(trainer.reward_funcs), device=trainer.accelerator.device)

        vars(trainer).update(_calculate_rewards=score_with_gold)
        trainer._generate_and_score_completions([dict(self.rows[max(number, 0)]) for number in numbers])
        return scored

    def _summarise(self, scored: list[tuple[int, float, bool]]) -> HeldoutScore:
        """The score of all ranks' rows."""
        scored = sorted(scored)
        for number, score, _ in scored:
            if not math.isfinite(score):
                raise ValueError(
                    f"held-out row {number}: the gold reward returned {score};"
                    " it must give every completion a finite number"
                )
        per_prompt = tuple(score for _, score, _ in scored)
        return HeldoutScore(
            mean=statistics.fmean(per_prompt),
            n=len(per_prompt),
            per_prompt=per_prompt,
            tool_error_share=statistics.fmean(error for _, _, error in scored),
        )


def _discard(*_: Any) -> None:
    """What gold logs is not a metric of training."""


async def _value_of(scores: Any) -> Any:
    return await scores


def _no_logps(
    model: object, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, **_: Any
) -> tuple[torch.Tensor, None, None]:
    """Stand in for GRPOTrainer._get_per_token_logps_and_entropies without a forward."""
    return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None


@contextmanager
def _unchanged(owner: object) -> Iterator[None]:
    """Bind every attribute of `owner` to what it was, whatever the block assigned or raised."""
    attributes = vars(owner)
    before = dict(attributes)
    try:
        yield
    finally:
        for name in attributes.keys() - before.keys():
            del attributes[name]
        attributes.update(before)


@contextmanager
def _own_random_state(seed: int) -> Iterator[None]:
    """Run the block under a fixed seed and give Python, numpy, torch and CUDA their random states back."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            set_seed(seed)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@contextmanager
def _evaluation_mode(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def _keyed_sampling(trainer: Any, seed: int) -> Iterator[Callable[[list[int]], None]]:
    """Make the trainer sample every row with its own noise; yields a function that announces a batch's rows.

    TRL's tool loop generates again for the rows that called a tool, in batch order and each from the exact
    tokens it has so far, so those tokens say which row a sequence belongs to, equal prompts included.
    """
    if trainer.use_vllm or trainer.use_transformers_continuous_batching:
        yield _discard
        return

    numbers: list[int] = []
    tokens: list[list[int]] = []
    noise: list[GumbelNoise] = []
    generate = trainer._generate_single_turn

    def start_batch(rows: list[int]) -> None:
        numbers[:] = rows
        tokens[:] = [[] for _ in rows]

    def generate_single_turn(prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        places: list[int] = []
        for ids in prompt_ids:
            later = range(places[-1] + 1 if places else 0, len(tokens))
            place = next((place for place in later if ids[: len(tokens[place])] == tokens[place]), None)
            if place is None:
                raise RuntimeError("held-out evaluation: a generation call continues no row of its batch")
            places.append(place)
        keys = [(numbers[place], len(ids)) for place, ids in zip(places, prompt_ids, strict=True)]
        noise[:] = [GumbelNoise(seed, keys)]
        completion_ids, logprobs = generate(prompt_ids, *args, **kwargs)
        for place, ids, new in zip(places, prompt_ids, completion_ids, strict=True):
            tokens[place] = ids + new
        return completion_ids, logprobs

    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    if not isinstance(model, PreTrainedModel):
        model = model.get_base_model()
    build = model._get_logits_processor

    def get_logits_processor(*args: Any, **kwargs: Any) -> LogitsProcessorList:
        # Last, so that the noise meets the distribution this run samples from, whatever shapes it.
        return LogitsProcessorList([*build(*args, **kwargs), *noise])

    vars(trainer).update(_generate_single_turn=generate_single_turn)
    vars(model).update(_get_logits_processor=get_logits_processor)
    try:
        yield start_batch
    finally:
        del vars(model)["_get_logits_processor"]


class GumbelNoise(LogitsProcessor):
    """Sampling as a function of a key: adds Gumbel noise, leaves only the largest score of a row finite.

    argmax(scores + noise) is a draw from softmax(scores); `do_sample` picks it whatever its generator is.
    A NaN among the scores stays one and fails in sampling as it would without noise.

    Args:
        seed: seed of all draws.
        keys: one (row number, tokens before the first draw) per sequence.
    """

    def __init__(self, seed: int, keys: Sequence[tuple[int, int]]) -> None:
        self.seeds = [_hash(seed, row, position) for row, position in keys]
        self.generators: list[torch.Generator] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Map scores (sequences, vocabulary) to the same shape with one finite entry per sequence."""
        if not self.generators:
            self.generators = [torch.Generator(scores.device).manual_seed(seed) for seed in self.seeds]
        uniform = torch.stack(
            [
                torch.rand(scores.size(1), generator=generator, device=scores.device, dtype=torch.float64)
                for generator in self.generators
            ]
        )
        drawn = (scores.double() - torch.log(-torch.log(uniform))).argmax(dim=1, keepdim=True)
        return torch.full_like(scores, -math.inf).scatter(1, drawn, scores.gather(1, drawn))


def _hash(*numbers: int) -> int:
    """A 63-bit seed from numbers; neighbours give unrelated seeds."""
    digest = hashlib.sha256(" ".join(map(str, numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
