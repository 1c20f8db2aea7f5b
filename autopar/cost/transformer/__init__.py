"""An analytic model of training a decoder-only transformer: time and memory of a plan that a person names."""

from autopar.cost.constants import Constants, Kernels, Stack, load_constants
from autopar.cost.transformer.memory import TransformerMemory, layer_activation_bytes, model_state, peak_memory
from autopar.cost.transformer.plan import SCHEDULES, TrainingPlan
from autopar.cost.transformer.spec import TransformerSpec
from autopar.cost.transformer.step import StepModel, StepPrediction, predict

__all__ = [
    "SCHEDULES",
    "Constants",
    "Kernels",
    "Stack",
    "StepModel",
    "StepPrediction",
    "TrainingPlan",
    "TransformerMemory",
    "TransformerSpec",
    "layer_activation_bytes",
    "load_constants",
    "model_state",
    "peak_memory",
    "predict",
]
