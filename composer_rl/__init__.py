"""composer-rl: post-train language-model agents with GRPO-family reinforcement learning from one config."""

__version__ = "0.1.0"
