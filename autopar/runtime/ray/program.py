"""A pipeline on workers with the face of `autopar.runtime.LocalProgram`: what `autopar.parallelize` calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from autopar._compat.meshes import abstract_mesh
from autopar.errors import AutoparError, ClusterError
from autopar.errors.names import counted
from autopar.frontend import Traced
from autopar.lower.hosted import hosted_of, sharding_of
from autopar.lower.pipeline.build import LoweredPipeline
from autopar.lower.split_layers import SplitStep
from autopar.plan import Plan
from autopar.runtime.leaves import check_data, give_up
from autopar.runtime.loaded import LoadedStep, StepShardings, described_inputs
from autopar.runtime.ray.cluster import RayCluster
from autopar.runtime.ray.deployment import Deployment, Nodes, Replanner
from autopar.runtime.ray.pipeline import RemotePipeline
from autopar.runtime.ray.source import Pipelined, pipelined
from autopar.runtime.ray.values import RemoteArray, RemoteStack
from autopar.schedule import Work
from autopar.simulate import Timeline


@dataclass(frozen=True, eq=False)
class RemoteProgram(LoadedStep):
    """A pipeline whose workers are ready.

    Args:
        runtime: the workers.
        split_step: which inputs and outputs are in pieces.
    """

    runtime: RemotePipeline
    split_step: SplitStep
    here = False
    worker_memory = ()

    @property
    def plan(self) -> Plan:
        """The plan that is carried out: another one than at first where workers were lost for good."""
        plan: Plan = self.runtime.deployment.plan
        return plan

    @property
    def program(self) -> StepShardings:
        """Shardings of the step's inputs and outputs. Their meshes have no devices, which are elsewhere."""
        content = self.plan.content
        meshes = [abstract_mesh(s.mesh_axes) for s in self.plan.stages]
        there = hosted_of(content)
        return StepShardings(
            tuple(sharding_of(r, meshes[r.stage], host=n in there.inputs) for n, r in enumerate(content.inputs)),
            tuple(sharding_of(r, meshes[r.stage], host=n in there.outputs) for n, r in enumerate(content.outputs)),
        )

    def place_all(self, leaves: Sequence[Any]) -> list[Any]:
        """Leaves as the workers take them: handles as they are, arrays to be sent along with the step."""
        return [self._taken(i, leaf) for i, leaf in enumerate(leaves)]

    def shard_all(self, leaves: Sequence[Any]) -> list[Any]:
        """Handles to leaves, sent to the workers that read them; a batch stays what it is until the step."""
        taken = self.place_all(leaves)
        flat: dict[int, Any] = {}
        for n, leaf in enumerate(taken):
            if not isinstance(leaf, RemoteArray):
                flat.update(zip(self.split_step.inputs[n], self._groups_of_leaf(n, leaf), strict=True))
        put = self.runtime.put(flat)
        arrays = []
        for n, leaf in enumerate(taken):
            at = self.split_step.inputs[n]
            if at[0] not in put:
                arrays.append(leaf)
            else:
                arrays.append(put[at[0]] if len(at) == 1 else RemoteStack([put[i] for i in at]))
        return arrays

    def make(self, function: Callable[..., Sequence[Any]], arguments: Sequence[Any], inputs: range) -> list[Any]:
        """Handles to arrays that workers make, each worker those that it reads; see `LoadedProgram`."""
        flat: dict[int, Callable[[Sequence[Any]], Any]] = {}
        for position, n in enumerate(inputs):
            at = self.split_step.inputs[n]
            for k, i in enumerate(at):
                flat[i] = partial(_piece, position, k, len(at))
        arrays = self.runtime.make(function, arguments, flat)
        results = []
        for n in inputs:
            parts = [arrays.get(i) for i in self.split_step.inputs[n]]
            laid = [p for p in parts if p is not None]
            results.append(joined_parts(laid) if len(laid) == len(parts) else None)
        missing = [position for position, r in enumerate(results) if r is None]
        if missing:  # a batch, or what no stage reads
            here = jax.jit(lambda *a: [function(*a)[p] for p in missing])(*arguments)
            for position, array in zip(missing, here, strict=True):
                results[position] = array
        return results

    def run(self, placed: list[Any], leaves: Sequence[Any], *, timed: bool = False) -> Sequence[Any]:
        """Handles to the results of a step; see `LoadedProgram`. ``timed`` instructions are for `timeline`."""
        results = self.runtime.step(self.inputs(placed), timed=timed)
        give_up(leaves, self.donated)
        return self.joined(dict(enumerate(results)))

    def inputs(self, placed: Sequence[Any]) -> list[Any]:
        """Inputs of the lowered step: those that `place_all` made, and constants."""
        flat = self.inputs_of(dict(enumerate([*placed, *self.constants])))
        return [flat[i] for i in range(len(flat))]

    def inputs_of(self, leaves: Mapping[int, Any]) -> dict[int, Any]:
        """Inputs of the lowered step by index, of some leaves by index."""
        return {
            i: piece
            for n, leaf in leaves.items()
            for i, piece in zip(self.split_step.inputs[n], self._groups_of_leaf(n, leaf), strict=True)
        }

    def join(self, number: int, parts: Sequence[Any]) -> Any:
        """A handle to a result from those of its outputs of the lowered step."""
        return joined_parts(parts)

    def joined(self, outputs: Mapping[int, Any]) -> list[Any]:
        """Results of the function from handles to outputs of the lowered step by number."""
        return [joined_parts([outputs[i] for i in at]) for at in self.split_step.outputs]

    def timed(self, note: Callable[[Work, float], None]) -> RemoteProgram:
        """This program: workers keep the seconds of their instructions themselves (`timeline`)."""
        return self

    def timeline(self) -> Timeline:
        """The last step that was timed."""
        return self.runtime.timeline()

    def close(self) -> None:
        """Frees the programs on the workers; the workers end with the cluster."""
        self.runtime.close()

    def _groups_of_leaf(self, index: int, leaf: Any) -> Sequence[Any]:
        """The inputs of the lowered step that a leaf is."""
        at = self.split_step.inputs[index]
        if isinstance(leaf, RemoteStack):
            self.runtime.driver.check(leaf)
            if len(leaf.shards) == len(at):
                return leaf.shards
            # Another function has the layers of this stack in other groups.
            return leaf.regrouped((self.runtime.function.number, index), lambda: self._regrouped(index, leaf))
        if len(at) == 1:
            return [leaf]
        whole = leaf.to_jax() if isinstance(leaf, RemoteArray) else leaf
        return _cut(whole, len(at))

    def _regrouped(self, index: int, leaf: RemoteStack) -> Sequence[Any]:
        at = self.split_step.inputs[index]
        cut = dict(zip(at, _cut(leaf.to_jax(), len(at)), strict=True))
        put = self.runtime.put(cut)
        return [put.get(i, cut[i]) for i in at]

    def _taken(self, index: int, leaf: Any) -> Any:
        check_data(leaf, self.names[index])
        if isinstance(leaf, RemoteArray | jax.Array):
            return leaf
        return np.asarray(leaf, self.entries[index][1])

    @property
    def footprint_bytes(self) -> int:
        """Bytes a device that the program with the largest arguments, results and temporaries needs."""
        sizes = [
            m["argument_size_in_bytes"] + m["output_size_in_bytes"] + m["temp_size_in_bytes"]
            for m in self.executable.memory_analysis().values()
        ]
        return max(sizes, default=0)

    @property
    def executable(self) -> _RemoteExecutables:
        """Texts and memory of all programs."""
        return _RemoteExecutables(self.runtime)


@dataclass(frozen=True, eq=False)
class _RemoteExecutables:
    """The interface of jax's compiled object that `Compiled` uses, for the programs of all workers."""

    runtime: RemotePipeline

    def as_text(self) -> str:
        """Optimized HLO of every stage program, one after the other."""
        return "\n".join(f"// {name}\n{text}" for name, (text, _) in self.runtime.compiled().items())

    def memory_analysis(self) -> dict[str, dict[str, int]]:
        """jax's memory statistics (bytes a device) by program."""
        return {name: memory for name, (_, memory) in self.runtime.compiled().items()}

    def cost_analysis(self) -> Any:
        """Nothing: raises AutoparError."""
        raise AutoparError(
            "workers on Ray do not send the cost statistics of their programs",
            remedy="compile for Cluster.local(), or read plan.stages for what was predicted",
        )


def deployed(split_step: SplitStep, lowered: LoweredPipeline, cluster: RayCluster) -> Deployment:
    """A lowered pipeline with the Ray processes that run it."""
    graph = split_step.step.graph
    axes = tuple(lowered.mesh_axes(s) for s in range(lowered.plan.num_stages))
    source = pipelined(
        lowered.instructions, lowered.programs, axes, graph.inputs, len(graph.outputs), lowered.map.microbatching.batch
    )
    return deployment_of(source, lowered, cluster)


def deployment_of(source: Pipelined, lowered: LoweredPipeline, cluster: RayCluster) -> Deployment:
    """A lowered pipeline with the Ray processes that run it.

    Args:
        source: the step.
        lowered: the pipeline that it is of.
        cluster: where the workers are.

    Raises:
        ClusterError: the cluster has not as many devices as the plan wants.
    """
    plan, content = lowered.plan, lowered.plan.content
    wanted = len({d for s in plan.stages for d in s.devices})
    if wanted != cluster.num_devices:
        raise ClusterError(
            f"the plan is for {counted(wanted, 'device')} of {content.cluster_name}; {cluster.name} has "
            f"{cluster.num_devices}",
            cause="the plan was made for another cluster",
            remedy="plan for this cluster, or ask Cluster.ray for as many workers and devices",
        )
    stages = range(plan.num_stages)
    homes = {lowered.worker_of_stage(s): s for s in reversed(stages)}
    devices = [lowered.devices(w, homes[w]) for w in range(lowered.table.num_workers)]
    hosts = tuple(cluster.hosts(d) for d in devices)
    sizes = tuple(len(d) // n for d, n in zip(devices, hosts, strict=True) for _ in range(n))
    kinds = tuple(cluster.kind(d[0]) for d, n in zip(devices, hosts, strict=True) for _ in range(n))
    # What plans again knows the whole function: the driver must not keep it alive.
    return Deployment(source, sizes, hosts, cluster.nodes, replace(plan, again=None), kinds)


def load_remote(
    traced: Traced,
    split_step: SplitStep,
    lowered: LoweredPipeline,
    cluster: RayCluster,
    donated: Sequence[int] = (),
    progress: Callable[[str], None] | None = None,
    smaller_pipeline: Callable[[RayCluster], LoweredPipeline] | None = None,
) -> RemoteProgram:
    """Starts workers for a pipeline and compiles it there.

    Other arguments are those of `autopar.runtime.pipeline.load_pipeline`.

    Args:
        cluster: where the workers are.
        progress: told what is being done.
        smaller_pipeline: a smaller cluster -> a pipeline of the same step there, for when machines are lost for good.

    Raises:
        ClusterError: the cluster has not as many devices as the plan wants, or workers do not start.
    """
    replanner = None
    if smaller_pipeline is not None:
        replan = smaller_pipeline

        def fewer(room: Nodes) -> Deployment:
            smaller = cluster.fewer(room)
            return deployed(split_step, replan(smaller), smaller)

        replanner = Replanner(fewer)
    runtime = RemotePipeline(cluster.workers, deployed(split_step, lowered, cluster), progress, replanner)
    runtime.load()
    return load_program(traced, split_step, runtime, donated)


def load_program(
    traced: Traced, split_step: SplitStep, runtime: RemotePipeline, donated: Sequence[int]
) -> RemoteProgram:
    """The program of a pipeline that is loaded, ``runtime``; other arguments are those of `load_remote`.

    What the function closes over is put on the workers.
    """
    count = len(traced.signature.traced)
    program = RemoteProgram(*described_inputs(traced, donated), (), runtime, split_step)
    flat: Mapping[int, Any] = {
        i: piece
        for n, constant in enumerate(traced.closed_over, count)
        for i, piece in zip(split_step.inputs[n], program._groups_of_leaf(n, constant), strict=True)
    }
    put = runtime.put(flat)
    constants = tuple(
        constant if split_step.inputs[n][0] not in put else joined_parts([put[i] for i in split_step.inputs[n]])
        for n, constant in enumerate(traced.closed_over, count)
    )
    return replace(program, constants=constants)


def _cut(whole: Any, count: int) -> list[Any]:
    if count == 1:
        return [whole]
    size = whole.shape[0] // count
    return [whole[k * size : (k + 1) * size] for k in range(count)]


def _piece(position: int, k: int, count: int, results: Sequence[Any]) -> Any:
    whole = results[position]
    size = whole.shape[0] // count if count > 1 else 0
    return whole[k * size : (k + 1) * size] if count > 1 else whole


def joined_parts(parts: Sequence[RemoteArray]) -> RemoteArray:
    """One handle for an output that is in parts."""
    return parts[0] if len(parts) == 1 else RemoteStack(parts)
