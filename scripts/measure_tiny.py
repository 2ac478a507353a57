"""Measure the embedded policy in GRPOTrainer's own tool loop at temperature 1, on held-out rows.

python scripts/measure_tiny.py [--model composer_rl/assets/tiny] [--rows 512] [--seed 0] [--json]
"""

import argparse
import json
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from make_tiny_policy import HINT_PREFIX, MALFORMED, match_hint
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer

from composer_rl.task.shop import Shop, exact_total, make_rows, thorough_reply

Message = dict[str, Any]
ERROR = "{'error': "
BATCH = 64


def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[dict[str, Any]], seed: int
) -> tuple[list[list[Message]], float]:
    """One completion (a list of messages) per row, and their mean length in tokens, tool results included."""
    kept: list[list[Message]] = []

    def keep(completions: list[list[Message]], **kwargs: Any) -> list[float]:
        kept.extend(completions)
        return [0.0] * len(completions)

    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            seed=seed,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=160,
            max_tool_calling_iterations=3,
            temperature=1.0,
        )
        trainer = GRPOTrainer(
            model,
            reward_funcs=keep,
            args=args,
            train_dataset=Dataset.from_list(rows[:2]),
            processing_class=tokenizer,
            environment_factory=Shop,
        )
        trainer.model.eval()
        tokens = sum(
            int(trainer._generate_and_score_completions(rows[start : start + BATCH])["completion_mask"].sum())
            for start in range(0, len(rows), BATCH)
        )
    return kept, tokens / len(rows)


def errors_of(completion: list[Message]) -> list[tuple[int, str]]:
    """(index of the assistant message, error text) of every turn whose call failed or did not parse."""
    found = []
    for index, message in enumerate(completion):
        if message["role"] == "tool" and message["content"].startswith(ERROR):
            found.append((index - 1, message["content"]))
        if message["role"] == "assistant" and "<tool_call>" in message["content"]:
            found.append((index, MALFORMED))
    return found


def correct_turn(row: dict[str, Any], context: list[Message]) -> Message:
    """The assistant message that calls the right tool after a context."""
    function = {"name": "find", "arguments": {"item": row["item"]}}
    if any(message["role"] == "tool" and message["content"] == row["sku"] for message in context):
        function = {"name": "price", "arguments": {"sku": row["sku"], "quantity": row["quantity"]}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


@torch.no_grad()
def probability(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, context: list[Message], turn: Message
) -> float:
    """Teacher-forced probability of a whole assistant turn, its end token included."""
    prefix = tokenizer.apply_chat_template(context, add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template([*context, turn], return_dict=False)
    end = len(whole) - whole[::-1].index(tokenizer.eos_token_id)
    logps = model(torch.tensor([whole[:end]])).logits[0].log_softmax(-1)
    return float(sum(logps[place - 1, whole[place]] for place in range(len(prefix), end)).exp())


def hint_efficacy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict[str, Any]],
    completions: list[list[Message]],
) -> dict[str, dict[str, float]]:
    """Per error kind (its hint rule), and over all: turns, mean probability of the correct call without and with."""
    seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row, completion in zip(rows, completions, strict=True):
        for index, error in errors_of(completion):
            if (rule := match_hint(error)) is None:
                continue
            kind, hint = rule
            context = [*row["prompt"], *completion[:index]]
            hinted = [*context, {"role": "user", "content": HINT_PREFIX + hint}]
            turn = correct_turn(row, context)
            seen[kind].append(
                (probability(model, tokenizer, context, turn), probability(model, tokenizer, hinted, turn))
            )
    seen["every error turn"] = [pair for pairs in seen.values() for pair in pairs]
    return {
        kind: {
            "turns": len(pairs),
            "without": sum(without for without, _ in pairs) / len(pairs),
            "with": sum(with_hint for _, with_hint in pairs) / len(pairs),
        }
        for kind, pairs in seen.items()
    }


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> dict[str, Any]:
    """All figures of the policy on `count` held-out rows."""
    rows = make_rows(count, seed, "heldout")
    completions, tokens = sample(model, tokenizer, rows, seed)
    answers = [row["answer"] for row in rows]
    errors = [errors_of(completion) for completion in completions]
    tool_errors = [sum(error != MALFORMED for _, error in found) for found in errors]
    malformed = sum(error == MALFORMED for found in errors for _, error in found)
    calls = malformed + sum(bool(m.get("tool_calls")) for completion in completions for m in completion)
    return {
        "heldout_gold": sum(exact_total(completions, answers)) / count,
        "heldout_proxy": sum(thorough_reply(completions, answers)) / count,
        "tool_error_share": sum(map(bool, tool_errors)) / count,
        "tool_errors_per_rollout": sum(tool_errors) / count,
        "malformed_call_share": malformed / calls,
        "hedged_reply_share": sum(" or " in completion[-1]["content"] for completion in completions) / count,
        "best_constant_answer": max(Counter(answers).values()) / count,
        "tokens_per_rollout": tokens,
        "hints": hint_efficacy(model, tokenizer, rows, completions),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the embedded policy on held-out rows of the shop.")
    default = Path(__file__).parent.parent / "composer_rl" / "assets" / "tiny"
    parser.add_argument("--model", type=Path, default=default)
    parser.add_argument("--rows", type=int, default=512, help="an even number of held-out rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.model)
    figures = measure(model, AutoTokenizer.from_pretrained(args.model), args.rows, args.seed)
    if args.json:
        print(json.dumps(figures))
        return
    hints = figures.pop("hints")
    for name, value in figures.items():
        print(f"{name:24s} {value:8.3f}")
    print("\nprobability of the correct call at an error turn")
    print(f"{'without':>8s} {'with':>8s} {'turns':>6s}  error")
    for kind, row in hints.items():
        print(f"{row['without']:8.3f} {row['with']:8.3f} {row['turns']:6d}  {kind}")


if __name__ == "__main__":
    main()
