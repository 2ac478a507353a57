"""ComposerTrainer: TRL's GRPOTrainer with signals that compose.

total = grpo + alpha_sdpo * sdpo + beta_replay * replay, and the KL to the reference in the reward. Each override
says which TRL method it replaces and why; with every signal off they pass through.
"""

import dataclasses
import inspect
import math
import re
import time
import warnings
from collections import Counter, defaultdict
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOConfig, GRPOTrainer

from composer_rl.channels.kl import KLInReward, validate_kl_in_reward_config
from composer_rl.channels.replay import ReplayChannel
from composer_rl.channels.sdpo import (
    FACTS,
    TEACHERS,
    HintRenderer,
    HintSource,
    Sampled,
    Teacher,
    TeacherRows,
    captured_hidden_states,
    causal_model,
    sdpo_loss,
)
from composer_rl.collator import collate_teacher_rows
from composer_rl.rollout import has_tool_error, model_turns

# Optimizer steps without one eligible sample after which a channel that is on says so.
PATIENCE = 20

# What a window sums over its micro-batches and ranks, in the order of the all-reduce.
SDPO_SUMS = ("distilled_tokens", "gap_error", "gap_other", "other_tokens", "teacher_entropy")
REPLAY_SUMS = ("pairs", "accuracy", "margin", "chosen_logratio", "rejected_logratio")


class ComposerTrainer(GRPOTrainer):
    """GRPOTrainer plus self-distillation at error turns, preference pairs, and KL in the reward.

    Args beyond GRPOTrainer's:
        alpha_sdpo, beta_replay: weights of the two channels; 0 = absent.
        sdpo_jsd_beta: 0 = KL(teacher || student), 1 = KL(student || teacher), between = generalised JSD.
        sdpo_temperature: of both sides; None = the sampling temperature.
        sdpo_token_clip: cap of a token's divergence; None = none.
        sdpo_is_clip: cap of the importance weight of off-policy tokens; None = no weight.
        sdpo_teacher: ema, frozen or live; an ema of a LoRA policy is its frozen base (adapter off).
        sdpo_teacher_ema_rate: weight of the student in each EMA update, in (0, 1].
        sdpo_max_turns_per_rollout: error turns distilled per rollout.
        sdpo_max_length: tokens a teacher row may have; None = the model's max_position_embeddings.
        sdpo_success_threshold: reward at or above which a rollout succeeded (single-turn errors, peers).
        strict_sdpo_alignment: raise on tokens that do not line up; False warns, skips and counts.
        hints: the hint source; required with alpha_sdpo > 0.
        replay_dpo_beta: beta of the preference loss, over the one in the pairs' own config.
        replay: the pairs; required with beta_replay > 0.
        kl_in_reward: subtract args.beta times the sequence's KL from its reward, instead of TRL's in-loss term.
        kl_estimator: k1 (exact) or k3 (a labelled experiment). kl_reward_scaling: none or raw_std.
        heldout_guard, heldout_eval_fn, strict_killswitch: the guard's place; a guard other than None is refused.
        error_pattern: regular expression that marks a tool result as an error.

    Raises ValueError for a value out of range, a channel without its source, dropout that would stay on beside a
    channel, a chat template that cannot render a hint, sdpo_max_length above the model's positions, a batch
    schedule whose accumulation windows straddle generations, and what validate_kl_in_reward_config refuses.
    """

    # Set by GRPOTrainer.__init__, declared wider there.
    model: PreTrainedModel
    args: GRPOConfig
    num_generations: int
    processing_class: PreTrainedTokenizerBase
    chat_template_kwargs: dict[str, Any]

    def __init__(
        self,
        *args: Any,
        alpha_sdpo: float = 0.0,
        beta_replay: float = 0.0,
        sdpo_jsd_beta: float = 0.5,
        sdpo_temperature: float | None = None,
        sdpo_token_clip: float | None = None,
        sdpo_is_clip: float | None = 2.0,
        sdpo_teacher: str = "ema",
        sdpo_teacher_ema_rate: float = 0.05,
        sdpo_max_turns_per_rollout: int = 4,
        sdpo_max_length: int | None = None,
        sdpo_success_threshold: float = 1.0,
        strict_sdpo_alignment: bool = True,
        hints: HintSource | None = None,
        replay_dpo_beta: float = 0.1,
        replay: ReplayChannel | None = None,
        kl_in_reward: bool = False,
        kl_estimator: str = "k1",
        kl_reward_scaling: str = "none",
        heldout_guard: None = None,
        heldout_eval_fn: None = None,
        strict_killswitch: bool = True,
        error_pattern: str | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value, valid, wanted in (
            ("alpha_sdpo", alpha_sdpo, alpha_sdpo >= 0, "at least 0"),
            ("beta_replay", beta_replay, beta_replay >= 0, "at least 0"),
            ("sdpo_jsd_beta", sdpo_jsd_beta, 0 <= sdpo_jsd_beta <= 1, "in [0, 1]"),
            ("sdpo_temperature", sdpo_temperature, sdpo_temperature is None or sdpo_temperature > 0, "above 0"),
            ("sdpo_teacher", sdpo_teacher, sdpo_teacher in TEACHERS, f"one of {', '.join(TEACHERS)}"),
            ("sdpo_teacher_ema_rate", sdpo_teacher_ema_rate, 0 < sdpo_teacher_ema_rate <= 1, "in (0, 1]"),
        ):
            if not valid:
                raise ValueError(f"{name}={value}: must be {wanted}")
        if alpha_sdpo > 0 and hints is None:
            raise ValueError(f"alpha_sdpo={alpha_sdpo} needs a hint source; pass hints=RuleHints(...)")
        if beta_replay > 0 and replay is None:
            raise ValueError(f"beta_replay={beta_replay} needs pairs; pass replay=ReplayChannel.from_file(...)")
        if heldout_guard is not None or heldout_eval_fn is not None:
            raise ValueError("heldout_guard: this version has no guard; leave it None")
        if kl_in_reward:
            # Before GRPOTrainer loads the reference from a path that a model object may not have.
            given = inspect.signature(GRPOTrainer.__init__).bind(self, *args, **kwargs).arguments
            validate_kl_in_reward_config(given["args"], given["model"], kl_estimator, kl_reward_scaling)
        super().__init__(*args, **kwargs)
        self.error_pattern = re.compile(error_pattern) if error_pattern is not None else None
        # Wall seconds of training generations so far; evaluation is not in them.
        self.seconds = {"generate": 0.0, "score": 0.0}
        # Generations sampled for training so far, so that a log can tell new rollouts from reused ones.
        self.generations = 0

        self.alpha_sdpo = alpha_sdpo
        self.beta_replay = beta_replay
        self.replay: ReplayChannel | None = None
        if beta_replay > 0:
            assert replay is not None
            self.replay = replay
            replay.config = dataclasses.replace(replay.config, dpo_beta=replay_dpo_beta)
        self.sdpo_jsd_beta = sdpo_jsd_beta
        self.sdpo_temperature = self.temperature if sdpo_temperature is None else sdpo_temperature
        self.sdpo_token_clip = sdpo_token_clip
        self.sdpo_is_clip = sdpo_is_clip
        self.teacher_rows: TeacherRows | None = None
        self.kl_in_reward: KLInReward | None = None
        if kl_in_reward:
            self.kl_in_reward = KLInReward(self.args.beta, kl_estimator, kl_reward_scaling)
        if alpha_sdpo > 0 or beta_replay > 0 or kl_in_reward:
            switch_off_dropout(self.model)
            assert self.args.steps_per_generation is not None
            if self.args.steps_per_generation % self.args.gradient_accumulation_steps:
                raise ValueError(
                    f"steps_per_generation={self.args.steps_per_generation}: must be a multiple of"
                    f" gradient_accumulation_steps={self.args.gradient_accumulation_steps} with a signal on"
                )
        if alpha_sdpo > 0:
            if self.tools and self.error_pattern is None:
                raise ValueError("alpha_sdpo > 0 with tools needs error_pattern, which marks a tool result as an error")
            positions = self.model.config.get_text_config().max_position_embeddings
            if sdpo_max_length is not None and sdpo_max_length > positions:
                raise ValueError(f"sdpo_max_length={sdpo_max_length}: the model has {positions} positions; lower it")
            assert hints is not None
            self.hints = hints
            self.teacher_rows = TeacherRows(
                HintRenderer(
                    self.processing_class,
                    chat_template=self.chat_template,
                    chat_template_kwargs=self.chat_template_kwargs,
                ),
                hints,
                error_pattern=self.error_pattern,
                max_turns=sdpo_max_turns_per_rollout,
                max_length=positions if sdpo_max_length is None else sdpo_max_length,
                success_threshold=sdpo_success_threshold,
                strict=strict_sdpo_alignment,
            )
            # A copy of LoRA weights would average an adapter that starts at zero; its frozen base stands in.
            policy = self.accelerator.unwrap_model(self.model)
            kind = "frozen" if sdpo_teacher == "ema" and not isinstance(policy, PreTrainedModel) else sdpo_teacher
            self.teacher = Teacher(policy, kind, sdpo_teacher_ema_rate)
            self.teacher.model.to(self.accelerator.device)
            self.add_callback(_TeacherCallback(self.teacher))

        self._sampled: Sampled | None = None
        self._rewards_per_func: torch.Tensor | None = None
        self._logps: torch.Tensor | None = None
        # Detached sums of the current accumulation window on this rank; read once, at its end.
        self._window: defaultdict[str, Any] = defaultdict(float)
        self._idle_steps = Counter[str]()

    # --- generation -----------------------------------------------------------------------------------------

    def _generate(self, prompts: list) -> Any:
        """Replace GRPOTrainer._generate to time it and to keep the sampled tokens, which its caller pads away."""
        start = time.perf_counter()
        output = super()._generate(prompts)
        prompt_ids, completion_ids, tool_mask, completions = output[:4]
        self._sampled = Sampled(prompt_ids, completion_ids, tool_mask, completions)
        if self.model.training:
            self.seconds["generate"] += time.perf_counter() - start
        return output

    def _calculate_rewards(
        self, inputs: list, prompts: list, completions: list, completion_ids_list: list
    ) -> torch.Tensor:
        """Replace GRPOTrainer._calculate_rewards to time it, keep the gathered rewards, and log tool errors."""
        start = time.perf_counter()
        rewards: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards_per_func = rewards
        if self.model.training:
            self.seconds["score"] += time.perf_counter() - start
            self.generations += 1
            if self.error_pattern is not None:
                errors = [float(has_tool_error(completion, self.error_pattern)) for completion in completions]
                share = self.accelerator.gather(torch.tensor(errors, device=self.accelerator.device)).mean()
                self._metrics["train"]["tools/error_share"].append(share.item())
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Replace GRPOTrainer._generate_and_score_completions to reshape advantages and to add teacher rows.

        What is added travels in the returned dict, row-aligned, through TRL's shuffle and split.
        """
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        assert self._rewards_per_func is not None and self._sampled is not None
        if self.kl_in_reward is not None:
            for name, value in self.kl_in_reward.reshape_advantages(self, output, self._rewards_per_func).items():
                self._metrics["train"][name].append(value)
        if self.teacher_rows is not None:
            every_score = (self._rewards_per_func * self.reward_weights.to(self._rewards_per_func.device)).nansum(dim=1)
            first = self.accelerator.process_index * len(inputs)
            rows, facts = self.teacher_rows(
                self._sampled,
                inputs,
                every_score[first : first + len(inputs)].tolist(),
                self._peers(every_score.tolist(), first, len(inputs)),
                output["completion_mask"].any(dim=1).tolist(),
            )
            output.update(collate_teacher_rows(rows, facts, self._tokenizer.pad_token_id, self.accelerator.device))
        self._sampled = None
        return output

    def _peers(self, scores: list[float], first: int, count: int) -> list[list[str]]:
        """Return, per local rollout, the successful other rollouts of its group as text, over all ranks."""
        assert self._sampled is not None and self.teacher_rows is not None
        if not self.hints.needs_peers:
            return [[] for _ in range(count)]
        texts = gather_object(model_texts(self._sampled, self._tokenizer))
        peers = []
        for own in range(first, first + count):
            start = own // self.num_generations * self.num_generations
            group = range(start, start + self.num_generations)
            threshold = self.teacher_rows.success_threshold
            peers.append([texts[other] for other in group if other != own and scores[other] >= threshold])
        return peers

    # --- loss -----------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """Replace GRPOTrainer._prepare_inputs to attach each window's denominators, and the update's pairs.

        The total of a window is needed before its first backward, and TRL shuffles and splits after scoring.
        """
        buffered = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        if self.teacher_rows is not None and self._buffered_inputs is not buffered:
            self._attach_windows(self._buffered_inputs)
        if self.replay is not None:
            accumulation = self.args.gradient_accumulation_steps
            inputs = inputs | self.replay.batch(
                self.state.global_step,
                self._step % accumulation,
                accumulation,
                self.accelerator.process_index,
                self.accelerator.num_processes,
                self.accelerator.device,
            )
        return inputs

    def _attach_windows(self, micro_batches: list[dict[str, Any]]) -> None:
        """Give every micro-batch the distilled tokens of its window on all ranks, and the rows of the fullest rank."""
        device = self.accelerator.device
        tokens = torch.tensor([float(m["sdpo_loss_mask"].sum()) for m in micro_batches], device=device)
        rows = [int(m["ctx_teacher_attention_mask"].any(dim=-1).sum()) for m in micro_batches]
        tokens = self.accelerator.reduce(tokens, reduction="sum")
        fullest = self.accelerator.gather(torch.tensor([rows], device=device)).amax(dim=0)
        accumulation = self.args.gradient_accumulation_steps
        windows = tokens.view(-1, accumulation).sum(dim=1).repeat_interleave(accumulation)
        for micro_batch, window, most in zip(micro_batches, windows, fullest.tolist(), strict=True):
            micro_batch["sdpo_window_tokens"] = window
            micro_batch["sdpo_rows"] = most

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Replace GRPOTrainer._get_per_token_logps_and_entropies to keep the log-probs of the latest forward."""
        output = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._logps = output[0]
        return output

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """Replace GRPOTrainer._compute_loss to add the channels, each scaled once, by its own window.

        GRPO's term comes back divided by the accumulation; a channel's term is a sum over the window's total, times
        the ranks that DDP averages over, so neither depends on micro-batch, accumulation, ranks or padding.
        """
        policy = self.accelerator.unwrap_model(self.model)
        coefficient, self.beta = self.beta, 0.0 if self.kl_in_reward is not None else self.beta
        try:
            with captured_hidden_states(policy) as hidden:
                total: torch.Tensor = super()._compute_loss(model, inputs)  # type: ignore[no-untyped-call]
        finally:
            self.beta = coefficient
        logps, self._logps = self._logps, None
        if not self.model.training:
            return total
        self._add_to_window({"grpo": total})
        ranks = self.accelerator.num_processes
        if self.teacher_rows is not None:
            assert logps is not None
            # As TRL runs the student's forward: in another precision, teacher and student differ without a hint.
            with self.accelerator.autocast():
                distilled, sums = sdpo_loss(
                    inputs,
                    hidden[0],
                    causal_model(policy),
                    self.teacher,
                    beta=self.sdpo_jsd_beta,
                    temperature=self.sdpo_temperature,
                    token_clip=self.sdpo_token_clip,
                    is_clip=self.sdpo_is_clip,
                    logps=logps.detach(),
                    chunk=self.args.per_device_train_batch_size,
                    rows=inputs["sdpo_rows"],
                )
            term = distilled * ranks / inputs["sdpo_window_tokens"].clamp(min=1.0)
            total = total + self.alpha_sdpo * term
            self._add_to_window(
                {"sdpo": term, **sums, **dict(zip(FACTS, inputs["sdpo_facts"].sum(dim=0), strict=True))}
            )
        if self.replay is not None:
            preferred, sums = self.replay.loss(self, model, inputs)
            term = preferred * ranks / inputs["dpo_window_weight"]
            total = total + self.beta_replay * term
            self._add_to_window({"replay": term, **sums})
        if self.accelerator.sync_gradients:
            self._log_window()
        return total

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Replace Trainer._get_grad_norm to stop before a step that would make every weight NaN.

        TRL drops NaN metrics and the loss of such a step is logged as 0, so the run would go on unseen. The norm is
        the same on every rank, after their gradients were averaged. Raises FloatingPointError, except under fp16,
        whose scaler meets infinite gradients by design and skips their step.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]
        if not self.args.fp16 and norm is not None and not math.isfinite(norm):
            raise FloatingPointError(
                f"gradient norm {float(norm)} at step {self.state.global_step + 1}: the step was not taken and the"
                " weights are those of the step before; lower trainer.learning_rate or look at the rewards"
            )
        return norm

    def _add_to_window(self, values: dict[str, torch.Tensor]) -> None:
        for name, value in values.items():
            self._window[name] = self._window[name] + value.detach()

    def _log_window(self) -> None:
        """Append one value per metric for the optimizer step that ends here, over all ranks; never self.log."""
        names = ["grpo", "sdpo", "replay"]
        names += [*SDPO_SUMS, *FACTS] if self.teacher_rows is not None else []
        names += REPLAY_SUMS if self.replay is not None else []
        local = torch.tensor([float(self._window[name]) for name in names], device=self.accelerator.device)
        window = dict(zip(names, self.accelerator.reduce(local, reduction="sum").tolist(), strict=True))
        self._window.clear()
        ranks = self.accelerator.num_processes
        grpo, sdpo, replay = (window[name] / ranks for name in ("grpo", "sdpo", "replay"))
        values = {
            "loss/grpo": grpo,
            "loss/sdpo_kl": sdpo,
            "loss/trace_replay_dpo": replay,
            "loss/total": grpo + self.alpha_sdpo * sdpo + self.beta_replay * replay,
            "loss/alpha_sdpo": self.alpha_sdpo,
            "loss/beta_replay": self.beta_replay,
        }
        if self.teacher_rows is not None:
            values |= {f"sdpo/{name}": window[name] for name in (*FACTS, "distilled_tokens")}
            values["sdpo/gap_error_turns"] = _ratio(window["gap_error"], window["distilled_tokens"])
            values["sdpo/gap_other_turns"] = _ratio(window["gap_other"], window["other_tokens"])
            values["sdpo/teacher_entropy"] = _ratio(window["teacher_entropy"], window["distilled_tokens"])
            self._warn_when_idle("alpha_sdpo", window["distilled_tokens"], _reasons(window))
        if self.replay is not None:
            values["replay/pairs"] = window["pairs"]
            values |= {f"replay/{name}": _ratio(window[name], window["pairs"]) for name in REPLAY_SUMS[1:]}
        for name, value in values.items():
            # TRL's log leaves NaN out of its averages: a ratio over nothing is no value, not 0.
            self._metrics["train"][name].append(value)

    def _warn_when_idle(self, channel: str, found: float, reasons: str) -> None:
        """Warn once when a channel that is on has found nothing for PATIENCE steps from the start."""
        if found:
            self._idle_steps[channel] = -1
        elif self._idle_steps[channel] >= 0:
            self._idle_steps[channel] += 1
            if self._idle_steps[channel] == PATIENCE:
                warnings.warn(f"{channel} > 0 had nothing to train on in {PATIENCE} steps: {reasons}", stacklevel=2)


ComposerReplicationTrainer = ComposerTrainer


class _TeacherCallback(TrainerCallback):
    """Moves the EMA teacher after every optimizer step."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.teacher.update()


def switch_off_dropout(model: PreTrainedModel) -> None:
    """Turn off all dropout, attention's included, so that teacher and student differ by the hint alone.

    Raises ValueError for a model whose output still depends on train and eval mode.
    """
    # Some models read a rate from their config at each forward, most copy it into a module: see `attention_dropout`
    # of falcon and of qwen3, `dropout` of opt, `drop_prob` of every DropPath, `jitter_noise` of routers.
    for owner in (model.config, model.config.get_text_config(), *model.modules()):
        rates = [n for n, v in vars(owner).items() if ("drop" in n or "jitter" in n) and isinstance(v, float)]
        if isinstance(owner, nn.modules.dropout._DropoutNd):
            rates.append("p")
        for name in rates:
            setattr(owner, name, 0.0)
    if is_deepspeed_zero3_enabled():
        # The parameters are sharded until training starts, so no forward can be tried.
        return
    training = model.training
    tokens = torch.arange(min(64, model.config.get_text_config().vocab_size), device=model.device)[None]
    with torch.no_grad():
        train, evaluation = (model.train(mode)(tokens, use_cache=False).logits.float() for mode in (True, False))
    model.train(training)
    if (train - evaluation).abs().max() > 0.01 * evaluation.abs().max():
        raise ValueError(
            f"model {type(model).__name__}: its dropout cannot be switched off; a channel needs a model without dropout"
        )


def model_texts(sampled: Sampled, tokenizer: Any) -> list[str]:
    """Return the model's own tokens of each rollout as text, one turn per line."""
    texts = []
    for number, ids in enumerate(sampled.completion_ids):
        mask = [1] * len(ids) if sampled.tool_mask is None else sampled.tool_mask[number]
        turns = [tokenizer.decode(ids[start:end], skip_special_tokens=True) for start, end in model_turns(mask)]
        texts.append("\n".join(turns))
    return texts


def _ratio(total: float, count: float) -> float:
    return total / count if count else float("nan")


def _reasons(window: dict[str, float]) -> str:
    counts = {name: window[name] for name in FACTS if name != "eligible_rows" and window[name]}
    return ", ".join(f"{name} {count:g}" for name, count in counts.items()) or "no error turn was found"
