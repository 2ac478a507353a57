"""Make the embedded replay pairs: what the embedded policy did in the shop against what an expert does there.

python scripts/make_shop_pairs.py [--output composer_rl/assets/shop_pairs.jsonl] [--rows 384] [--seed 1]

The policy's turns are sampled in GRPOTrainer's own tool loop on train questions. Each of its turns whose action is
not the expert's, compared by tool and arguments, is one pair: rejected is what the policy did, chosen what the
expert does in the same state, which is the question and all the policy's turns before.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from make_tiny_policy import Message
from measure_tiny import correct_turn, sample
from transformers import AutoModelForCausalLM, AutoTokenizer

from composer_rl.task.shop import ANSWER_MARKER, make_rows

ASSETS = Path(__file__).parent.parent / "composer_rl" / "assets"


def expert_turn(row: dict[str, Any], context: list[Message]) -> Message:
    """The assistant message that is right after a context: the next call, or the total once it was told."""
    results = [message["content"] for message in context if message["role"] == "tool"]
    if row["sku"] in results and str(row["answer"]) in results:
        return {"role": "assistant", "content": f"{ANSWER_MARKER} {row['answer']}"}
    return correct_turn(row, context)


def action(message: Message) -> str:
    """Canonical form of what a turn does: its calls as tool and sorted arguments, else its text, spaces folded."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    if calls:
        return json.dumps([[call["name"], call["arguments"]] for call in calls], sort_keys=True)
    return re.sub(r"\s+", " ", message["content"]).strip()


def pairs_of(row: dict[str, Any], completion: list[Message]) -> list[dict[str, list[Message]]]:
    """The pairs of one rollout."""
    pairs = []
    for place, message in enumerate(completion):
        if message["role"] != "assistant":
            continue
        prompt = [*row["prompt"], *completion[:place]]
        chosen = expert_turn(row, prompt)
        if action(message) != action(chosen):
            pairs.append({"prompt": prompt, "chosen": [chosen], "rejected": [message]})
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description="Make replay pairs from the embedded policy and a scripted expert.")
    parser.add_argument("--model", type=Path, default=ASSETS / "tiny")
    parser.add_argument("--output", type=Path, default=ASSETS / "shop_pairs.jsonl")
    parser.add_argument("--rows", type=int, default=384, help="an even number of train questions")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    rows = make_rows(args.rows, args.seed, "train")
    model = AutoModelForCausalLM.from_pretrained(args.model)
    completions, _ = sample(model, AutoTokenizer.from_pretrained(args.model), rows, args.seed)
    pairs = [pair for row, completion in zip(rows, completions, strict=True) for pair in pairs_of(row, completion)]
    # A state met twice with the same wrong action would count twice.
    lines = list(dict.fromkeys(json.dumps(pair) for pair in pairs))
    args.output.write_text("".join(f"{line}\n" for line in lines))
    print(f"{len(lines)} pairs from {args.rows} rollouts, {args.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
