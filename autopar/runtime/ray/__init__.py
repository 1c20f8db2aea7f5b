"""Pipelines on workers in processes of their own, by Ray. Ray is imported only when workers are started with it."""

from autopar.runtime.ray.deployment import Deployment, Replanner
from autopar.runtime.ray.driver import Driver
from autopar.runtime.ray.options import RunOptions
from autopar.runtime.ray.pipeline import RemotePipeline
from autopar.runtime.ray.source import Pipelined
from autopar.runtime.ray.values import RemoteArray

__all__ = ["Deployment", "Driver", "Pipelined", "RemoteArray", "RemotePipeline", "Replanner", "RunOptions"]
