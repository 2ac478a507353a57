"""Make the embedded policy: tokenizer, chat template and warm-started weights, from nothing but a seed.

python scripts/make_tiny_policy.py [--output composer_rl/assets/tiny] [--seed 0]

A scripted clerk serves customers in the shop and errs at known rates; the policy imitates its turns. The same
seed and two torch threads give the same files on the same machine and torch build.
"""

import argparse
import json
import math
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.chat_template_utils import qwen3_template

from composer_rl.config import config_dir
from composer_rl.task.shop import ANSWER_MARKER, NUMBER_WORDS, PLURALS, Shop, make_rows

Message = dict[str, Any]

HINT_PREFIX = "Hint: "
MALFORMED = "malformed tool call"
TOOLS = "find, price"
# The rules that SDPO will use, so that the policy understands the very hints it will get.
HINTS = yaml.safe_load((config_dir() / "task" / "shop.yaml").read_text())["hints"]

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- message.content }}
            {%- for call in message.tool_calls or [] %}
                {%- set call = call.function or call %}
                {%- set arguments = call.arguments %}
                {{- '<tool_call>{"name": "' + call.name + '", "arguments": ' }}
                {{- (arguments if arguments is string else arguments | tojson) + '}</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content + '</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOOL_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCABULARY = 704

# What the clerk does at a turn, in per cent. "find" and "price" are the stages before the sku and before the
# total are known; right after an error the clerk seldom recovers, which is what makes errors costly.
# fmt: off
MIXTURE = {
    "find": {
        "correct": 54, "plural": 18, "name_as_sku": 9, "wrong_tool": 4, "malformed": 3,
        "guess": 7, "give_up": 5,
    },
    "price": {"correct": 80, "name_as_sku": 8, "wrong_tool": 3, "malformed": 3, "guess": 6},
    "price_in_words": {
        "correct": 54, "word": 28, "name_as_sku": 6, "wrong_tool": 3, "malformed": 3, "guess": 6,
    },
    "after_error": {"correct": 32, "again": 18, "guess": 30, "give_up": 20},
    "reply": {"total": 75, "hedge": 14, "slip": 8, "give_up": 3},
}
# fmt: on
SLIPS = {"find": ("plural", "name_as_sku", "wrong_tool", "malformed")}
SLIPS["price"] = ("name_as_sku", "wrong_tool", "malformed")
SLIPS["price_in_words"] = ("word", *SLIPS["price"])
HINTED_SHARE = 0.5
MAX_CALLS = 4

BATCH = 40
STEPS = 900
LEARNING_RATE = 3e-3
WARMUP = 50


def match_hint(error: str) -> tuple[str, str] | None:
    """Pattern of the first rule that occurs in the error, and its filled hint; None when no rule does."""
    for rule in HINTS:
        if match := re.search(rule["pattern"], error):
            return rule["pattern"], rule["hint"].format(**match.groupdict(), tools=TOOLS)
    return None


def tool_result(shop: Shop, name: str, arguments: dict[str, Any]) -> str:
    """Content of the tool message that GRPOTrainer would append for a call."""
    try:
        if name not in ("find", "price"):
            raise ValueError(f"Tool {name} not found.")
        return str(getattr(shop, name)(**arguments))
    except ValueError as error:
        return str({"error": str(error)})


@dataclass
class Clerk:
    """The scripted policy on one row: chooses each turn at random and records the conversation.

    When `hinted`, about half of its turns get a hint before them and are then correct.
    """

    row: dict[str, Any]
    draw: random.Random
    hinted: bool

    def serve(self) -> list[Message]:
        """One whole conversation, hints included."""
        self.shop = Shop()
        self.shop.reset(**self.row)
        self.messages: list[Message] = list(self.row["prompt"])
        self.sku: str | None = None
        failed = False
        for _ in range(MAX_CALLS):
            stage = self.stage()
            hinted = self.hinted and self.draw.random() < 0.5
            if hinted:
                self.hint(self.draw.choice(SLIPS[stage]))
            action = "correct" if hinted else self.choose("after_error" if failed else stage)
            if action == "again":
                action = self.choose_slip(stage)
            if action in ("guess", "give_up"):
                return self.reply(action)
            content, call = self.turn(action)
            self.messages.append({"role": "assistant", "content": content, "tool_calls": call})
            if not call:
                return self.messages
            result = tool_result(self.shop, **call[0]["function"])
            self.messages.append({"role": "tool", "name": call[0]["function"]["name"], "content": result})
            failed = "error" in result
            if not failed and self.sku:
                self.total = result
                return self.reply(self.choose("reply"))
            if not failed:
                self.sku = result
        return self.messages

    def stage(self) -> str:
        if self.sku is None:
            return "find"
        return "price_in_words" if self.word in self.row["prompt"][0]["content"].split() else "price"

    @property
    def word(self) -> str:
        return next(word for word, number in NUMBER_WORDS.items() if number == self.row["quantity"])

    def choose(self, table: str) -> str:
        return self.draw.choices(list(MIXTURE[table]), list(MIXTURE[table].values()))[0]

    def choose_slip(self, stage: str) -> str:
        return self.draw.choices(SLIPS[stage], [MIXTURE[stage][slip] for slip in SLIPS[stage]])[0]

    def turn(self, action: str) -> tuple[str, list[Message]]:
        """Content and tool calls of an assistant turn that acts."""
        item, quantity = self.row["item"], self.row["quantity"]
        right = ("price", {"sku": self.sku, "quantity": quantity}) if self.sku else ("find", {"item": item})
        name, arguments = {
            "correct": right,
            "plural": ("find", {"item": PLURALS[item]}),
            "name_as_sku": ("price", {"sku": item, "quantity": quantity}),
            "word": ("price", {"sku": self.sku, "quantity": self.word}),
            "wrong_tool": ("quote" if self.sku else "lookup", right[1]),
            "malformed": right,
        }[action]
        if action == "malformed":
            call = json.dumps({"name": name, "arguments": arguments})
            return f"<tool_call>{call[:-2]}</tool_call>", []
        return "", [{"type": "function", "function": {"name": name, "arguments": arguments}}]

    def hint(self, slip: str) -> None:
        """Put the hint against a slip directly before the next assistant turn."""
        _, call = self.turn(slip)
        error = tool_result(self.shop, **call[0]["function"]) if call else MALFORMED
        if rule := match_hint(error):
            self.messages.append({"role": "user", "content": HINT_PREFIX + rule[1]})

    def reply(self, action: str) -> list[Message]:
        """End the conversation with a reply to the customer."""
        price = self.row["unit_price"]
        if action == "give_up":
            text = "Sorry, I could not find the price."
        else:
            numbers = [self.draw.randrange(2, 13) * self.draw.randrange(3, 81) for _ in range(4)]
            if action in ("total", "hedge"):
                numbers[0] = self.row["answer"]
            elif action == "slip":
                numbers[0] = self.row["answer"] + self.draw.choice([-1, 1]) * price
            hedged = action == "hedge" or (action == "guess" and self.draw.random() < 0.1)
            text = f"{ANSWER_MARKER} " + " or ".join(map(str, numbers if hedged else numbers[:1]))
        self.messages.append({"role": "assistant", "content": text, "tool_calls": []})
        return self.messages


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over words, single digits and runs of punctuation, with Qwen's control tokens."""
    core = Tokenizer(models.BPE())
    words = Regex(r" ?[A-Za-z]+|[0-9]|[^A-Za-z0-9]+?(?= ?[A-Za-z]|[0-9]|$)|[^A-Za-z0-9]+")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    marks = re.compile("|".join(map(re.escape, CONTROL_TOKENS + TOOL_TOKENS)))
    core.train_from_iterator((piece for text in texts for piece in marks.split(text)), trainer)
    core.add_tokens([AddedToken(token, normalized=False, special=False) for token in TOOL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = qwen3_template
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 policy with random weights."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=320,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=1024,
            rope_theta=10_000.0,
            tie_word_embeddings=True,
            attention_dropout=0.0,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            dtype=torch.float32,
        )
    )


def encode(tokenizer: PreTrainedTokenizerFast, conversations: list[list[Message]]) -> dict[str, torch.Tensor]:
    """Input ids, attention mask and labels (assistant tokens only, -100 elsewhere), padded on the right."""
    encoded = tokenizer.apply_chat_template(
        conversations, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids = [torch.tensor(row) for row in encoded["input_ids"]]
    labels = [
        torch.where(torch.tensor(mask).bool(), row, -100)
        for row, mask in zip(ids, encoded["assistant_masks"], strict=True)
    ]
    pad = torch.nn.utils.rnn.pad_sequence
    input_ids = pad(ids, batch_first=True, padding_value=tokenizer.pad_token_id)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != tokenizer.pad_token_id).long(),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


def warm_start(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: list[list[Message]]) -> None:
    """One pass of imitation: AdamW, warm-up, then cosine to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)

    def scale(step: int) -> float:
        return min((step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * step / STEPS)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    started = time.monotonic()
    for step in range(STEPS):
        batch = conversations[step * BATCH : (step + 1) * BATCH]
        loss = model(**encode(tokenizer, batch)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step:4d}  loss {loss.item():.4f}  {time.monotonic() - started:5.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded tokenizer and warm-started policy.")
    default = Path(__file__).parent.parent / "composer_rl" / "assets" / "tiny"
    parser.add_argument("--output", type=Path, default=default)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(2)
    torch.manual_seed(args.seed)
    draw = random.Random(args.seed)
    conversations = [
        Clerk(row, draw, hinted=draw.random() < HINTED_SHARE).serve()
        for row in make_rows(BATCH * STEPS, args.seed, "train")
    ]
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    plain.chat_template = CHAT_TEMPLATE
    texts = [plain.apply_chat_template(talk, tokenize=False) for talk in conversations[:5000]]
    tokenizer = make_tokenizer(texts)
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens", flush=True)
    warm_start(model, tokenizer, conversations)

    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
