"""Many processes that run one script (`jax.distributed`): what they agree on, where their arrays lie, who is gone."""
