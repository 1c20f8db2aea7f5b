"""`Plan`: what a search decided, as plain data with a JSON form."""

from autopar.plan.content import PlanContent, SearchContent
from autopar.plan.form import StepForm
from autopar.plan.pipeline import Pipeline, PipelineTransfer, PipelineValue, PipelineWork
from autopar.plan.plan import Plan, SearchRecord
from autopar.plan.types import (
    AxisRole,
    Choice,
    CollectiveKind,
    CombinedBytes,
    Communication,
    Considered,
    Copy,
    HostMemory,
    InputPart,
    InputRecord,
    Memory,
    OperatorRecord,
    OutputRecord,
    Stage,
)
from autopar.plan.versions import FORMAT_VERSION

__all__ = [
    "FORMAT_VERSION",
    "AxisRole",
    "Choice",
    "CollectiveKind",
    "CombinedBytes",
    "Communication",
    "Considered",
    "Copy",
    "HostMemory",
    "InputPart",
    "InputRecord",
    "Memory",
    "OperatorRecord",
    "OutputRecord",
    "Pipeline",
    "PipelineTransfer",
    "PipelineValue",
    "PipelineWork",
    "Plan",
    "PlanContent",
    "SearchContent",
    "SearchRecord",
    "Stage",
    "StepForm",
]
