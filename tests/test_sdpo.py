"""Self-distillation at error turns: from TRL's own tool loop to the loss, against independent computations."""

import copy
import json
import re
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import trl
from datasets import Dataset
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    Qwen3Config,
    TrainerCallback,
)
from trl import GRPOConfig

import composer_rl
import composer_rl.trainer
from composer_rl.channels.sdpo import (
    FACTS,
    ColumnHints,
    HintRenderer,
    PeerHints,
    RuleHints,
    Sampled,
    Teacher,
    TeacherRows,
    captured_hidden_states,
    sdpo_loss,
)
from composer_rl.collator import SENTINEL, collate_teacher_rows
from composer_rl.rollout import ErrorTurn, find_error_turns
from composer_rl.task.shop import Shop, exact_total, make_rows
from composer_rl.trainer import ComposerTrainer, model_texts, switch_off_dropout

TINY = Path(composer_rl.__file__).parent / "assets" / "tiny"
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
ERROR_PATTERN = r"^\{'error': |^ERROR"
RULES = RuleHints([(r"catalogue name is (?P<good>\w+)", "Call find with the catalogue name {good}."), ("", "Again.")])
VOCAB = 61


# --- what the tests share ----------------------------------------------------------------------------------------


@cache
def shared_tokenizer():
    return AutoTokenizer.from_pretrained(TINY, padding_side="left")


def tiny_policy(**config):
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, **config)


def call(name, **arguments):
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def encoded(turn):
    """Tokens of a model turn: given as such, or text to which the end of turn is added."""
    return turn if isinstance(turn, list) else shared_tokenizer().encode(turn + "<|im_end|>", add_special_tokens=False)


class Desk:
    """A test environment whose tool reports an error in its answer, without raising."""

    def reset(self, **row):
        pass

    def look(self, item: str) -> str:
        """Look something up.

        Args:
            item: What to look for.

        Returns:
            What is known.
        """
        if item == "bomb":
            raise RuntimeError("it exploded")
        return "ERROR no such item" if item == "nothing" else f"{item} costs 3"


class Talker(Desk):
    """A test environment whose tool raises what the row says."""

    def reset(self, said: str, **row):
        self._said = said

    def look(self, item: str) -> str:
        """Look something up.

        Args:
            item: What to look for.

        Returns:
            Nothing.
        """
        raise ValueError(self._said)


def make_trainer(folder, *, rows, scripts, environment=Shop, model=None, tokenizer=None, signals=None, **arguments):
    """A ComposerTrainer whose model turns come from `scripts`, one list of turns per rollout of a generation.

    Only the sampling of tokens is replaced: TRL's tool loop, its parsing, tools and tool mask run for real.
    """
    peft_config = arguments.pop("peft_config", None)
    arguments = {
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "max_completion_length": 192,
        "max_steps": 1,
        "learning_rate": 0.0,
        "logging_steps": 1,
        "max_tool_calling_iterations": 4,
        "bf16": False,
    } | arguments
    trainer = ComposerTrainer(
        model=model or tiny_policy(),
        args=GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **arguments,
        ),
        reward_funcs=exact_total if environment is Shop else lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer or copy.deepcopy(shared_tokenizer()),
        environment_factory=environment,
        peft_config=peft_config,
        **{"alpha_sdpo": 1.0, "hints": RULES, "error_pattern": ERROR_PATTERN} | (signals or {}),
    )
    running = []

    def scripted_turn(prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        if num_generations > 1:
            running[:] = [[list(prompt), list(script)] for prompt, script in zip(prompt_ids, scripts, strict=True)]
        turns = []
        waiting = list(running)
        for prompt in prompt_ids:
            place = next(i for i, (seen, left) in enumerate(waiting) if left and prompt[: len(seen)] == seen)
            seen_and_left = waiting.pop(place)
            turns.append(encoded(seen_and_left[1].pop(0)))
            seen_and_left[0] = prompt + turns[-1]
        return [list(turn) for turn in turns], None

    trainer._generate_single_turn = scripted_turn
    return trainer


def generate(trainer, rows):
    """One generation in train mode: what TRL sampled, teacher rows, counts per rollout, and the batch."""
    seen = SimpleNamespace()
    make_rows_of = trainer.teacher_rows

    def spy(sampled, inputs, scores, peers, kept):
        seen.sampled, seen.scores, seen.peers, seen.kept = sampled, scores, peers, kept
        seen.rows, facts = make_rows_of(sampled, inputs, scores, peers, kept)
        seen.facts = [{name: count for name, count in zip(FACTS, line, strict=True) if count} for line in facts]
        return seen.rows, facts

    trainer.model.train()
    trainer.teacher_rows = spy
    spy.success_threshold = make_rows_of.success_threshold
    seen.batch = trainer._generate_and_score_completions(copy.deepcopy(rows))
    trainer.teacher_rows = make_rows_of
    return seen


def shop_rows(count):
    return make_rows(count, 5, "train")


def a_row(**facts):
    question = [{"role": "user", "content": "Eva wants 2 pears. What is the total?"}]
    return {"prompt": question, "item": "pear", "sku": "K47", "unit_price": 9, "quantity": 2, "answer": 18} | facts


RIGHT = [call("find", item="pear"), call("price", sku="K47", quantity=2), "Total: 18"]
WRONG = [call("find", item="pears"), *RIGHT]


def small_model(config, *, seed=0, spread=0.25, dtype=torch.float32):
    """A model built in code, its weights spread enough for its predictions to differ from token to token."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    return model


def qwen(vocab=VOCAB, **more):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 2, "head_dim": 16}
    return Qwen3Config(vocab_size=vocab, max_position_embeddings=1024, pad_token_id=0, **sizes | heads | more)


def gpt2(vocab=VOCAB, positions=1024, **more):
    return GPT2Config(vocab_size=vocab, n_embd=32, n_layer=2, n_head=2, n_positions=positions, **more)


def opt(vocab=VOCAB, **more):
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    return OPTConfig(vocab_size=vocab, num_attention_heads=2, max_position_embeddings=1024, **sizes | more)


def llama_like(kind, **more):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return kind(vocab_size=VOCAB, num_key_value_heads=2, pad_token_id=0, **sizes | more)


# --- error turns in TRL's tool loop ------------------------------------------------------------------------------


def test_raised_malformed_and_unknown_calls_of_a_real_rollout_are_error_turns(tmp_path):
    scripts = [
        WRONG,
        [call("find", item="pear"), call("lookup", sku="K47"), "Total: 18"],
        [call("find", item="pear"), '<tool_call>{"name": "price", </tool_call>'],
        ["<tool_call>{}</tool_call>"],
        RIGHT,
        [call("find", item="pears"), call("price", sku="A11", quantity=2), "Total: 1"],
    ]
    rows = [a_row()] * len(scripts)
    trainer = make_trainer(tmp_path, rows=rows, scripts=scripts, num_generations=6, per_device_train_batch_size=6)
    seen = generate(trainer, rows)
    kinds = [{k.split("/")[1]: v for k, v in facts.items() if k.startswith("error_turns")} for facts in seen.facts]
    assert kinds == [{"raised": 1}, {"raised": 1}, {"malformed": 1}, {"malformed": 1}, {}, {"raised": 2}]
    assert [len(rows) for rows in seen.rows] == [1, 1, 1, 1, 0, 2]
    assert [facts.get("eligible_rows", 0) for facts in seen.facts] == [1, 1, 1, 1, 0, 1]
    # The turn that erred, by its exact tokens.
    erred = [[0], [1], [1], [0], [], [0, 1]]
    for script, of_rollout, places, tokens in zip(scripts, seen.rows, erred, seen.sampled.completion_ids, strict=True):
        for row, place in zip(of_rollout, places, strict=True):
            turn = [t for t, distilled in zip(row.student, row.distilled, strict=True) if distilled]
            assert [tokens[t] for t in turn] == encoded(script[place])


def test_an_error_that_a_tool_returns_and_one_it_raises_are_told_apart_whatever_the_pattern(tmp_path):
    scripts = [[call("look", item="nothing"), "No."], [call("look", item="bomb"), "No."], [call("look", item="x"), "3"]]
    rows = [{"prompt": a_row()["prompt"]}] * 3
    trainer = make_trainer(
        tmp_path,
        rows=rows,
        scripts=scripts,
        environment=Desk,
        num_generations=3,
        per_device_train_batch_size=3,
        # Not a word of how TRL renders an exception: a tool that raised has erred all the same.
        signals={"error_pattern": "^ERROR"},
    )
    seen = generate(trainer, rows)
    assert [facts.get("error_turns/pattern", 0) for facts in seen.facts] == [1, 0, 0]
    assert [facts.get("error_turns/raised", 0) for facts in seen.facts] == [0, 1, 0]
    assert [len(rows) for rows in seen.rows] == [1, 1, 0]


def test_calls_rolled_back_at_the_length_cap_or_left_by_the_last_round_are_counted_and_not_distilled(tmp_path):
    scripts = [WRONG, RIGHT]
    rows = [a_row()] * 2
    # The results of the first call do not fit.
    first = len(encoded(WRONG[0]))
    trainer = make_trainer(tmp_path, rows=rows, scripts=scripts, max_completion_length=first + 3)
    seen = generate(trainer, rows)
    assert seen.facts == [{"excluded/unanswered": 1}, {"excluded/unanswered": 1}]
    assert seen.rows == [[], []]
    # One round is allowed: the second call is never run.
    trainer = make_trainer(tmp_path, rows=rows, scripts=scripts, max_tool_calling_iterations=1)
    seen = generate(trainer, rows)
    assert seen.facts == [
        {"eligible_rows": 1, "error_turns/raised": 1, "excluded/unanswered": 1},
        {"excluded/unanswered": 1},
    ]
    assert [len(rows) for rows in seen.rows] == [1, 0]


def test_only_the_first_error_turns_of_a_rollout_are_distilled(tmp_path):
    scripts = [[call("find", item=x) for x in "abc"] + ["Total: 1"], RIGHT]
    rows = [a_row()] * 2
    trainer = make_trainer(tmp_path, rows=rows, scripts=scripts, signals={"sdpo_max_turns_per_rollout": 2})
    seen = generate(trainer, rows)
    assert seen.facts[0] == {"eligible_rows": 1, "error_turns/raised": 3, "excluded/over_turn_cap": 1}
    assert len(seen.rows[0]) == 2
    for row, turn in zip(seen.rows[0], scripts[0], strict=False):
        tokens = [t for t, distilled in zip(row.student, row.distilled, strict=True) if distilled]
        assert [seen.sampled.completion_ids[0][t] for t in tokens] == encoded(turn)


def test_a_rollout_that_trl_masks_as_truncated_is_counted_and_not_distilled(tmp_path):
    rows = [a_row()] * 2
    cut = encoded("Total: 18")[:-1]
    trainer = make_trainer(tmp_path, rows=rows, scripts=[[WRONG[0], cut], RIGHT], mask_truncated_completions=True)
    seen = generate(trainer, rows)
    assert seen.facts[0]["excluded/truncated"] == seen.facts[0]["error_turns/raised"] == 1
    assert seen.rows == [[], []] and seen.kept == [False, True]


def test_the_turn_before_an_error_is_watched_only_when_it_was_sound(tmp_path):
    scripts = [[RIGHT[0], call("price", sku="A11", quantity=2), call("price", sku="B22", quantity=2), "No."], RIGHT]
    rows = [a_row()] * 2
    seen = generate(make_trainer(tmp_path, rows=rows, scripts=scripts), rows)
    first, second = seen.rows[0]
    assert first.distilled.count(False) == len(encoded(RIGHT[0])) and all(second.distilled)


# --- teacher rows -------------------------------------------------------------------------------------------------


def test_a_teacher_row_is_the_sampled_prefix_the_hint_the_header_and_the_sampled_turn(tmp_path):
    tokenizer = shared_tokenizer()
    # The same text as WRONG[0] in other tokens than the tokenizer gives: every letter of a word for itself.
    spelt = [token for character in WRONG[0] for token in tokenizer.encode(character, add_special_tokens=False)]
    spelt.append(tokenizer.eos_token_id)
    assert tokenizer.decode(spelt) == WRONG[0] + "<|im_end|>" and spelt != encoded(WRONG[0])
    price = [t for c in call("price", sku="A11", quantity=2) for t in tokenizer.encode(c, add_special_tokens=False)]
    scripts = [[spelt, RIGHT[0], [*price, tokenizer.eos_token_id], "Total: 18"], RIGHT]
    rows = [a_row()] * 2
    # A call spelt letter by letter holds no tool-call token, and TRL parses its text all the same.
    seen = generate(make_trainer(tmp_path, rows=rows, scripts=scripts, max_completion_length=400), rows)
    prompt, completion = seen.sampled.prompt_ids[0], seen.sampled.completion_ids[0]
    header = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    hints = ["Call find with the catalogue name pear.", "Again."]
    mask = seen.sampled.tool_mask[0]
    starts = [i for i in range(len(mask)) if mask[i] and (i == 0 or not mask[i - 1])]
    for row, hint, start, turn in zip(seen.rows[0], hints, [starts[0], starts[2]], [spelt, scripts[0][2]], strict=True):
        assert completion[start : start + len(turn)] == turn
        text = f"<|im_start|>user\nHint: {hint}<|im_end|>\n"
        prefix = prompt + completion[:start]
        assert prefix[-len(header) :] == header
        block = tokenizer.encode(text, add_special_tokens=False)
        assert row.ids == prefix[: -len(header)] + block + header + turn


def test_the_first_token_of_the_turn_is_distilled_and_what_follows_the_turn_is_not(tmp_path):
    rows = [a_row()] * 2
    seen = generate(make_trainer(tmp_path, rows=rows, scripts=[[RIGHT[0], *WRONG], RIGHT]), rows)
    (row,) = seen.rows[0]
    completion, mask = seen.sampled.completion_ids[0], seen.sampled.tool_mask[0]
    start = next(i for i in range(1, len(mask)) if mask[i] > mask[i - 1])
    turn = encoded(WRONG[0])
    distilled = [t for t, on in zip(row.student, row.distilled, strict=True) if on]
    assert distilled == list(range(start, start + len(turn)))
    assert mask[start + len(turn)] == 0 and mask[start - 1] == 0
    # What predicts a token stands right before it, on the teacher's side too.
    assert [row.ids[p + 1] for p in row.teacher] == [completion[t] for t in row.student]
    assert row.teacher[-1] == len(row.ids) - 2
    batch = seen.batch
    on = batch["sdpo_loss_mask"]
    assert on.sum() == len(turn) and (batch["student_response_idx"][on] == torch.tensor(distilled)).all()


def test_a_long_error_shortens_the_hint_and_nothing_else(tmp_path):
    """In TRL's tool loop: system, question, tools and turn stay whole under a cap that the hint overruns."""
    said = " ".join(f"word{i}" for i in range(60))
    rows = [{"prompt": [{"role": "system", "content": "You sell."}, *a_row()["prompt"]], "said": said}] * 2
    lengths = []
    for cap in (None, "40 tokens less", "too small"):
        signals = {"hints": RuleHints([("(?P<error>word.+)'}", "{error}")])}
        if cap is not None:
            signals["sdpo_max_length"] = lengths[0] - 40 if cap == "40 tokens less" else lengths[0] - 300
        trainer = make_trainer(
            tmp_path,
            rows=rows,
            scripts=[[call("look", item="x"), "No."]] * 2,
            environment=Talker,
            max_completion_length=600,
            signals=signals,
        )
        seen = generate(trainer, rows)
        if cap == "too small":
            assert seen.facts == [{"error_turns/raised": 1, "excluded/too_long": 1}] * 2
            continue
        (row,) = seen.rows[0]
        lengths.append(len(row.ids))
        question = shared_tokenizer().decode(seen.sampled.prompt_ids[0]).removesuffix("<|im_start|>assistant\n")
        assert "You sell." in question and "Eva wants 2 pears." in question
        asked, shown = shared_tokenizer().decode(row.ids).split("<|im_start|>user\nHint: ")
        hint, turn = shown.split("<|im_end|>\n<|im_start|>assistant\n")
        assert asked == question and turn == call("look", item="x") + "<|im_end|>"
        assert hint == said if cap is None else said.startswith(hint + " ")
    assert lengths[0] > 300 and lengths[0] - 50 < lengths[1] <= lengths[0] - 40


def test_a_hint_is_cut_after_the_last_word_that_fits_or_inside_a_very_long_one():
    tokenizer = shared_tokenizer()
    renderer = HintRenderer(tokenizer)
    turn = encoded(WRONG[0])
    prompt = tokenizer.apply_chat_template(a_row()["prompt"], add_generation_prompt=True, return_dict=False)
    sampled = Sampled([prompt], [turn], [[1] * len(turn)], [[]])
    long = " ".join(f"word{i}" for i in range(2000))
    empty = len(renderer.block(""))
    for hint, room in ((long, 100), ("x" * 9000, 100), (long, empty + 12)):
        maker = teacher_rows(renderer, ColumnHints(), max_length=len(prompt) + len(turn) + room)
        error = ErrorTurn("raised", 0, len(turn), hint, None)
        row = maker._of_turn(sampled, 0, error, hint, True, 0)
        block = row.ids[len(prompt) - len(renderer.header) : -len(turn) - len(renderer.header)]
        assert row.ids == prompt[: -len(renderer.header)] + block + renderer.header + turn
        kept = tokenizer.decode(block).removeprefix("<|im_start|>user\nHint: ").removesuffix("<|im_end|>\n")
        assert kept and hint.startswith(kept) and (hint == "x" * 9000 or hint[len(kept)] == " ")
        # As much of it as fits: the next word, or 32 more characters, would not.
        longer = hint[: len(kept) + 32] if hint[0] == "x" else hint[: hint.index(" ", len(kept) + 1)]
        assert len(block) <= room < len(renderer.block(longer))
    for room in (empty, 0, -40):
        maker = teacher_rows(renderer, ColumnHints(), max_length=len(prompt) + len(turn) + room)
        assert maker._of_turn(sampled, 0, ErrorTurn("raised", 0, len(turn), "", None), long, True, 0) == "too_long"


def teacher_rows(renderer, hints, *, max_length=1000, max_turns=4, strict=True, threshold=1.0):
    return TeacherRows(
        renderer,
        hints,
        error_pattern=re.compile(ERROR_PATTERN),
        max_turns=max_turns,
        max_length=max_length,
        success_threshold=threshold,
        strict=strict,
    )


def misaligned_sample(renderer):
    turn = encoded(WRONG[0])
    message = {"role": "assistant", "content": "", "tool_calls": [{}]}
    error = {"role": "tool", "content": "{'error': 'no'}"}
    prompt = shared_tokenizer().encode("plain text, no header", add_special_tokens=False)
    good = [*prompt, *renderer.header]
    return Sampled([prompt, good, good], [turn] * 3, [[1] * len(turn)] * 3, [[message, error]] * 2 + [[message] * 2])


def test_strict_alignment_raises_and_lenient_alignment_warns_skips_and_counts():
    renderer = HintRenderer(shared_tokenizer())
    sampled = misaligned_sample(renderer)
    arguments = [{"hint": "h"}] * 3, [0.0] * 3, [[]] * 3, [True] * 3
    with pytest.raises(ValueError, match="assistant header; strict_sdpo_alignment=False"):
        teacher_rows(renderer, ColumnHints())(sampled, *arguments)
    whole = Sampled(sampled.prompt_ids[1:], sampled.completion_ids[1:], sampled.tool_mask[1:], sampled.completions[1:])
    with pytest.raises(ValueError, match="2 assistant messages but 1 runs of model tokens"):
        teacher_rows(renderer, ColumnHints())(whole, *(a[1:] for a in arguments))
    with pytest.warns(UserWarning, match="SDPO alignment.*the turn is skipped"):
        rows, facts = teacher_rows(renderer, ColumnHints(), strict=False)(sampled, *arguments)
    assert [len(made) for made in rows] == [0, 1, 0]
    assert [line[FACTS.index("excluded/misaligned")] for line in facts] == [1, 0, 1]


# --- hints --------------------------------------------------------------------------------------------------------


def test_rule_hints_fill_named_groups_and_tools_by_the_first_rule_that_matches():
    hints = RuleHints([(r"unknown (?P<bad>\w+)", "not {bad}; use {tools}"), ("unknown", "second")], ("find", "price"))
    error = ErrorTurn("raised", 0, 1, "{'error': 'unknown pears'}", None)
    assert hints(error, {}, []) == "not pears; use find, price"
    assert hints(ErrorTurn("raised", 0, 1, "unknown", None), {}, []) == "second"
    assert hints(ErrorTurn("raised", 0, 1, "fine", None), {}, []) is None
    # A group that took no part is nothing; braces in what the model wrote are text.
    assert RuleHints([("unknown(?P<name> b)?", "use{name}.")])(error, {}, []) == "use."
    assert RuleHints([("(?P<all>.+)", "{all}")])(ErrorTurn("raised", 0, 1, "{x}", None), {}, []) == "{x}"


@pytest.mark.parametrize(
    ("pattern", "text", "reason"),
    [
        (r"unknown (?P<bad>\w+)", "use {good}", r"task.hints=use \{good\}: may use the fields bad, tools"),
        ("unknown", "use {}", "may use the fields tools"),
        ("unknown (", "again", r"task.hints: pattern 'unknown \(' with hint 'again': missing \)"),
        ("unknown", "use {tools", "task.hints: pattern 'unknown' with hint 'use {tools'"),
    ],
)
def test_a_rule_that_could_not_be_filled_is_refused_before_training(pattern, text, reason):
    with pytest.raises(ValueError, match=reason):
        RuleHints([("fine", "fine"), (pattern, text)])


def test_an_error_turn_without_a_hint_is_counted(tmp_path):
    rows = [a_row(hint="Use the singular."), a_row(hint="")]
    trainer = make_trainer(tmp_path, rows=rows, scripts=[WRONG, WRONG], signals={"hints": ColumnHints()})
    seen = generate(trainer, rows)
    assert seen.facts == [
        {"eligible_rows": 1, "error_turns/raised": 1},
        {"error_turns/raised": 1, "excluded/no_hint": 1},
    ]
    assert "Hint: Use the singular.<|im_end|>" in shared_tokenizer().decode(seen.rows[0][0].ids)


def test_a_peer_hint_is_a_successful_rollout_of_the_same_group_and_never_the_row_itself(tmp_path):
    """Two groups of three: the first has a success that itself erred, the second has none."""
    rows = [a_row()] * 3 + [a_row(sku="B12")] * 3
    scripts = [WRONG, [WRONG[0], "Total: 1"], [WRONG[0], "Total: 2"]] + [[WRONG[0], "Total: 1"]] * 3
    trainer = make_trainer(
        tmp_path,
        rows=rows,
        scripts=scripts,
        num_generations=3,
        per_device_train_batch_size=6,
        signals={"hints": PeerHints()},
    )
    seen = generate(trainer, rows)
    assert [len(made) for made in seen.rows] == [0, 1, 1, 0, 0, 0]
    assert [facts.get("excluded/no_hint", 0) for facts in seen.facts] == [1, 0, 0, 1, 1, 1]
    shown = shared_tokenizer().decode(seen.rows[1][0].ids)
    assert "A successful attempt:\n" + "\n".join(WRONG) + "<|im_end|>" in shown


@pytest.mark.parametrize("rank", [0, 1])
def test_groups_are_found_over_ranks_by_index(monkeypatch, rank):
    """Six rollouts on two ranks, groups of two: rollouts 2 and 3 are one group on two ranks."""
    texts = [f"rollout {i}" for i in range(6)]
    monkeypatch.setattr(composer_rl.trainer, "gather_object", lambda local: texts)
    monkeypatch.setattr(composer_rl.trainer, "model_texts", lambda sampled, tokenizer: texts[3 * rank : 3 * rank + 3])
    trainer = SimpleNamespace(
        _sampled=object(),
        _tokenizer=None,
        hints=PeerHints(),
        num_generations=2,
        teacher_rows=SimpleNamespace(success_threshold=0.5),
    )
    peers = ComposerTrainer._peers(trainer, [1.0, 0.0, 0.0, 1.0, 1.0, 1.0], 3 * rank, 3)
    assert peers == ([[], ["rollout 0"], ["rollout 3"]] if rank == 0 else [[], ["rollout 5"], ["rollout 4"]])
    trainer.hints = ColumnHints()
    assert ComposerTrainer._peers(trainer, [1.0] * 6, 3 * rank, 3) == [[], [], []]


def test_a_single_turn_completion_below_the_threshold_is_an_error_and_its_peer_the_hint(tmp_path):
    rows = [a_row()] * 3
    trainer = make_trainer(
        tmp_path,
        rows=rows,
        scripts=[["Total: 18"], ["Total: 19"], ["Total: 20"]],
        environment=None,
        num_generations=3,
        per_device_train_batch_size=3,
        signals={"hints": PeerHints()},
    )
    trainer.reward_funcs = [exact_total]
    seen = generate(trainer, rows)
    assert seen.sampled.tool_mask is None
    assert [facts.get("error_turns/score", 0) for facts in seen.facts] == [0, 1, 1]
    assert "A successful attempt:\nTotal: 18<|im_end|>" in shared_tokenizer().decode(seen.rows[1][0].ids)
    assert all(seen.rows[1][0].distilled) and seen.rows[1][0].student == list(range(len(encoded("Total: 19"))))


def test_the_text_of_a_rollout_is_its_own_turns_line_by_line():
    tokens = [encoded("Total: 1"), encoded("a tool's words"), encoded("Total: 2")]
    mask = [[1] * len(tokens[0]) + [0] * len(tokens[1]) + [1] * len(tokens[2])]
    sampled = Sampled([[]], [[*tokens[0], *tokens[1], *tokens[2]]], mask, [])
    assert model_texts(sampled, shared_tokenizer()) == ["Total: 1\nTotal: 2"]


# --- the hint block -----------------------------------------------------------------------------------------------


def templated(name):
    """The embedded tokenizer under a template that TRL ships, its markers one token each."""
    tokenizer = copy.deepcopy(shared_tokenizer())
    if name != "embedded":
        tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
        markers = sorted(set(re.findall(r"<\|?\w+\|?>", tokenizer.chat_template)) | {"<bos>", "<|begin_of_text|>"})
        tokenizer.add_special_tokens({"additional_special_tokens": markers})
        tokenizer.bos_token = "<bos>"
    return tokenizer


@pytest.mark.parametrize(
    ("name", "alternates", "end", "options"),
    [
        ("embedded", False, "<|im_end|>", {}),
        ("qwen3", False, "<|im_end|>", {}),
        ("qwen3", False, "<|im_end|>", {"enable_thinking": False}),
        ("qwen3_training", False, "<|im_end|>", {}),
        ("llama3", False, "<|eot_id|>", {}),
        ("llama3_training", False, "<|eot_id|>", {}),
        ("gemma", True, "<end_of_turn>", {}),
        ("gemma_training", True, "<end_of_turn>", {}),
        ("gptoss", False, "<|end|>", {}),
        ("qwen3_5_think", False, "<|im_end|>", {}),
    ],
)
def test_the_hint_block_is_what_the_chat_template_renders(name, alternates, end, options):
    tokenizer = templated(name)
    renderer = HintRenderer(tokenizer, chat_template_kwargs=options)
    hint = "Use the name pear,\nnot 'pears'."
    before = [{"role": "user", "content": "Eva wants 2 pears."}]
    if alternates:
        before.append({"role": "assistant", "content": "Total: 3"})
    whole = [*before, {"role": "user", "content": "Hint: " + hint}]

    def rendered(messages, prompt):
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **options)

    text, asked = rendered(whole, True), rendered(before, False)
    block, header = tokenizer.decode(renderer.block(hint)), tokenizer.decode(renderer.header)
    # Character by character, and token by token in one go: no merge runs over the seams.
    assert text == asked + block + header and hint in block and end in block
    before_the_hint = tokenizer.encode(asked, add_special_tokens=False)
    whole_tokens = tokenizer.encode(text, add_special_tokens=False)
    assert whole_tokens == before_the_hint + renderer.block(hint) + renderer.header


def test_the_renderer_uses_the_template_that_the_trainer_uses():
    tokenizer = templated("qwen3")
    template = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>me: {% endif %}"
    renderer = HintRenderer(tokenizer, chat_template=template)
    assert tokenizer.decode(renderer.block("a b")) == "<|im_start|>user: Hint: a b<|im_end|>"
    assert tokenizer.decode(renderer.header) == "<|im_start|>me: "


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", "generation prompt does not follow"),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>{% endif %}",
            "changes a conversation that a user message follows",
        ),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>{% endif %}",
            "drops the text of a user message",
        ),
        (
            "{% if messages | length > 1 %}{{ raise_exception('one question') }}{% endif %}<|im_start|>{{ messages[0]"
            ".content }}{% if add_generation_prompt %}<|im_end|>{% endif %}",
            "renders no second user message",
        ),
    ],
)
def test_a_template_that_cannot_render_a_hint_is_refused_in_one_line(template, reason):
    with pytest.raises(ValueError, match=f"^the chat template.*{reason}.*$"):
        HintRenderer(shared_tokenizer(), chat_template=template)


# --- the loss -----------------------------------------------------------------------------------------------------

HEADER = [3, 4]


class Block:
    """A renderer in tokens: the length of the hint as a token, as many times."""

    header = HEADER

    def block(self, hint):
        return [5 + len(hint)] * len(hint)


def random_rollouts(pad=0, hint_length=3):
    """Five ragged rollouts of random tokens: two errors, none, one after a sound turn, one, none.

    Returns (inputs as GRPOTrainer pads them with the collated rows, sampled, teacher rows).
    """
    generator = torch.Generator().manual_seed(0)

    def tokens(count):
        return torch.randint(20, VOCAB, (count,), generator=generator).tolist()

    called = {"role": "assistant", "content": "", "tool_calls": [{}]}
    failed, fine = {"role": "tool", "content": "ERROR"}, {"role": "tool", "content": "3"}
    plans = [
        [(called, [failed]), (called, [failed]), ({"role": "assistant", "content": "x"}, [])],
        [(called, [fine]), ({"role": "assistant", "content": "x"}, [])],
        [(called, [fine]), (called, [failed]), ({"role": "assistant", "content": "x"}, [])],
        [(called, [failed])],
        [({"role": "assistant", "content": "x"}, [])],
    ]
    prompts, completions, masks, messages = [], [], [], []
    for number, plan in enumerate(plans):
        prompts.append(tokens(3 + 4 * number) + HEADER)
        ids, mask, said = [], [], []
        for turn, (message, results) in enumerate(plan):
            model = tokens(2 + number + 2 * turn)
            ids += model
            mask += [1] * len(model)
            said += [message, *results]
            if turn < len(plan) - 1 or results:
                answer = tokens(3) + HEADER
                ids += answer
                mask += [0] * len(answer)
        completions.append(ids)
        masks.append(mask)
        messages.append(said)
    sampled = Sampled(prompts, completions, masks, messages)
    hints = [{"hint": "h" * (hint_length + i)} for i in range(len(plans))]
    rows, facts = teacher_rows(Block(), ColumnHints())(
        sampled, hints, [0.0] * len(plans), [[]] * len(plans), [True] * len(plans)
    )
    left, right = max(map(len, prompts)), max(map(len, completions))
    inputs = {
        "prompt_ids": torch.tensor([[pad] * (left - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (left - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.tensor([c + [pad] * (right - len(c)) for c in completions]),
        "completion_mask": torch.tensor([[1] * len(c) + [0] * (right - len(c)) for c in completions]),
    }
    return inputs | collate_teacher_rows(rows, facts, pad, torch.device("cpu")), sampled, rows


def channel(student, teacher, inputs, *, chunk=2, rows=None, is_clip=None, old=None, **options):
    """sdpo_loss on a forward of the student as TRL runs it."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    with captured_hidden_states(student) as hidden:
        student.base_model(input_ids=ids, attention_mask=mask)
    options = {"beta": 0.5, "token_clip": None, "temperature": 1.0} | options
    # Only their difference from the old ones is read.
    logps = torch.zeros(inputs["completion_ids"].shape)
    if old is not None:
        inputs = inputs | {"old_per_token_logps": logps - old}
    most = int(inputs["ctx_teacher_attention_mask"].any(dim=-1).sum()) if rows is None else rows
    return sdpo_loss(
        inputs, hidden[0], student, teacher, is_clip=is_clip, logps=logps, chunk=chunk, rows=most, **options
    )


def dense(student, teacher, sampled, *, beta, temperature=1.0, token_clip=None, is_clip=None, old=None):
    """The same sum in float64, sequence by sequence without padding, from the definition."""
    total, tokens, pattern = 0.0, 0, re.compile(ERROR_PATTERN)
    for number, prompt in enumerate(sampled.prompt_ids):
        completion = sampled.completion_ids[number]
        seen = student(input_ids=torch.tensor([prompt + completion])).logits[0] / temperature
        errors, _ = find_error_turns(sampled.completions[number], sampled.tool_mask[number], pattern)
        for error in errors:
            turn = completion[error.start : error.end]
            hint = [5 + 3 + number] * (3 + number)
            before = (prompt + completion[: error.start])[:-2]
            with torch.no_grad():
                told = teacher(input_ids=torch.tensor([before + hint + HEADER + turn])).logits[0] / temperature
            q = F.log_softmax(told[-len(turn) - 1 : -1], -1)
            first = len(prompt) + error.start - 1
            p = F.log_softmax(seen[first : first + len(turn)], -1)
            forward, reverse = (q.exp() * (q - p)).sum(-1), (p.exp() * (p - q)).sum(-1)
            if beta in (0, 1):
                divergence = reverse if beta else forward
            else:
                m = (beta * q.exp() + (1 - beta) * p.exp()).log()
                divergence = beta * (q.exp() * (q - m)).sum(-1) + (1 - beta) * (p.exp() * (p - m)).sum(-1)
            if token_clip is not None:
                divergence = torch.where(divergence > token_clip, torch.full_like(divergence, token_clip), divergence)
            if is_clip is not None:
                divergence = divergence * old[number, error.start : error.end].double().exp().clamp(max=is_clip)
            total, tokens = total + divergence.sum(), tokens + len(turn)
    return total, tokens


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (qwen(), {"beta": 0.0}),
        (qwen(), {"beta": 0.25}),
        (qwen(), {"beta": 0.5, "temperature": 0.7}),
        (qwen(), {"beta": 1.0, "temperature": 1.5}),
        (qwen(tie_word_embeddings=True), {"beta": 0.5, "token_clip": 0.33}),
        (qwen(), {"beta": 0.0, "is_clip": 1.2}),
        (gpt2(), {"beta": 0.5, "is_clip": 2.0, "token_clip": 0.38}),
        (gpt2(), {"beta": 1.0}),
        (opt(), {"beta": 0.0}),
        (llama_like(Gemma2Config, head_dim=16, final_logit_softcapping=2.0), {"beta": 0.5}),
        (llama_like(CohereConfig, logit_scale=0.25), {"beta": 0.0}),
        (llama_like(GraniteConfig, logits_scaling=4.0), {"beta": 1.0}),
    ],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
def test_value_and_gradient_equal_a_dense_computation_without_padding(config, options):
    """fp32 against float64: the divergences are sums of about 30 tokens, each right to some 1e-6."""
    inputs, sampled, rows = random_rollouts()
    assert [len(made) for made in rows] == [2, 0, 1, 1, 0]
    student, other = small_model(config, seed=1), small_model(config, seed=2)
    other.eval()
    student.eval()
    # A learned position of left padding is another position: the dense side has none, so it must count likewise.
    shifted = config.model_type == "gpt2"
    if shifted:
        student_dense, other_dense = PaddedPositions(student, inputs), PaddedPositions(other, inputs)
    else:
        student_dense, other_dense = copy.deepcopy(student).double(), copy.deepcopy(other).double()
    old = torch.randn(inputs["completion_ids"].shape, generator=torch.Generator().manual_seed(3)) * 0.4
    old = old if "is_clip" in options else None
    loss, sums = channel(student, Teacher(other, "frozen", 0.05), inputs, old=old, **options)
    expected, tokens = dense(student_dense, other_dense, sampled, old=old, **options)
    assert sums["distilled_tokens"] == tokens
    assert loss.item() == pytest.approx(expected.item(), rel=2e-5) and loss > 0.1
    loss.backward()
    expected.backward()
    mine = torch.cat([p.grad.flatten() for p in student.parameters()]).double()
    theirs = torch.cat([p.grad.flatten() for p in student_dense.parameters()])
    assert (mine - theirs).norm() < 5e-5 * theirs.norm() and theirs.norm() > 0.1


class PaddedPositions(nn.Module):
    """A float64 copy that counts positions of a rollout's tokens from its left padding on, as TRL's batch does."""

    def __init__(self, model, inputs):
        super().__init__()
        self.model = copy.deepcopy(model).double()
        self.padding = {
            tuple(ids[mask.bool()].tolist()[:3]): int((mask == 0).sum())
            for ids, mask in zip(inputs["prompt_ids"], inputs["prompt_mask"], strict=True)
        }

    def forward(self, input_ids):
        start = self.padding[tuple(input_ids[0, :3].tolist())]
        return self.model(input_ids=input_ids, position_ids=start + torch.arange(input_ids.size(1))[None])


def test_the_metric_sums_are_those_of_the_dense_computation():
    inputs, _, rows = random_rollouts()
    student, other = small_model(qwen(), seed=1).eval(), small_model(qwen(), seed=2).eval()
    loss, sums = channel(student, Teacher(other, "frozen", 0.05), inputs, beta=0.0, token_clip=0.1)
    watched = sum(not on for of_rollout in rows for row in of_rollout for on in row.distilled)
    assert sums["other_tokens"] == watched == 4
    # The gap is the divergence itself, whatever the loss makes of it.
    plain, _ = channel(student, Teacher(other, "frozen", 0.05), inputs, beta=0.0)
    assert sums["gap_error"].item() == pytest.approx(plain.item(), rel=1e-6) and loss < plain
    entropies = []
    for of_rollout in rows:
        for row in of_rollout:
            at = torch.tensor(row.teacher)[torch.tensor(row.distilled)]
            q = F.log_softmax(copy.deepcopy(other).double()(torch.tensor([row.ids])).logits[0, at], -1)
            entropies.append(-(q.exp() * q).sum().item())
    assert sums["teacher_entropy"].item() == pytest.approx(sum(entropies), rel=1e-5)


def test_the_loss_does_not_depend_on_chunks_on_other_ranks_rows_or_on_padding_content():
    inputs, _, _ = random_rollouts()
    student, other = small_model(qwen(), seed=1).eval(), small_model(qwen(), seed=2).eval()
    teacher = Teacher(other, "frozen", 0.05)
    whole, sums = channel(student, teacher, inputs, chunk=9)
    for options in ({"chunk": 1}, {"chunk": 3}, {"rows": 7}, {"chunk": 1, "rows": 6}):
        loss, others = channel(student, teacher, inputs, **options)
        assert loss.item() == pytest.approx(whole.item(), rel=1e-5)
        for name, value in sums.items():
            assert others[name].item() == pytest.approx(value.item(), rel=1e-5)
    repadded, _, _ = random_rollouts(pad=30)
    assert channel(student, teacher, repadded)[0].item() == pytest.approx(whole.item(), rel=1e-5)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_rank_without_rows_takes_part_without_weight(rows):
    """As many teacher forwards as the fullest rank needs, a finite zero, and no gradient."""
    inputs, _, _ = random_rollouts()
    student, other = small_model(qwen(), seed=1).eval(), small_model(qwen(), seed=2).eval()
    empty = collate_teacher_rows([[]] * 5, [[0.0] * len(FACTS)] * 5, 0, torch.device("cpu"))
    assert (empty["student_response_idx"] == SENTINEL).all() and not empty["student_response_valid"].any()
    teacher = Teacher(other, "frozen", 0.05)
    forwards = []
    teacher.model.base_model.register_forward_hook(lambda *a: forwards.append(1))
    loss, sums = channel(student, teacher, inputs | empty, chunk=1, rows=rows)
    assert loss.item() == 0 and len(forwards) == rows and all(float(v) == 0 for v in sums.values())
    if rows:
        loss.backward()
        assert all(p.grad is None or p.grad.abs().max() == 0 for p in student.parameters())


def test_a_teacher_row_near_the_last_position_fits_a_model_of_learned_positions():
    """Behind the student's padding the row would overrun the position table."""
    inputs, _, rows = random_rollouts(hint_length=40)
    width = inputs["prompt_ids"].size(1) + inputs["completion_ids"].size(1)
    longest = max(width, *(len(row.ids) for made in rows for row in made))
    student = small_model(gpt2(positions=longest), seed=1).eval()
    padding = (inputs["prompt_mask"] == 0).sum(dim=1)
    assert any(padding[n] + len(row.ids) > longest for n, made in enumerate(rows) for row in made)
    loss, _ = channel(student, Teacher(student, "frozen", 0.05), inputs)
    assert torch.isfinite(loss) and loss > 0


# --- teacher ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ema", "frozen", "live"])
def test_no_gradient_reaches_the_teacher_and_the_train_mode_comes_back(kind):
    inputs, _, _ = random_rollouts()
    student = small_model(qwen(), seed=1).train()
    student.model.layers[0].eval()
    modes = [module.training for module in student.modules()]
    teacher = Teacher(student, kind, 0.05)
    loss, _ = channel(student, teacher, inputs, beta=1.0)
    assert [module.training for module in student.modules()] == modes
    loss.backward()
    gradient = [p.grad.clone() for p in student.parameters()]
    if kind != "live":
        assert all(p.grad is None and not p.requires_grad for p in teacher.model.parameters())
        assert not any(m.training for m in teacher.model.modules())
        return
    # Live: the same weights in another object, which cannot receive the student's gradient, give the same one.
    student.zero_grad()
    channel(student, Teacher(student, "frozen", 0.05), inputs, beta=1.0)[0].backward()
    for mine, parameter in zip(gradient, student.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-5, atol=1e-7)
    assert max(g.abs().max() for g in gradient) > 1e-3


def test_the_train_mode_comes_back_when_the_teacher_fails():
    student = small_model(qwen()).train()
    with pytest.raises(RuntimeError, match="boom"), Teacher(student, "live", 0.05).active() as model:
        assert not model.training and not torch.is_grad_enabled()
        raise RuntimeError("boom")
    assert all(module.training for module in student.modules()) and torch.is_grad_enabled()


def test_the_fp32_average_of_bf16_weights_follows_a_float64_reference():
    """The student moves by one bf16 step now and then; a bf16 average at rate .05 would stand still."""
    rate = 0.05
    student = small_model(qwen(), dtype=torch.bfloat16)
    teacher, frozen = Teacher(student, "ema", rate), Teacher(student, "frozen", rate)
    weight = student.model.layers[1].mlp.down_proj.weight
    start = weight.detach().double()
    reference, coarse = start.clone(), weight.detach().clone()
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        with torch.no_grad():
            moving = torch.rand(weight.shape, generator=generator) < 0.05
            weight[moving] = weight[moving] * 1.01
            coarse.lerp_(weight, rate)
        reference += rate * (weight.detach().double() - reference)
        teacher.update()
        frozen.update()
    moved = (reference - start).norm()
    average = teacher.model.model.layers[1].mlp.down_proj.weight
    assert average.dtype == torch.float32 and moved > 0.01 * start.norm()
    assert (average.double() - reference).norm() < 1e-5 * moved
    assert (coarse.double() - reference).norm() > 0.1 * moved
    assert torch.equal(frozen.model.model.layers[1].mlp.down_proj.weight.double(), start)


def test_a_lora_policy_is_taught_by_its_base_and_keeps_its_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    rows = shop_rows(1)
    adapter = peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    trainer = make_trainer(tmp_path, rows=rows, scripts=[WRONG, WRONG], peft_config=adapter, learning_rate=1e-3)
    tokens = torch.arange(20)[None]
    base, mine = tiny_policy()(tokens).logits, trainer.model(tokens).logits
    with trainer.teacher.active() as model:
        assert torch.equal(model(tokens).logits, base)
    assert torch.equal(trainer.model(tokens).logits, mine) and (mine - base).abs().max() > 0.1
    gradients = gradient_spy(trainer)
    trainer.train()
    assert trainer.state.log_history[0]["loss/sdpo_kl"] > 0.001 and gradients[0] > 0
    with trainer.teacher.active() as model:
        assert torch.equal(model(tokens).logits, base)
    assert (trainer.model(tokens).logits - mine).abs().max() > 1e-3


# --- dropout ------------------------------------------------------------------------------------------------------

DROPOUTS = [
    (qwen(attention_dropout=0.3), "sdpa"),
    (qwen(attention_dropout=0.3), "eager"),
    (llama_like(LlamaConfig, attention_dropout=0.3), "sdpa"),
    (llama_like(GemmaConfig, head_dim=16, attention_dropout=0.3), "sdpa"),
    (llama_like(Gemma2Config, head_dim=16, attention_dropout=0.3), "eager"),
    (gpt2(attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3), "sdpa"),
    (gpt2(attn_pdrop=0.3, resid_pdrop=0.0, embd_pdrop=0.0), "eager"),
    (opt(dropout=0.3, attention_dropout=0.3, layerdrop=0.3), "sdpa"),
    (
        FalconConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            attention_dropout=0.3,
            hidden_dropout=0.3,
        ),
        "sdpa",
    ),
    (
        GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            attention_dropout=0.3,
            hidden_dropout=0.3,
        ),
        "sdpa",
    ),
]


@pytest.mark.parametrize(("config", "attention"), DROPOUTS, ids=lambda value: getattr(value, "model_type", value))
def test_all_dropout_of_a_model_is_off_in_train_mode(config, attention):
    config = copy.deepcopy(config)
    config._attn_implementation = attention
    model = small_model(config).train()
    tokens = torch.arange(VOCAB)[None]
    assert not torch.equal(model(tokens).logits, model(tokens).logits)
    state = torch.get_rng_state()
    switch_off_dropout(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    train = model(tokens).logits
    assert torch.equal(train, model(tokens).logits)
    assert torch.equal(train, model.eval()(tokens).logits)


def test_a_model_whose_dropout_cannot_be_switched_off_is_refused(tmp_path):
    class Noisy(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.3, self.training)

    model = tiny_policy()
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, Noisy())
    with pytest.raises(ValueError, match="Qwen3ForCausalLM: its dropout cannot be switched off"):
        make_trainer(tmp_path, rows=[a_row()] * 2, scripts=[WRONG, RIGHT], model=model)


def vocabulary():
    return len(shared_tokenizer())


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: tiny_policy(attention_dropout=0.3), "frozen"),
        (lambda: tiny_policy(attention_dropout=0.3), "live"),
        (lambda: small_model(gpt2(vocabulary(), attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3)), "ema"),
        (lambda: small_model(opt(vocabulary(), dropout=0.3, attention_dropout=0.3), spread=0.1), "live"),
    ],
    ids=["frozen", "live", "gpt2", "opt"],
)
def test_an_empty_hint_gives_nothing_to_learn_on_a_model_configured_with_dropout(tmp_path, make, kind):
    """A real step in train mode, prompts ragged: teacher and student see the same, so the divergence is 0."""
    rows = shop_rows(3)
    scripts = [[call("find", item="x"), call("find", item="y"), "No."]] * 6
    trainer = make_trainer(
        tmp_path,
        rows=rows,
        scripts=scripts,
        model=make(),
        per_device_train_batch_size=6,
        signals={"sdpo_teacher": kind, "sdpo_jsd_beta": 0.0, "hints": RuleHints([("", "Any.")])},
    )
    trainer.teacher_rows.renderer.block = lambda hint: []
    gradients = gradient_spy(trainer)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["sdpo/eligible_rows"] == 6 and log["sdpo/distilled_tokens"] > 100
    assert abs(log["loss/sdpo_kl"]) < 1e-6 and abs(log["sdpo/gap_error_turns"]) < 1e-6
    assert log["sdpo/teacher_entropy"] > 0.01
    # Every reward is 0, so GRPO gives none either.
    assert gradients[0] < 1e-4


def test_the_teacher_runs_in_the_precision_of_the_students_forward(tmp_path):
    """Under bf16 autocast a teacher outside it would differ from the student by rounding, whatever the hint."""
    trainer = make_trainer(tmp_path, rows=shop_rows(1), scripts=[WRONG, WRONG], bf16=True)
    student, teacher = [], []
    for model, seen in ((trainer.model, student), (trainer.teacher.model, teacher)):
        projection = model.model.layers[0].mlp.down_proj
        projection.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output.dtype))
    trainer.train()
    assert set(student) == set(teacher) == {torch.bfloat16}
    assert next(trainer.teacher.model.parameters()).dtype == torch.float32


def gradient_spy(trainer):
    """Gradient norms before each optimizer step."""
    norms = []

    class Spy(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            grads = [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
            norms.append(torch.stack(grads).norm().item())

    trainer.add_callback(Spy())
    return norms


# --- in training --------------------------------------------------------------------------------------------------


def loss_spy(trainer):
    """Inputs of each `_compute_loss`, the student's backbone forwards it ran, and the steps' metric lists."""
    seen = SimpleNamespace(inputs=[], forwards=[], metrics=[], updates=0)
    count = [0]
    trainer.model.base_model.register_forward_hook(lambda *a: count.__setitem__(0, count[0] + 1))
    compute, update = trainer._compute_loss, trainer.teacher.update

    def spied(model, inputs):
        before = count[0]
        loss = compute(model, inputs)
        seen.forwards.append(count[0] - before)
        seen.inputs.append(inputs)
        return loss

    def counted():
        seen.updates += 1
        update()

    class Spy(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.metrics.append({k: list(v) for k, v in trainer._metrics["train"].items()})

    trainer._compute_loss, trainer.teacher.update = spied, counted
    trainer.add_callback(Spy())
    return seen


def test_teacher_rows_stay_with_their_rollouts_through_shuffle_split_and_reuse(tmp_path, monkeypatch):
    rows = shop_rows(8)
    scripts = [[call("find", item=f"thing{i}")] * (i % 3) + [f"Total: {i}"] for i in range(8)]
    trainer = make_trainer(
        tmp_path,
        rows=rows,
        scripts=scripts,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        steps_per_generation=4,
        num_iterations=2,
        max_steps=2,
        learning_rate=1e-4,
    )
    ratios = []

    def spied(inputs, *args, logps, **kwargs):
        own = inputs["completion_mask"] * inputs["tool_mask"]
        ratios.append(((logps - inputs["old_per_token_logps"]) * own).abs().max().item())
        return sdpo_loss(inputs, *args, logps=logps, **kwargs)

    monkeypatch.setattr(composer_rl.trainer, "sdpo_loss", spied)
    seen = loss_spy(trainer)
    trainer.train()
    # The log-probs are those of GRPO's forward on the same rows: the sampling policy's until the first update.
    assert max(ratios[:4]) < 1e-4 < max(ratios[4:])
    # Two optimizer steps on one generation: eight micro-batches, each of the four twice; one average per step.
    assert len(seen.inputs) == 8 and seen.updates == 2
    # GRPO's own forward is the student's only one.
    assert seen.forwards == [1] * 8
    prompts, made = [], 0
    for inputs in seen.inputs:
        for number in range(2):
            prompt = inputs["prompt_ids"][number][inputs["prompt_mask"][number].bool()]
            prompts.append(tuple(prompt.tolist()))
            completion = inputs["completion_ids"][number]
            here = inputs["ctx_teacher_attention_mask"][number].any(dim=-1)
            errors = len(re.findall("'error'", shared_tokenizer().decode(completion)))
            assert here.sum() == errors == inputs["sdpo_facts"][number][FACTS.index("error_turns/raised")]
            for place in here.nonzero()[:, 0]:
                made += 1
                ids = inputs["ctx_teacher_input_ids"][number, place]
                valid = inputs["student_response_valid"][number, place]
                turn = completion[inputs["student_response_idx"][number, place][valid]]
                assert torch.equal(ids[inputs["teacher_response_idx"][number, place][valid] + 1], turn)
                shared = len(prompt) - len(trainer.teacher_rows.renderer.header)
                assert torch.equal(ids[:shared], prompt[:shared])
    assert made == 2 * 7 and len(set(prompts)) == 4


def test_each_metric_is_one_value_per_optimizer_step_and_equals_the_hand_sum(tmp_path, monkeypatch):
    rows = shop_rows(8)
    scripts = [[call("find", item=f"thing{i}")] * (i % 3) + [f"Total: {i}"] for i in range(8)]
    trainer = make_trainer(
        tmp_path,
        rows=rows,
        scripts=scripts,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=2,
        learning_rate=1e-4,
        signals={"alpha_sdpo": 0.3, "sdpo_max_turns_per_rollout": 1},
    )
    parts = []

    def spied(*args, **kwargs):
        parts.append(sdpo_loss(*args, **kwargs))
        return parts[-1]

    monkeypatch.setattr(composer_rl.trainer, "sdpo_loss", spied)
    seen = loss_spy(trainer)
    trainer.train()
    assert len(parts) == 8 and len(seen.metrics) == 2 and seen.updates == 2
    for step in range(2):
        mine = slice(4 * step, 4 * step + 4)
        sums = {k: sum(float(p[1][k]) for p in parts[mine]) for k in parts[0][1]}
        facts = sum(inputs["sdpo_facts"].sum(dim=0) for inputs in seen.inputs[mine])
        values = {k: v for k, v in seen.metrics[step].items() if k.startswith(("sdpo/", "loss/"))}
        assert all(len(v) == 1 for v in values.values())
        values = {k: v[0] for k, v in values.items()}
        for name, count in zip(FACTS, facts.tolist(), strict=True):
            assert values[f"sdpo/{name}"] == count
        tokens = sum(int(inputs["sdpo_loss_mask"].sum()) for inputs in seen.inputs[mine])
        assert values["sdpo/distilled_tokens"] == sums["distilled_tokens"] == tokens
        distilled = sum(float(p[0]) for p in parts[mine]) / tokens
        assert values["loss/sdpo_kl"] == pytest.approx(distilled, rel=1e-5) and distilled > 0
        assert values["sdpo/gap_error_turns"] == pytest.approx(sums["gap_error"] / tokens, rel=1e-5)
        assert values["sdpo/teacher_entropy"] == pytest.approx(sums["teacher_entropy"] / tokens, rel=1e-5)
        # No sound turn stands before the first error: a ratio over nothing is no value.
        assert sums["other_tokens"] == 0 and values["sdpo/gap_other_turns"] != values["sdpo/gap_other_turns"]
        assert values["loss/total"] == pytest.approx(values["loss/grpo"] + 0.3 * distilled, rel=1e-5)
        assert values["loss/total"] == pytest.approx(trainer.state.log_history[step]["loss"], abs=1e-6)
        assert facts[FACTS.index("error_turns/raised")] == 7 and facts[FACTS.index("excluded/over_turn_cap")] == 2
    assert trainer.state.log_history[0]["sdpo/gap_other_turns"] is None


def test_pad_token_equal_to_the_end_of_turn_changes_neither_rows_nor_loss(tmp_path):
    rows = shop_rows(3)
    scripts = [[call("find", item=f"thing{i}")] * (i % 3) + [f"Total: {i}"] for i in range(6)]
    seen = []
    for pad in ("<|endoftext|>", "<|im_end|>"):
        tokenizer = copy.deepcopy(shared_tokenizer())
        tokenizer.pad_token = pad
        torch.manual_seed(0)
        trainer = make_trainer(
            tmp_path,
            rows=rows,
            scripts=scripts,
            tokenizer=tokenizer,
            per_device_train_batch_size=6,
            max_steps=2,
            learning_rate=1e-4,
        )
        spied = loss_spy(trainer)
        trainer.train()
        kept = {k: v for k, v in trainer.state.log_history[1].items() if k.startswith(("sdpo/", "loss/"))}
        inputs = spied.inputs[1]
        tokens = inputs["ctx_teacher_input_ids"][inputs["ctx_teacher_attention_mask"]].tolist()
        seen.append((kept, tokens))
    assert seen[0][1] == seen[1][1]
    gap = ("sdpo/gap_other_turns",)
    assert {k: v for k, v in seen[0][0].items() if k not in gap} == pytest.approx(
        {k: v for k, v in seen[1][0].items() if k not in gap}, rel=1e-5
    )
    assert seen[0][0]["loss/sdpo_kl"] > 0


def test_a_channel_that_never_finds_anything_says_why_once():
    trainer = SimpleNamespace(_idle_steps=Counter())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(50):
            ComposerTrainer._warn_when_idle(trainer, "alpha_sdpo", 0.0, "excluded/no_hint 3")
    assert [str(w.message) for w in caught] == [
        "alpha_sdpo > 0 had nothing to train on in 20 steps: excluded/no_hint 3"
    ]
    trainer = SimpleNamespace(_idle_steps=Counter())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(50):
            ComposerTrainer._warn_when_idle(trainer, "alpha_sdpo", float(step == 18), "")


@pytest.mark.parametrize(
    ("signals", "reason"),
    [
        ({"hints": None}, "alpha_sdpo=1.0 needs a hint source"),
        ({"alpha_sdpo": -1.0}, "alpha_sdpo=-1.0: must be at least 0"),
        ({"sdpo_jsd_beta": 1.5}, r"sdpo_jsd_beta=1.5: must be in \[0, 1\]"),
        ({"sdpo_teacher": "emma"}, "sdpo_teacher=emma: must be one of ema, frozen, live"),
        ({"sdpo_teacher_ema_rate": 0.0}, r"sdpo_teacher_ema_rate=0.0: must be in \(0, 1\]"),
        ({"sdpo_temperature": 0.0}, "sdpo_temperature=0.0: must be above 0"),
        ({"sdpo_max_length": 4096}, "sdpo_max_length=4096: the model has 1024 positions"),
        ({"error_pattern": None}, "needs error_pattern"),
    ],
)
def test_a_value_that_would_silently_do_nothing_is_refused(tmp_path, signals, reason):
    with pytest.raises(ValueError, match=reason):
        make_trainer(tmp_path, rows=[a_row()] * 2, scripts=[WRONG, RIGHT], signals=signals)
