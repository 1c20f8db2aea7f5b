"""Ordinary JAX train steps, with presets from the literature.

Every module has ``build(preset="tiny", *, abstract=False, **overrides)``, which returns
``(train_step, args)``, and a table ``PRESETS``. No train step imports autopar.
"""
