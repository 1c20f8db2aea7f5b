"""How decoder-only transformers are trained, as papers name it: sizes, degrees of parallelism, memory, bubbles."""

from autopar.cost.constants import Constants, Kernels, Stack, load_constants
from benchmarks.published.transformer.memory import TransformerMemory, layer_activation_bytes, model_state, peak_memory
from benchmarks.published.transformer.plan import SCHEDULES, TrainingPlan
from benchmarks.published.transformer.spec import TransformerSpec

__all__ = [
    "SCHEDULES",
    "Constants",
    "Kernels",
    "Stack",
    "TrainingPlan",
    "TransformerMemory",
    "TransformerSpec",
    "layer_activation_bytes",
    "load_constants",
    "model_state",
    "peak_memory",
]
