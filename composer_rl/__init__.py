"""composer-rl: post-train language-model agents with GRPO-family reinforcement learning from one config."""

from composer_rl.objective import PO_OBJECTIVES, make_dr_grpo_config, make_po_config

__all__ = ["PO_OBJECTIVES", "make_dr_grpo_config", "make_po_config"]
__version__ = "0.1.0"
