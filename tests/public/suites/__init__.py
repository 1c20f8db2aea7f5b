"""Test suites of released packages with `jax.jit` replaced by autopar: `python -m tests.public.suites`."""
