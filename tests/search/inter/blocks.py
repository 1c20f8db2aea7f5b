"""A model that is cut into its blocks, for tests of stages that are isomorphic."""

from __future__ import annotations

from autopar.frontend import SignatureOptions, flatten_call, trace
from autopar.lower.pipeline.source import TracedStages
from autopar.lower.retrace import step_of
from autopar.stages import cluster
from autopar.stages.layers import Layers
from examples import gpt


def cut_into_blocks(count: int) -> tuple[TracedStages, Layers]:
    """A GPT of six blocks and a head in ``count`` microbatches, and its layers, a block each."""
    fn, args = gpt.build("tiny", layers=6, abstract=True)
    signature, _ = flatten_call(fn, args, {}, SignatureOptions())
    source = TracedStages(step_of(trace(fn, signature)))
    return source, cluster(source.step.graph, source.microbatches(count), 6, fewest=6)
