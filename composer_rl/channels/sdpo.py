"""SDPO: at the turns where the agent erred, distil the same model's behaviour when a hint is put into its context.

SDPO, arXiv:2601.20802, with the feedback placed at the turn it concerns (Composer 2.5's targeted textual feedback).
One teacher row per error turn k: the exact sampled tokens before turn k, the hint's tokens, the exact tokens of
turn k. Student and teacher are compared by common suffix: position p - 1 predicts token p on either side.
"""

import contextlib
import copy
import re
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, Protocol

import torch
from jinja2.exceptions import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from composer_rl.config import ConfigError, require
from composer_rl.losses import importance_weight
from composer_rl.rollout import Completion, ErrorTurn, find_error_turns

KINDS = ("raised", "pattern", "malformed", "score")
# Why an error turn has no teacher row.
EXCLUSIONS = ("no_hint", "unanswered", "over_turn_cap", "too_long", "misaligned", "truncated")
# Columns of `sdpo_facts`, one row per rollout: counts that a logged step sums.
FACTS = ("eligible_rows", *(f"error_turns/{kind}" for kind in KINDS), *(f"excluded/{why}" for why in EXCLUSIONS))

TEACHERS = ("ema", "frozen", "live")

HINT_PREFIX = "Hint: "


class HintSource(Protocol):
    """Gives the hint for an error turn, or None when it has none."""

    @property
    def needs_peers(self) -> bool:
        """Whether __call__ reads `peers`, which costs a gather over ranks."""

    def __call__(self, error: ErrorTurn, row: Mapping[str, Any], peers: Sequence[str]) -> str | None:
        """Return the hint for `error` of `row`; `peers` are successful rollouts of the same group, as text."""
        ...


@dataclass(frozen=True)
class RuleHints:
    """Hints by the task's rules: the first pattern found in the error fills its text with the named groups.

    Raises ConfigError for a pattern that is no regular expression and a text that asks for another field.
    """

    # (regular expression, text with {group} and {tools} fields)
    rules: Sequence[tuple[str, str]]
    tools: Sequence[str] = ()
    needs_peers: bool = False

    def __post_init__(self) -> None:
        for pattern, text in self.rules:
            try:
                known = {*re.compile(pattern).groupindex, "tools"}
                asked = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
            except (re.error, ValueError) as error:
                raise ConfigError(f"task.hints: pattern {pattern!r} with hint {text!r}: {error}") from None
            require(asked <= known, "task.hints", text, f"may use the fields {', '.join(sorted(known))}")

    def __call__(self, error: ErrorTurn, row: Mapping[str, Any], peers: Sequence[str]) -> str | None:
        for pattern, text in self.rules:
            if match := re.search(pattern, error.error):
                return text.format(**match.groupdict(""), tools=", ".join(self.tools))
        return None


@dataclass(frozen=True)
class ColumnHints:
    """Hints from a column of the dataset; an empty cell is no hint."""

    column: str = "hint"
    needs_peers: bool = False

    def __call__(self, error: ErrorTurn, row: Mapping[str, Any], peers: Sequence[str]) -> str | None:
        return row[self.column] or None


@dataclass(frozen=True)
class PeerHints:
    """Hints from the first successful rollout of the same group, never the row itself (section 3)."""

    needs_peers: bool = True

    def __call__(self, error: ErrorTurn, row: Mapping[str, Any], peers: Sequence[str]) -> str | None:
        return f"A successful attempt:\n{peers[0]}" if peers else None


class HintRenderer:
    """Renders a hint as the chat template renders a user message, in tokens.

    Raises ValueError for a template that cannot render a message after a conversation without changing it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer: Any = tokenizer
        self.template = {"chat_template": chat_template, **(chat_template_kwargs or {})}
        asked = [{"role": "user", "content": "question"}]
        before = self._tokens(asked)
        after = self._tokens(asked, add_generation_prompt=True)
        if after[: len(before)] != before or len(after) == len(before):
            raise ValueError("the chat template's generation prompt does not follow the conversation; SDPO needs it to")
        # What opens an assistant turn; the hint goes before it.
        self.header = after[len(before) :]
        # A template that insists on alternating roles renders the block only after an assistant turn.
        for self.context in (asked, [*asked, {"role": "assistant", "content": "answer"}]):
            with contextlib.suppress(TemplateError):
                if self.block("hint") == self.block("other"):
                    raise ValueError("the chat template drops the text of a user message; SDPO's hint is one")
                return
        raise ValueError("the chat template renders no second user message; SDPO's hint is one")

    def block(self, hint: str) -> list[int]:
        """Return the tokens that a user message with the hint adds to a conversation."""
        before = self._tokens(self.context)
        after = self._tokens([*self.context, {"role": "user", "content": HINT_PREFIX + hint}])
        if after[: len(before)] != before:
            raise ValueError("the chat template changes a conversation that a user message follows; SDPO's hint is one")
        return after[len(before) :]

    def _tokens(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = False) -> list[int]:
        tokens: list[int] = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False, **self.template
        )
        return tokens


@dataclass(frozen=True)
class TeacherRow:
    """One error turn under the teacher's context.

    Entry i of `student`, `teacher` and `distilled` speaks of one token: its index among the completion's tokens,
    the position in `ids` that predicts it, and whether it is distilled (else it is only watched).
    """

    ids: list[int]
    student: list[int]
    teacher: list[int]
    distilled: list[bool]


@dataclass(frozen=True)
class Sampled:
    """What GRPOTrainer._generate returned for this rank's rollouts, in tokens and in messages."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    # None without tools: every completion token is the model's.
    tool_mask: list[list[int]] | None
    completions: list[Completion]


class TeacherRows:
    """Makes the teacher rows of rollouts.

    Args:
        renderer: renders hints; hints: gives them.
        error_pattern: regular expression that marks a tool result as an error.
        max_turns: error turns distilled per rollout, the first ones.
        max_length: tokens a teacher row may have; a hint is shortened to fit, prefix and turn never are.
        success_threshold: a single-turn completion below it is an error; a peer at or above it is a success.
        strict: raise on a row whose tokens do not line up, instead of warning and counting it.
    """

    def __init__(
        self,
        renderer: HintRenderer,
        hints: HintSource,
        *,
        error_pattern: re.Pattern[str] | None,
        max_turns: int,
        max_length: int,
        success_threshold: float,
        strict: bool,
    ) -> None:
        self.renderer = renderer
        self.hints = hints
        self.error_pattern = error_pattern
        self.max_turns = max_turns
        self.max_length = max_length
        self.success_threshold = success_threshold
        self.strict = strict

    def __call__(
        self,
        sampled: Sampled,
        rows: Sequence[Mapping[str, Any]],
        scores: Sequence[float],
        peers: Sequence[Sequence[str]],
        kept: Sequence[bool],
    ) -> tuple[list[list[TeacherRow]], list[list[float]]]:
        """Return, per rollout, its teacher rows and its FACTS.

        `scores` are the rollouts' rewards, `peers` the successful others of their groups, `kept` whether TRL
        left the rollout in the loss (it masks truncated ones on request).
        """
        teacher_rows, facts = [], []
        for number, row in enumerate(rows):
            made, counts = self._of_rollout(sampled, number, row, scores[number], peers[number], kept[number])
            counts["eligible_rows"] = bool(made)
            teacher_rows.append(made)
            facts.append([float(counts[name]) for name in FACTS])
        return teacher_rows, facts

    def _of_rollout(
        self, sampled: Sampled, number: int, row: Mapping[str, Any], score: float, peers: Sequence[str], kept: bool
    ) -> tuple[list[TeacherRow], Counter[str]]:
        counts: Counter[str] = Counter()
        errors = self._errors(sampled, number, score, counts)
        counts.update(f"error_turns/{error.kind}" for error in errors)
        made: list[TeacherRow] = []
        for error in errors:
            outcome = self._of_turn(sampled, number, error, self.hints(error, row, peers), kept, len(made))
            if isinstance(outcome, TeacherRow):
                made.append(outcome)
            else:
                counts[f"excluded/{outcome}"] += 1
        return made, counts

    def _errors(self, sampled: Sampled, number: int, score: float, counts: Counter[str]) -> list[ErrorTurn]:
        completion = sampled.completions[number]
        if sampled.tool_mask is None:
            whole = ErrorTurn("score", 0, len(sampled.completion_ids[number]), error="", before=None)
            return [whole] if score < self.success_threshold else []
        assert self.error_pattern is not None and not isinstance(completion, str)
        try:
            errors, unanswered = find_error_turns(completion, sampled.tool_mask[number], self.error_pattern)
        except ValueError as error:
            counts[f"excluded/{self._misaligned(str(error))}"] += 1
            return []
        counts["excluded/unanswered"] += unanswered
        return errors

    def _of_turn(
        self, sampled: Sampled, number: int, error: ErrorTurn, hint: str | None, kept: bool, made: int
    ) -> TeacherRow | str:
        """Return the teacher row of an error turn, or the reason of EXCLUSIONS why it has none."""
        if not kept:
            return "truncated"
        if hint is None:
            return "no_hint"
        if made == self.max_turns:
            return "over_turn_cap"
        prompt, completion = sampled.prompt_ids[number], sampled.completion_ids[number]
        header = self.renderer.header
        prefix, turn = prompt + completion[: error.start], completion[error.start : error.end]
        if prefix[-len(header) :] != header:
            return self._misaligned("the tokens before the error turn do not end with the template's assistant header")
        room = self.max_length - len(prefix) - len(turn)
        block = self._fitting_block(hint, room)
        if block is None:
            return "too_long"
        ids = prefix[: -len(header)] + block + header + turn
        # Watched, not distilled: the turn before, where both contexts are equal and a gap is the teacher's own.
        watched = range(*error.before) if error.before is not None else range(0)
        student = [*watched, *range(error.start, error.end)]
        teacher = [len(prompt) + token - 1 for token in watched]
        teacher += range(len(ids) - len(turn) - 1, len(ids) - 1)
        if any(ids[position + 1] != completion[token] for token, position in zip(student, teacher, strict=True)):
            return self._misaligned("teacher and student tokens differ")
        return TeacherRow(ids, student, teacher, [token >= error.start for token in student])

    def _fitting_block(self, hint: str, room: int) -> list[int] | None:
        """Return the hint's tokens, with as many of its first words as fit; None when not one does."""
        block = self.renderer.block(hint)
        if len(block) <= room:
            return block
        # What is longer than a word, such as a path or a dump, is cut inside.
        words = re.findall(r"\s*\S{1,32}", hint)
        count = bisect_right(range(1, len(words)), room, key=lambda n: len(self.renderer.block("".join(words[:n]))))
        return self.renderer.block("".join(words[:count])) if count else None

    def _misaligned(self, reason: str) -> str:
        if self.strict:
            raise ValueError(f"SDPO alignment: {reason}; strict_sdpo_alignment=False skips and counts such turns")
        warnings.warn(f"SDPO alignment: {reason}; the turn is skipped", stacklevel=2)
        return "misaligned"


class Teacher:
    """The policy that sees the hint: an average of the student's past, its start, or the student itself.

    Args:
        policy: the unwrapped student, before any training step.
        kind: ema (of rate `rate` per optimizer step, in fp32 whatever the student's dtype: at rate 0.05 and a
            learning rate of 1e-6 a bf16 average stands still), frozen, or live.
        rate: weight of the student in each EMA update, in (0, 1].
    """

    def __init__(self, policy: Any, kind: str, rate: float) -> None:
        self.kind = kind
        self.rate = rate
        self.policy = policy
        self.adapter_off = kind == "frozen" and not isinstance(policy, PreTrainedModel)
        if kind == "live" or self.adapter_off:
            self.model = policy
        else:
            self.model = copy.deepcopy(policy).float().eval().requires_grad_(False)

    def update(self) -> None:
        """Move the average towards the student; called once after every optimizer step."""
        if self.kind == "ema":
            with torch.no_grad():
                for average, current in zip(self.model.parameters(), self.policy.parameters(), strict=True):
                    average.lerp_(current.to(average.dtype), self.rate)

    @contextlib.contextmanager
    def active(self) -> Iterator[PreTrainedModel]:
        """Yield the teacher's causal language model, in eval mode and without gradient."""
        # One by one: a part that someone keeps in eval mode stays there.
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        adapter = self.model.disable_adapter() if self.adapter_off else contextlib.nullcontext()
        try:
            with torch.no_grad(), adapter:
                yield causal_model(self.model)
        finally:
            for module in training:
                module.training = True


def causal_model(policy: Any) -> PreTrainedModel:
    """Return the transformers model of a policy, inside its PEFT wrapper when it has one."""
    return policy if isinstance(policy, PreTrainedModel) else policy.get_base_model()


@contextlib.contextmanager
def captured_hidden_states(policy: Any) -> Iterator[list[torch.Tensor]]:
    """Yield a list that receives the backbone's last hidden states of every forward in the block, graph attached."""
    kept: list[torch.Tensor] = []
    backbone = causal_model(policy).base_model
    handle = backbone.register_forward_hook(lambda module, inputs, output: kept.append(output.last_hidden_state))
    try:
        yield kept
    finally:
        handle.remove()


def head_arguments(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor | None, float, float | None]:
    """Return (weight, bias, logit scale, softcap) of the LM head, scaled as trl's add_fused_lm_head scales it."""
    config = model.config.get_text_config().to_dict()
    scale = next((config[n] for n in ("logit_scale", "output_multiplier", "lm_head_multiplier") if config.get(n)), None)
    if scale is None and config.get("logits_scaling") is not None:
        scale = config["logits_scaling"] if config["model_type"] == "hyperclovax" else 1 / config["logits_scaling"]
    head = model.get_output_embeddings()
    return head.weight, head.bias, 1.0 if scale is None else scale, config.get("final_logit_softcapping")


def laid_out(
    ids: torch.Tensor, mask: torch.Tensor, left: torch.Tensor, positions: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids and mask of R right-padded rows, each moved behind its own padding, and that padding.

    A student's row stands behind the left padding of its prompt, and whether a model counts positions over padding
    is its own affair: behind the same padding, the tokens before the hint get the positions they have there.

    Args:
        ids, mask: (R, L). left: (R,), padding of the student's row. positions: the most a row may take, padding
            included; a longer one gets less padding.
    """
    length = mask.sum(dim=1)
    left = torch.minimum(left, positions - length).clamp(min=0)
    token = torch.arange(int((left + length).max()), device=ids.device) - left[:, None]
    return ids.gather(1, token.clamp(0, ids.size(1) - 1)), (token >= 0) & (token < length[:, None]), left


def sdpo_loss(
    inputs: Mapping[str, torch.Tensor],
    student_hidden: torch.Tensor,
    student: PreTrainedModel,
    teacher: Teacher,
    *,
    beta: float,
    temperature: float,
    token_clip: float | None,
    is_clip: float | None,
    logps: torch.Tensor,
    chunk: int,
    rows: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the local SUM of the distillation loss over distilled tokens, and local sums for the metrics.

    Args:
        inputs: a micro-batch with what `collator.collate_teacher_rows` adds (B rollouts, K rows each).
        student_hidden: hidden states of GRPO's own forward, (B, prompt + completion, H), graph attached.
        beta: 0 = KL(teacher || student), 1 = KL(student || teacher), between = generalised JSD.
        temperature: of both sides.
        token_clip: cap of a token's divergence. is_clip: cap of the importance weight of off-policy tokens.
        logps: the student's log-probs of the completion, (B, C), from the same forward.
        chunk: teacher rows per forward. rows: the largest number of teacher rows of any rank in this
            micro-batch; every rank runs as many forwards, with a weightless row where it has none.
    """
    zero = student_hidden.new_zeros((), dtype=torch.float32)
    sums = dict.fromkeys(("distilled_tokens", "gap_error", "gap_other", "other_tokens", "teacher_entropy"), zero)
    if rows == 0:
        # Not a product with the hidden states: those of padding may hold NaN.
        return zero, sums

    valid = inputs["student_response_valid"]  # (B, K, T)
    own = inputs["ctx_teacher_attention_mask"].any(dim=-1)  # (B, K): places that hold a row
    owner = own.nonzero()[:, 0]
    ids, mask = inputs["ctx_teacher_input_ids"][own], inputs["ctx_teacher_attention_mask"][own]
    left = (inputs["prompt_mask"] == 0).sum(dim=1)[owner]
    student_at, teacher_at = inputs["student_response_idx"][own], inputs["teacher_response_idx"][own]
    valid, weight = valid[own], inputs["sdpo_loss_mask"][own].float()
    if len(ids) == 0:
        # A weightless stand-in, so that this rank takes part in what the others do: its token 1, predicted from 0.
        ids, mask = inputs["prompt_ids"].new_full((1, 2), int(inputs["prompt_ids"][0, -1])), valid.new_ones((1, 2))
        owner, left = owner.new_zeros(1), left.new_zeros(1)
        student_at, teacher_at = student_at.new_zeros((1, 1)), teacher_at.new_zeros((1, 1))
        valid, weight = valid.new_ones((1, 1)), weight.new_zeros((1, 1))

    ids, mask, left = laid_out(ids, mask, left, student.config.get_text_config().max_position_embeddings)
    teacher_at = teacher_at + left[:, None]
    with teacher.active() as model:
        hidden = []
        forwards = -(-rows // chunk)
        for number in range(forwards):
            part = slice(number * chunk, (number + 1) * chunk)
            if number * chunk >= len(ids):
                # Another rank has more rows; take part in its forward.
                part = slice(0, 1)
            output = model.base_model(input_ids=ids[part], attention_mask=mask[part].long(), use_cache=False)
            if number * chunk < len(ids):
                hidden.append(output.last_hidden_state)
        teacher_hidden = torch.cat(hidden).take_along_dim(teacher_at.clamp(min=0)[..., None], dim=1)[valid]

    prompt_length = inputs["prompt_ids"].size(1)
    predictor = (prompt_length + student_at - 1).clamp(min=0)
    student_tokens = student_hidden[owner[:, None], predictor][valid]
    # The kernel gives the teacher's side no gradient; it takes the head's own Parameter, which ZeRO-3 can gather.
    teacher_weight, teacher_bias, teacher_scale, teacher_cap = head_arguments(causal_model(teacher.model))
    weight_s, bias_s, scale_s, cap_s = head_arguments(student)
    divergence, _ = ChunkedDivergenceFunction.apply(
        student_tokens,
        weight_s,
        bias_s,
        teacher_hidden,
        teacher_weight,
        teacher_bias,
        beta,
        temperature,
        scale_s,
        cap_s,
        teacher_scale,
        teacher_cap,
    )
    with torch.no_grad():
        _, entropy = ChunkedDivergenceFunction.apply(
            teacher_hidden,
            teacher_weight,
            teacher_bias,
            teacher_hidden,
            teacher_weight,
            teacher_bias,
            0.0,
            temperature,
            teacher_scale,
            teacher_cap,
            teacher_scale,
            teacher_cap,
        )
    distilled = weight[valid]
    loss = divergence if token_clip is None else divergence.clamp(max=token_clip)
    if is_clip is not None and "old_per_token_logps" in inputs:
        at = student_at.clamp(min=0)
        current, old = logps[owner[:, None], at][valid], inputs["old_per_token_logps"][owner[:, None], at][valid]
        loss = loss * importance_weight(current, old, is_clip)
    watched = divergence.detach()
    sums = {
        "distilled_tokens": distilled.sum(),
        "gap_error": (watched * distilled).sum(),
        # The stand-in of an empty rank is token 0 of rollout 0 with weight 0: no watched token.
        "gap_other": (watched * (1 - distilled)).sum() if own.any() else zero,
        "other_tokens": (1 - distilled).sum() if own.any() else zero,
        "teacher_entropy": (entropy * distilled).sum(),
    }
    return (loss * distilled).sum(), sums
