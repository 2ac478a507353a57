"""Replay: preference pairs from a file -> batches beside GRPO's -> their preference loss.

A pair holds one conversation and two ways to go on. Only the tokens that an assistant wrote in them are trained.
Policy and reference log-probs both come from TRL's fused head, so both are at the sampling temperature.
"""

import hashlib
import json
import math
import os
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object, is_peft_model
from jinja2 import TemplateError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase
from trl import GRPOTrainer
from trl.trainer.utils import maybe_gather_lm_head_ctx, use_adapter

from composer_rl.config import ConfigError, require, require_range
from composer_rl.losses import preference_loss, sft_loss

Message = dict[str, Any]

LOSSES = ("sigmoid", "ipo", "robust")
# Values of each weight tensor that go into the fingerprint; training moves nearly every value.
SAMPLED_VALUES = 64


class ReplayMismatch(ValueError):
    """Stored reference log-probs that are missing or do not belong to this run: one line that says which part."""


@dataclass(frozen=True)
class ReplayConfig:
    """How pairs enter the loss. Raises ConfigError for a value out of range."""

    # Strength of the pull to the reference; ipo, which averages over tokens, needs a larger one than sigmoid.
    dpo_beta: float = 0.1
    # sigmoid, ipo or robust (losses.preference_loss).
    loss: str = "sigmoid"
    # robust's probability that a pair is labelled the wrong way round.
    flip_rate: float = 0.0
    # Weight of the chosen response's negative log-likelihood per token, added to each pair's loss.
    sft_weight: float = 0.0
    # Pairs per optimizer update, over all ranks.
    batch_size: int = 8

    def __post_init__(self) -> None:
        require_range("replay", self, "dpo_beta", 0.0, open_low=True)
        require_range("replay", self, "sft_weight", 0.0)
        require_range("replay", self, "batch_size", 1)
        require(self.loss in LOSSES, "replay.loss", self.loss, f"must be one of {', '.join(LOSSES)}")
        require(0 <= self.flip_rate < 0.5, "replay.flip_rate", self.flip_rate, "must be at least 0 and below 0.5")
        require(
            self.flip_rate == 0 or self.loss == "robust",
            "replay.flip_rate",
            self.flip_rate,
            f"has no effect with loss={self.loss}; use loss=robust",
        )


@dataclass(frozen=True)
class Side:
    """One way to go on: the token ids of the whole conversation, and 1 at each that is trained."""

    input_ids: tuple[int, ...]
    response_mask: tuple[int, ...]


@dataclass(frozen=True)
class Pair:
    """A preference between two sides that begin with the same prompt."""

    chosen: Side
    rejected: Side
    weight: float


def trained_ids(side: Side) -> list[int]:
    """The token ids of a side that are trained."""
    return [token for token, trained in zip(side.input_ids, side.response_mask, strict=True) if trained]


class PrefixDiffers(Exception):
    """The template or the tokenizer does not continue the tokens of a shorter conversation."""


class ReplayChannel:
    """The pairs of a run, their reference log-probs, and which of them each optimizer update takes.

    `prepare` must run before the first `batch`. The pairs of an update follow from the seed and the number of the
    update alone, so a checkpoint needs nothing from here and the layout of ranks and micro-batches changes nothing.

    Attributes:
        pairs: the usable pairs, in the order of the file.
        dropped: pairs left out, by reason.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        config: ReplayConfig,
        *,
        seed: int,
        pad_token_id: int,
        tokenizer_fingerprint: Mapping[str, str],
        dropped: Mapping[str, int],
    ) -> None:
        self.pairs = pairs
        self.config = config
        self.seed = seed
        self.pad_token_id = pad_token_id
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.dropped = dict(dropped)
        # (pairs, 2): summed log-probs of the chosen and of the rejected response.
        self.reference: torch.Tensor | None = None

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        config: ReplayConfig,
        *,
        seed: int,
        max_length: int,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
    ) -> "ReplayChannel":
        """Read and tokenise the pairs of a JSONL file, and leave out and count those that cannot teach.

        Args:
            path: one object per line: prompt, chosen and rejected (lists of messages, TRL's conversational
                preference format), and optionally weight (above 0, default 1).
            tokenizer: the policy's; its pad token may be any, EOS included.
            config: loss and batch size.
            seed: seed of the order of the pairs.
            max_length: tokens that prompt and response may have together; a longer pair is dropped, not cut.
            tools, chat_template: as GRPOTrainer renders its prompts, so that both see the same context.

        Raises ConfigError, with file and line, for a line that is not such an object or that the template refuses,
        and when no pair is left.
        """
        path = Path(path)
        pairs: list[Pair] = []
        dropped: Counter[str] = Counter()

        def render(messages: list[Message], *, add_generation_prompt: bool = False) -> list[int]:
            ids: Any = tokenizer.apply_chat_template(
                messages,
                # An empty list makes Llama's template announce tools.
                tools=list(tools) if tools else None,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                return_dict=False,
            )
            return ids

        def tokenise(prompt: list[Message], response: list[Message]) -> Side:
            """Render the conversation; the mask covers each assistant message up to its end-of-turn token."""
            whole = render([*prompt, *response])
            mask = [0] * len(whole)
            length = 0
            for place, message in enumerate(response):
                if message["role"] != "assistant":
                    continue
                before = render([*prompt, *response[:place]], add_generation_prompt=True)
                after = render([*prompt, *response[: place + 1]])
                if whole[: len(before)] != before or whole[: len(after)] != after:
                    raise PrefixDiffers
                turn = after[len(before) :]
                if tokenizer.eos_token_id in turn:
                    # What the template puts after the end of the turn is never sampled.
                    turn = turn[: len(turn) - turn[::-1].index(tokenizer.eos_token_id)]
                mask[len(before) : len(before) + len(turn)] = [1] * len(turn)
                length = len(before) + len(turn)
            return Side(tuple(whole[:length]), tuple(mask[:length]))

        for where, record in _records(path):
            prompt, chosen, rejected = record["prompt"], record["chosen"], record["rejected"]
            if not (_says_something(chosen) and _says_something(rejected)):
                dropped["empty side"] += 1
                continue
            try:
                prefix = tuple(render(prompt, add_generation_prompt=True))
                pair = Pair(tokenise(prompt, chosen), tokenise(prompt, rejected), float(record.get("weight", 1.0)))
            except PrefixDiffers:
                dropped["prefix differs"] += 1
                continue
            except (TemplateError, TypeError) as error:
                raise ConfigError(f"{where}: the chat template refuses the conversation ({error})") from error
            sides = (pair.chosen, pair.rejected)
            if any(side.input_ids[: len(prefix)] != prefix or any(side.response_mask[: len(prefix)]) for side in sides):
                dropped["prefix differs"] += 1
            elif any(set(trained_ids(side)) <= {tokenizer.eos_token_id} for side in sides):
                # A template without tool calls leaves nothing of a side that only calls one.
                dropped["empty side"] += 1
            elif pair.chosen.input_ids == pair.rejected.input_ids:
                dropped["chosen equals rejected"] += 1
            elif max(len(side.input_ids) for side in sides) > max_length:
                dropped[f"longer than max_length={max_length}"] += 1
            else:
                pairs.append(pair)
        if not pairs:
            reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "the file is empty"
            raise ConfigError(f"replay: no usable pair in {path} (dropped: {reasons})")
        pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        assert isinstance(pad_token_id, int)
        return cls(
            pairs,
            config,
            seed=seed,
            pad_token_id=pad_token_id,
            tokenizer_fingerprint={
                "tokenizer": _digest(sorted(tokenizer.get_vocab().items()), tokenizer.eos_token_id),
                "chat template": _digest(chat_template or tokenizer.chat_template),
            },
            dropped=dropped,
        )

    def prepare(self, trainer: GRPOTrainer, cache: Path, *, must_exist: bool = False) -> None:
        """Take the pairs' reference log-probs from the file `cache`, or compute them now and write it.

        The reference is the policy as it is now, in eval mode; of a LoRA policy its base, or its adapter "ref" where
        GRPOTrainer keeps one. So call it before the first update, on every rank, once the model is where it trains.

        Args:
            trainer: its model has TRL's fused head.
            cache: a .safetensors file that all ranks see or only the main one.
            must_exist: refuse to compute; for a resumed run, whose weights are no longer the reference.

        Raises ReplayMismatch for a cache that is missing although it must exist, that cannot be read, or that
        belongs to another model, tokenizer, chat template, set of pairs, sampling temperature or precision.
        """
        accelerator = trainer.accelerator
        stored = broadcast_object_list([_read_cache(cache) if accelerator.is_main_process else None])[0]
        if stored is None and must_exist:
            raise ReplayMismatch(
                f"replay: {cache} is missing, and reference log-probs cannot be computed from resumed weights;"
                " restore the file or start a new run"
            )
        fingerprint = self._fingerprint(trainer, trained=must_exist)
        if stored is None:
            self.reference = self._reference_logps(trainer)
            if accelerator.is_main_process:
                _write_cache(cache, self.reference, fingerprint)
            return
        made_for, self.reference = stored
        if other := [part for part, value in fingerprint.items() if made_for.get(part) != value]:
            raise ReplayMismatch(
                f"replay: {cache} holds the reference log-probs of another {', '.join(other)};"
                " restore what they were computed with, or start a new run"
            )

    def batch(
        self, step: int, micro: int, accumulation: int, rank: int, world_size: int, device: torch.device | str
    ) -> dict[str, torch.Tensor]:
        """Return one rank's pairs of one micro-batch.

        Args:
            step: number of the optimizer update, from 0.
            micro: place of the micro-batch within the update, in [0, accumulation).

        The update takes the next `batch_size` pairs of a stream that goes through the file once per epoch, in a new
        order each time. P, pairs per rank and micro-batch, is the same everywhere: weight 0 fills up.

        Returns:
            dpo_{chosen,rejected}_{input_ids,attention_mask,response_mask}: (P, T), padded on the right.
            dpo_{chosen,rejected}_ref_logprobs: (P,), summed over the response.
            dpo_weight: (P,).
            dpo_window_weight: (), total weight of the update over all ranks and micro-batches.
        """
        if self.reference is None:
            raise RuntimeError("ReplayChannel.batch needs the reference log-probs: call prepare first")
        update = self._update(step)
        slots = accumulation * world_size
        own = update[micro * world_size + rank :: slots]
        padding = update[:1] * (math.ceil(len(update) / slots) - len(own))
        weights = [self.pairs[index].weight for index in own] + [0.0] * len(padding)
        chosen_ref, rejected_ref = self.reference[own + padding].to(device).unbind(-1)
        return {
            **self._collate(own + padding, device),
            "dpo_chosen_ref_logprobs": chosen_ref,
            "dpo_rejected_ref_logprobs": rejected_ref,
            "dpo_weight": torch.tensor(weights, device=device),
            "dpo_window_weight": torch.tensor(sum(self.pairs[index].weight for index in update), device=device),
        }

    def loss(
        self, trainer: GRPOTrainer, model: Any, inputs: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the weighted sum of the pairs' losses and, detached, sums over the pairs for logging.

        The sum is attached to the model's graph and finite, a plain 0 when every weight is 0. Divide it by
        dpo_window_weight for this batch's part of the update's mean. The sums, of the pairs with weight: pairs,
        weight, accuracy (chosen gained more than rejected), margin (dpo_beta times the difference of the two
        log-ratios, in nats), chosen_logratio and rejected_logratio (in nats, over whole responses).
        """
        chosen_logps, rejected_logps = _response_logps(trainer, model, inputs).chunk(2)
        chosen_length = inputs["dpo_chosen_response_mask"].sum(-1)
        chosen_logratio = chosen_logps - inputs["dpo_chosen_ref_logprobs"]
        rejected_logratio = rejected_logps - inputs["dpo_rejected_ref_logprobs"]
        per_pair = preference_loss(
            chosen_logratio,
            rejected_logratio,
            beta=self.config.dpo_beta,
            loss_type=self.config.loss,
            chosen_length=chosen_length,
            rejected_length=inputs["dpo_rejected_response_mask"].sum(-1),
            flip_rate=self.config.flip_rate,
        ) + self.config.sft_weight * sft_loss(chosen_logps, chosen_length)

        weight = inputs["dpo_weight"]
        counted = (weight > 0).to(per_pair.dtype)
        difference = (chosen_logratio - rejected_logratio).detach()
        sums = {
            "pairs": counted.sum(),
            "weight": weight.sum(),
            "accuracy": (counted * (difference > 0)).sum(),
            "margin": self.config.dpo_beta * (counted * difference).sum(),
            "chosen_logratio": (counted * chosen_logratio.detach()).sum(),
            "rejected_logratio": (counted * rejected_logratio.detach()).sum(),
        }
        return (weight * per_pair).sum(), sums

    def _update(self, step: int) -> list[int]:
        """Indices of the pairs of an update."""
        first = step * self.config.batch_size
        positions = [divmod(first + offset, len(self.pairs)) for offset in range(self.config.batch_size)]
        return [_order(self.seed, epoch, len(self.pairs))[place] for epoch, place in positions]

    def _collate(self, indices: Sequence[int], device: torch.device | str) -> dict[str, torch.Tensor]:
        """Token tensors of pairs, both sides padded on the right to the longest of all."""
        pairs = [self.pairs[index] for index in indices]
        sides = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        columns: dict[str, tuple[list[Sequence[int]], int]] = {
            "input_ids": ([side.input_ids for side in sides], self.pad_token_id),
            "attention_mask": ([[1] * len(side.input_ids) for side in sides], 0),
            "response_mask": ([side.response_mask for side in sides], 0),
        }
        tensors = {}
        for name, (rows, fill) in columns.items():
            padded = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill)
            tensors[f"dpo_chosen_{name}"], tensors[f"dpo_rejected_{name}"] = padded.to(device).chunk(2)
        return tensors

    def _reference_logps(self, trainer: GRPOTrainer) -> torch.Tensor:
        """Summed log-probs (pairs, 2) under the reference, float32 on the CPU, the same on every rank."""
        accelerator = trainer.accelerator
        model: Any = trainer.model
        # Neighbours of like length, so that little is padding.
        order = sorted(range(len(self.pairs)), key=lambda index: len(self.pairs[index].chosen.input_ids))
        own = order[accelerator.process_index :: accelerator.num_processes]
        # Under ZeRO-3 a forward is a collective: as many on every rank.
        own += order[:1] * (math.ceil(len(order) / accelerator.num_processes) - len(own))
        size = trainer.args.per_device_train_batch_size
        scored: list[tuple[int, list[float]]] = []
        training = model.training
        model.eval()
        try:
            with torch.no_grad(), _reference_weights(trainer):
                for start in range(0, len(own), size):
                    indices = own[start : start + size]
                    inputs = self._collate(indices, accelerator.device)
                    logps = _response_logps(trainer, model, inputs).view(2, -1).T.tolist()
                    scored += zip(indices, logps, strict=True)
        finally:
            model.train(training)
        found = dict(gather_object(scored))
        return torch.tensor([found[index] for index in range(len(self.pairs))])

    def _fingerprint(self, trainer: GRPOTrainer, *, trained: bool) -> dict[str, str]:
        """What the reference log-probs depend on, by the name a user knows it under."""
        volatile = ("_name_or_path", "transformers_version", "use_cache")
        model: Any = trainer.model
        args: Any = trainer.args
        config = {key: value for key, value in model.config.to_dict().items() if key not in volatile}
        fingerprint = {
            "model configuration": _digest(config),
            **self.tokenizer_fingerprint,
            "set of pairs": _digest(
                [(side.input_ids, side.response_mask) for pair in self.pairs for side in (pair.chosen, pair.rejected)]
            ),
            "sampling temperature": str(args.temperature),
            "precision": f"{trainer.accelerator.mixed_precision} {args.cast_lm_head_to_fp32}",
        }
        # A LoRA policy's base is never trained.
        if not trained or is_peft_model(model):
            fingerprint["model"] = _weights_digest(model)
        return fingerprint


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    """The order of `count` pairs in an epoch."""
    order = list(range(count))
    random.Random(f"{seed} replay {epoch}").shuffle(order)
    return order


def _response_logps(trainer: GRPOTrainer, model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Log-probs (2 P,) of the chosen, then of the rejected responses, at the sampling temperature; one forward."""
    input_ids, attention_mask, response_mask = (
        torch.cat([inputs[f"dpo_chosen_{name}"], inputs[f"dpo_rejected_{name}"]])
        for name in ("input_ids", "attention_mask", "response_mask")
    )
    labels = input_ids.masked_fill(response_mask == 0, -100)
    with trainer.accelerator.autocast():
        output = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, fused_lm_head=True)
    # The fused head gives 0 where there is no label.
    log_probs: torch.Tensor = output.log_probs
    return log_probs.sum(-1)


def _reference_weights(trainer: GRPOTrainer) -> AbstractContextManager[None]:
    """The weights that GRPOTrainer takes for its reference, where that is not another model."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_peft_model(model):
        return nullcontext()
    return use_adapter(model, "ref" if "ref" in model.peft_config else None)


def _weights_digest(model: Any) -> str:
    """Digest of names, shapes and some evenly spaced values of the weights; a collective under ZeRO-3.

    Of a LoRA policy only the base's weights count, which are the ones it does not train.
    """
    lora = is_peft_model(model)
    parts = []
    for name, parameter in model.named_parameters():
        if lora and parameter.requires_grad:
            continue
        with maybe_gather_lm_head_ctx(parameter):
            flat = parameter.detach().flatten()
            values = flat[:: max(1, len(flat) // SAMPLED_VALUES)].double().tolist()
            parts.append((name, tuple(parameter.shape), str(parameter.dtype), values))
    return _digest(parts)


def _digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _read_cache(cache: Path) -> tuple[dict[str, str], torch.Tensor] | None:
    """The fingerprint and the log-probs of a cache file, None when there is none."""
    if not cache.exists():
        return None
    try:
        with safe_open(cache, framework="pt") as file:
            return file.metadata() or {}, file.get_tensor("reference_logps")
    except SafetensorError as error:
        raise ReplayMismatch(f"replay: {cache} cannot be read ({error}); restore it or start a new run") from error


def _write_cache(cache: Path, reference: torch.Tensor, fingerprint: dict[str, str]) -> None:
    """Write a cache file that is whole or absent, whenever the process is killed."""
    partial = cache.with_name(f"{cache.name}.partial")
    save_file({"reference_logps": reference}, partial, metadata=fingerprint)
    os.replace(partial, cache)


def _says_something(response: Sequence[Message]) -> bool:
    return any(
        message["role"] == "assistant" and bool((message.get("content") or "").strip() or message.get("tool_calls"))
        for message in response
    )


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object of the file with its place, checked. Raises ConfigError for one that is not a pair."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"replay: {path} cannot be read ({error.strerror})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line.decode())
            # A lone surrogate is valid JSON, but no text that could be tokenised.
            json.dumps(record, ensure_ascii=False).encode()
        except ValueError as error:
            raise ConfigError(f"{where}: is not a JSON object in UTF-8 ({error})") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{where}: is not a JSON object but a {type(record).__name__}")
        for key in ("prompt", "chosen", "rejected"):
            if key not in record:
                raise ConfigError(f"{where}: has no {key}; a pair has prompt, chosen and rejected")
            if not _is_conversation(record[key]):
                raise ConfigError(f"{where}: {key} must be a list of messages, each with a role and a text content")
        if not record["prompt"]:
            raise ConfigError(f"{where}: prompt is empty; give at least one message")
        weight = record.get("weight", 1.0)
        number_like = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not (number_like and math.isfinite(weight) and weight > 0):
            raise ConfigError(f"{where}: weight={weight} must be a finite number above 0; leave the pair out instead")
        yield where, record


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content") or "", str)
        for message in value
    )
