"""The held-out score is exact, the same on every layout, and leaves training untouched."""

import json
import math
import os
import random
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from heldout_rank import (
    ERROR,
    ChanceRoom,
    Gold,
    MoodyRoom,
    evaluate,
    make_rows,
    make_trainer,
    red,
    same_training,
    train,
)
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from composer_rl.config import ConfigError
from composer_rl.heldout import GumbelNoise, HeldoutEvaluation, HeldoutScore
from composer_rl.task.rows import check_disjoint


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_trainer(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the ranks of a two-process gloo run wrote."""
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        environment = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        program = [sys.executable, str(Path(__file__).parent / "heldout_rank.py"), str(folder)]
        ranks.append(subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL))
    try:
        assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_the_mean_is_exact_when_rows_do_not_fill_the_batches(trainer: Any) -> None:
    for batch_size in (1, 2, 3, 4, 5, 9):
        score, _ = evaluate(trainer, make_rows(5), batch_size)
        assert score.per_prompt == (0.0, 0.0, 0.0, 0.0, 1.0)
        assert score.mean == 0.2
        assert score.n == 5


def test_the_mean_is_exact_on_two_ranks(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        assert result["exact"]["mean"] == 0.2
        assert result["exact"]["per_prompt"] == [0.0, 0.0, 0.0, 0.0, 1.0]


def test_every_batch_size_gives_the_same_samples(trainer: Any) -> None:
    rows = make_rows(12)
    whole, samples = evaluate(trainer, rows, batch_size=12)
    turns = Counter(sum(m["role"] == "assistant" for m in completion) for completion in samples.values())
    assert turns[1] and turns[2], "the toy must call tools in some rollouts only, or nothing is tested"
    for batch_size in (2, 3, 5):
        assert evaluate(trainer, rows, batch_size) == (whole, samples)


def test_two_ranks_give_the_samples_of_one(trainer: Any, two_ranks: list[dict[str, Any]]) -> None:
    score, samples = evaluate(trainer, make_rows(11), batch_size=11)
    first, second = two_ranks
    assert first["seen"] | second["seen"] == samples
    assert not first["seen"].keys() & second["seen"].keys()
    for result in two_ranks:
        assert HeldoutScore(**{**result["score"], "per_prompt": tuple(result["score"]["per_prompt"])}) == score


def test_rows_with_one_prompt_have_samples_of_their_own_at_any_batch_size(trainer: Any) -> None:
    rows = [{**make_rows(1)[0], "name": str(number)} for number in range(12)]
    _, alone = evaluate(trainer, rows, batch_size=1)
    _, together = evaluate(trainer, rows, batch_size=12)
    assert together == alone
    assert len({json.dumps(sample) for sample in alone.values()}) > 6


def test_evaluating_the_same_weights_twice_gives_the_same_score(trainer: Any) -> None:
    rows = make_rows(6)
    once = evaluate(trainer, rows, batch_size=3)
    torch.manual_seed(5)
    random.seed(5)
    assert evaluate(trainer, rows, batch_size=3) == once


def test_an_environment_that_draws_at_random_gives_the_same_score_twice(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, ChanceRoom)
    once = evaluate(trainer, make_rows(6), batch_size=3)
    assert any("tool" in {m["role"] for m in completion} for completion in once[1].values())
    random.seed(5)
    np.random.seed(5)
    assert evaluate(trainer, make_rows(6), batch_size=3) == once


def test_the_turns_of_a_rollout_have_noise_of_their_own(tmp_path: Path) -> None:
    # At this temperature noise alone decides, so noise used twice would repeat the first turn word by word.
    _, samples = evaluate(make_trainer(tmp_path, temperature=1e4), make_rows(40), batch_size=40)
    turns = [[m for m in completion if m["role"] == "assistant"] for completion in samples.values()]
    pairs = [(one, two) for one, two, *_ in filter(lambda assistant: len(assistant) > 1, turns)]
    assert len(pairs) > 5
    assert sum(one == two for one, two in pairs) < len(pairs) / 2


def test_another_seed_gives_other_samples(trainer: Any) -> None:
    rows = make_rows(6)
    assert evaluate(trainer, rows, 3, seed=3)[1] != evaluate(trainer, rows, 3, seed=4)[1]


def test_the_tool_error_share_counts_rollouts_with_an_error(trainer: Any) -> None:
    score, samples = evaluate(trainer, make_rows(12), batch_size=4)
    failed = sum(any("locked" in m["content"] for m in c if m["role"] == "tool") for c in samples.values())
    assert 0 < failed < 12
    assert score.tool_error_share == failed / 12


def test_training_with_evaluation_equals_training_without_it(tmp_path: Path) -> None:
    without, within = train(tmp_path, evaluate=False), train(tmp_path, evaluate=True)
    assert same_training(without, within)
    assert len(within.scores) == 5
    assert len({score.mean for score in within.scores}) > 1, "the score must follow the weights"
    assert all(math.isfinite(row["grad_norm"]) and row["grad_norm"] > 0 for row in within.logs[:-1])


def test_training_with_evaluation_equals_training_without_it_on_two_ranks(
    two_ranks: list[dict[str, Any]],
) -> None:
    assert [result["same_training"] for result in two_ranks] == [True, True]


def test_an_exception_in_gold_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, MoodyRoom)
    trainer.model.train()
    trainer._metrics["eval"]["own"].append(1.0)
    trainer._logs["prompt"].append("own")
    trainer._pending_metrics["own"].append(1.0)
    state, attributes, tools = random.getstate(), dict(vars(trainer)), trainer._environment_pool[None][0].looks
    numbers, tokens = np.random.get_state(), trainer.state.num_input_tokens_seen
    noise = torch.get_rng_state()
    calls = 0

    def gold(completions: list[Any], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        nonlocal calls
        calls += 1
        log_metric("gold", 1.0)
        log_extra("gold", [1.0] * len(completions))
        trainer.state.num_input_tokens_seen += 1
        if calls == 3:
            raise ArithmeticError("gold broke")
        return [0.0] * len(completions)

    with pytest.raises(ArithmeticError, match="gold broke"):
        HeldoutEvaluation(make_rows(6), gold, ERROR, seed=3, batch_size=2)(trainer)

    assert calls == 3
    assert vars(trainer) == attributes
    assert trainer._metrics == {"train": {}, "eval": {"own": [1.0]}}
    assert list(trainer._logs["prompt"]) == ["own"] and not trainer._logs["extra"]
    assert trainer._pending_metrics == {"own": [1.0]}
    assert trainer.state.num_input_tokens_seen == tokens
    assert trainer._environment_pool[None][0].looks == tools
    assert all(module.training for module in trainer.model.modules())
    assert "_get_logits_processor" not in vars(trainer.model)
    assert random.getstate() == state
    assert all(map(np.array_equal, np.random.get_state(), numbers))
    assert torch.equal(torch.get_rng_state(), noise)


def test_a_model_in_evaluation_mode_stays_in_it(trainer: Any) -> None:
    trainer.model.eval()
    evaluate(trainer, make_rows(2), batch_size=2)
    assert not trainer.model.training
    trainer.model.train()
    evaluate(trainer, make_rows(2), batch_size=2)
    assert trainer.model.training


def test_evaluation_runs_no_forward_beside_generation(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("log-probs are not needed for a score")

    trainer._get_per_token_logps_and_entropies = refuse
    # Without a reference model a weight above 0 would look for an adapter.
    trainer.beta = 0.5
    assert evaluate(trainer, make_rows(3), batch_size=2)[0].mean == 1 / 3
    assert trainer.beta == 0.5


def test_a_missing_or_infinite_score_names_its_row(trainer: Any) -> None:
    for bad in (None, math.nan, math.inf):

        def gold(name: list[str], bad: float | None = bad, **_: Any) -> list[float | None]:
            return [bad if row == "red 3" else 1.0 for row in name]

        with pytest.raises(ValueError, match="held-out row 3: the gold reward returned"):
            HeldoutEvaluation(make_rows(5), gold, ERROR, seed=3, batch_size=2)(trainer)


def test_an_async_gold_is_awaited(tmp_path: Path) -> None:
    async def gold(answer: list[float], **_: Any) -> list[float]:
        return answer

    trainer = make_trainer(tmp_path, reward_funcs=[red, gold])
    assert HeldoutEvaluation(make_rows(4), gold, ERROR, seed=3, batch_size=2)(trainer).mean == 0.25


def test_the_columns_and_environments_of_a_row_reach_gold(trainer: Any) -> None:
    def gold(prompts: list[Any], answer: list[float], environments: list[Any], **_: Any) -> list[float]:
        assert [environment.row["answer"] for environment in environments] == answer
        assert [environment.row["prompt"] for environment in environments] == prompts
        return answer

    HeldoutEvaluation(make_rows(5), gold, ERROR, seed=3, batch_size=3)(trainer)


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="0 held-out rows, batch_size=2: both must be at least 1"):
        HeldoutEvaluation([], Gold(), ERROR, seed=3, batch_size=2)


def test_the_standard_error_of_binary_scores_is_binomial() -> None:
    score = HeldoutScore(mean=0.25, n=4, per_prompt=(0.0, 0.0, 0.0, 1.0), tool_error_share=0.0)
    assert score.standard_error == pytest.approx(math.sqrt(0.25 * 0.75 / 4), rel=1e-12)


def test_keyed_draws_follow_the_distribution_that_the_warpers_leave() -> None:
    draws = 20_000
    logits = torch.tensor([[1.0, 0.3, -0.2, 2.0, -3.0]])
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(4), TopPLogitsWarper(0.95)])
    scores = warpers(torch.empty(1, 0, dtype=torch.long), logits.clone())
    expected = scores[0].double().softmax(0)
    assert (expected > 0).sum() == 3

    by_row = GumbelNoise(0, [(row, 7) for row in range(draws)])
    along_one_row = GumbelNoise(0, [(0, 7)])
    by_position = GumbelNoise(0, [(0, position) for position in range(draws)])
    batch = scores.expand(draws, -1)
    for drawn in (
        by_row(torch.empty(0), batch),
        by_position(torch.empty(0), batch),
        torch.cat([along_one_row(torch.empty(0), scores) for _ in range(draws)]),
    ):
        assert torch.isfinite(drawn).sum(dim=1).eq(1).all()
        counts = torch.bincount(drawn.argmax(dim=1), minlength=5).double()
        assert counts[expected == 0].sum() == 0
        kept = expected > 0
        chi_square = ((counts - draws * expected)[kept] ** 2 / (draws * expected[kept])).sum()
        # 99.9 % point of chi-square with 2 degrees of freedom; the seeds are fixed.
        assert chi_square < 13.8


def test_a_nan_score_is_not_hidden_by_the_noise() -> None:
    drawn = GumbelNoise(0, [(0, 0)])(torch.empty(0), torch.tensor([[0.0, math.nan, 1.0]]))
    assert drawn.isnan().any()


def test_the_runs_own_sampling_settings_shape_the_samples(tmp_path: Path) -> None:
    greedy = make_trainer(tmp_path, top_k=1)
    rows = make_rows(6)
    assert evaluate(greedy, rows, 6, seed=1)[1] == evaluate(greedy, rows, 6, seed=2)[1]


def test_held_out_prompts_that_train_are_refused_with_examples() -> None:
    train_rows = [{"prompt": f"Question  {number}"} for number in range(6)]
    heldout = [{"prompt": [{"role": "user", "content": f" question {number}\n"}]} for number in range(2, 9)]
    with pytest.raises(ConfigError) as refused:
        check_disjoint(train_rows, heldout)
    message = str(refused.value)
    assert "task.heldout: 4 prompt(s) are also in task.train" in message
    assert "'question 2', 'question 3', 'question 4';" in message
    assert "question 5" not in message


def test_disjoint_prompts_pass_however_often_they_repeat() -> None:
    train_rows = [{"prompt": "one"}, {"prompt": "one"}]
    blocks = [{"role": "user", "content": [{"type": "text", "text": "two"}]}]
    check_disjoint(train_rows, [{"prompt": "two"}, {"prompt": "Two"}, {"prompt": blocks}])
    with pytest.raises(ConfigError):
        check_disjoint([{"prompt": blocks}], [{"prompt": "TWO"}])
