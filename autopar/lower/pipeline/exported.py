"""Stage programs as bytes: lowered here for a mesh without devices, compiled wherever such devices are."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
from jax import export
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from autopar._compat.dtypes import jax_dtype
from autopar._compat.meshes import abstract_mesh, partition_spec
from autopar._compat.world import lowered_for
from autopar.lower.hosted import placed
from autopar.lower.pipeline.stage_program import Port, StageProgram, donated
from autopar.schedule import Work

#: Mesh axes as (name, size), major first.
Axes = tuple[tuple[str, int], ...]


class PlacedPort(msgspec.Struct, frozen=True, array_like=True):
    """A value and how it lies.

    Args:
        name: its name in the dataflow.
        dims: mesh axes that split each dim of the array.
        host: whether it lies in host memory between programs.
    """

    name: str
    dims: tuple[tuple[str, ...], ...]
    host: bool = False

    def sharding(self, mesh: Mesh | AbstractMesh) -> NamedSharding:
        """The sharding on a mesh that has these axes, or next to it in host memory."""
        return placed(mesh, partition_spec(self.dims), host=self.host)


class ExportedProgram(msgspec.Struct, frozen=True):
    """A program of a stage as plain data.

    Args:
        work: kind of task, stage and slice that it runs.
        axes: the mesh that it runs on.
        reads: its arguments, after the number of the microbatch.
        results: its results.
        code: bytes of `jax.export`.
        donated: indices of those of ``reads`` whose buffers become results.
        compiler_options: (name, value) of options of XLA.
    """

    work: Work
    axes: Axes
    reads: tuple[PlacedPort, ...]
    results: tuple[PlacedPort, ...]
    code: bytes
    donated: tuple[int, ...] = ()
    compiler_options: tuple[tuple[str, str], ...] = ()


def export_program(
    program: StageProgram, axes: Axes, platform: str, given_up: Set[str] = frozenset()
) -> ExportedProgram:
    """Traces and lowers a program.

    Args:
        program: from `stage_programs`.
        axes: sizes of the mesh axes of its stage.
        platform: jax's name of the devices that will run it: "cpu", "cuda", "tpu".
        given_up: values that nobody uses when it has run; their buffers are donated.
    """
    function, given = prepared(program, axes)
    with lowered_for(gloo=platform == "cpu"):  # workers of a stage may be several processes
        code = export.export(function, platforms=[platform])(*given).serialize()
    return ExportedProgram(
        program.work,
        axes,
        tuple(map(placed_port, program.reads)),
        tuple(map(placed_port, program.results)),
        bytes(code),
        donated(program, given_up, dict(axes)),
        program.compiler_options,
    )


def prepared(program: StageProgram, axes: Axes) -> tuple[Any, list[Any]]:
    """A program on a mesh without devices, jitted, and the shapes, dtypes and shardings of its arguments.

    Args:
        program: from `stage_programs`.
        axes: sizes of the mesh axes of its stage.
    """
    mesh = abstract_mesh(axes)
    sizes = dict(axes)
    whole = NamedSharding(mesh, jax.sharding.PartitionSpec())
    given = [
        jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
        *(jax.ShapeDtypeStruct(p.shape(sizes), jax_dtype(p.type.dtype), sharding=p.sharding(mesh))
          for p in program.reads),
    ]  # fmt: skip
    # What is exported is compiled elsewhere, with the options that it says.
    return replace(program, compiler_options=()).jitted(mesh), given


def export_maker(
    function: Callable[..., Sequence[Any]],
    arguments: Sequence[Any],
    results: Sequence[PlacedPort],
    axes: Axes,
    platform: str,
) -> bytes:
    """A function that makes arrays where they are to lie, traced and lowered.

    Args:
        function: arrays -> arrays.
        arguments: arrays of the shapes and dtypes that it will be called with.
        results: how its results are to lie.
        axes: sizes of the mesh axes.
        platform: jax's name of the devices that will run it.
    """
    mesh = abstract_mesh(axes)
    whole = NamedSharding(mesh, jax.sharding.PartitionSpec())
    given = [jax.ShapeDtypeStruct(jax.typeof(a).shape, jax.typeof(a).dtype, sharding=whole) for a in arguments]
    shardings = [r.sharding(mesh) for r in results]
    jitted = jax.jit(function, in_shardings=(whole,) * len(given), out_shardings=shardings)
    return bytes(export.export(jitted, platforms=[platform])(*given).serialize())


def run_maker(code: bytes, arguments: Sequence[Any], shardings: Sequence[NamedSharding]) -> Sequence[Any]:
    """Arrays that an exported function makes.

    Args:
        code: from `export_maker`.
        arguments: arrays, whole on every device.
        shardings: how each result is to lie on devices.
    """
    exported = export.deserialize(bytearray(code))
    whole = NamedSharding(shardings[0].mesh, jax.sharding.PartitionSpec())
    function = jax.jit(exported.call, in_shardings=(whole,) * len(arguments), out_shardings=list(shardings))
    outputs: Sequence[Any] = function(*arguments)
    return outputs


def placed_port(port: Port) -> PlacedPort:
    """A port as plain data."""
    dims = tuple(tuple(d) for d in port.layout.dims)
    at = int(port.stacked)
    split = (*dims[:at], tuple(port.layout.partial), *dims[at:]) if port.layout.partial else dims
    return PlacedPort(port.name, split, port.host)


def compile_program(program: ExportedProgram, mesh: Mesh) -> Callable[..., Sequence[Any]]:
    """Compiles a program for devices.

    Args:
        program: its exported form.
        mesh: the devices, with the axes of the program.

    Returns (number of the microbatch, arrays) -> tuple of arrays.
    """
    exported = export.deserialize(bytearray(program.code))
    whole = NamedSharding(mesh, jax.sharding.PartitionSpec())
    shardings = (whole, *(p.sharding(mesh) for p in program.reads))
    results = tuple(p.sharding(mesh) for p in program.results)
    with_number = tuple(n + 1 for n in program.donated)
    function = jax.jit(exported.call, in_shardings=shardings, out_shardings=results, donate_argnums=with_number)
    given = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(exported.in_avals, shardings, strict=True)
    ]
    compiled: Callable[..., Sequence[Any]] = function.lower(*given).compile(dict(program.compiler_options))
    return compiled
