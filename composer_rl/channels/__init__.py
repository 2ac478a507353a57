"""The learning signals beside the policy loss, one file per signal, whole."""
