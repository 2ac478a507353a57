"""Every preset whose inputs are here dry-runs; what would stop a run later stops its dry run."""

import pytest
from conftest import compose_run
from test_config import PRESETS

from composer_rl.config import PACKAGE_DIR, ConfigError
from composer_rl.dry_run import canned_rewards, describe_cost, dry_run
from composer_rl.model import count_parameters
from composer_rl.task.load import load_task

INPUTS = {"model=hf": [f"model.path={PACKAGE_DIR / 'assets' / 'tiny'}"]}


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_dry_runs(preset, capsys):
    dry_run(compose_run(preset, *INPUTS.get(preset, [])))
    shown = capsys.readouterr().out
    assert "exact_total: 0.0" in shown
    assert "nothing was trained" in shown


def test_the_rendered_prompt_is_the_first_rows(capsys):
    run = compose_run()
    dry_run(run)
    assert load_task(run.task).train_rows[0]["prompt"][0]["content"] in " ".join(capsys.readouterr().out.split())


def test_the_cost_counts_passes_and_bytes():
    run = compose_run("objective=grpo", "kl=loss", "trainer.max_micro_batch_size=16")
    from composer_rl.config import plan_batch

    parameters = count_parameters(run.model)
    lines = describe_cost(run, plan_batch(run), parameters)
    assert "4 forward-backward, 1 for the reference's log-probs" in lines[1]
    # fp32 weights, gradients and two Adam moments, and the reference's weights.
    assert f"{parameters * 4 * 5 / 2**20:,.0f} MiB" in lines[2]


def test_a_reward_that_fails_or_returns_nonsense_is_named():
    task = load_task(compose_run().task)

    def broken(**kwargs):
        raise KeyError("answr")

    def bare(**kwargs):
        return 0.5

    row = task.train_rows[0]
    for reward, message in ((broken, "task.rewards.broken: fails"), (bare, "task.rewards.bare: returned 0.5")):
        odd = type(task)(**{**vars(task), "rewards": [reward]})
        with pytest.raises(ConfigError, match=message):
            canned_rewards(row, odd)
