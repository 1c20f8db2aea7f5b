"""The constants of the cost model, read from ``cost_models/training/constants.toml``."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from autopar.cluster.catalog import folder
from autopar.cluster.stack import StackChoice
from autopar.cost.network import NetworkRates
from autopar.errors import AutoparError

#: A number, or one for each of several kernels.
Numbers: TypeAlias = float | NDArray[np.float64]

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Kernels(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speed of kernels on any device.

    Args:
        product_share: fraction of the device's best matrix-product rate that large products of a training step
            reach.
        half_waves: waves of output tiles (of 128 x 128 on every core) at which a product reaches half of that.
        half_depth: size of the contracted dim at which a product reaches half.
        misaligned_share: what is left of the rate where a head's width is no multiple of 8 elements, which
            tensor cores need.
        memory_share: fraction of the memory bandwidth that operators reach that memory limits.
        partial_bytes: bytes of memory traffic that take as long as an element of a partial sum, of a product whose
            depth is divided.
    """

    product_share: _Fraction
    half_waves: _NotNegative
    half_depth: _NotNegative
    misaligned_share: _Fraction
    memory_share: _Fraction
    partial_bytes: _Positive


@dataclass(frozen=True)
class StartPrices:
    """Cost of the programs of a pipeline besides what they compute.

    Args:
        start_s: seconds that a host needs to start one more program (`benchmarks pipelines`: 0.1 to 0.4 ms an
            instruction on CPU).
        branch_s: seconds of a worker's branch in a round of one program (10 us a round with small slots on CPU devices;
            not measured on accelerators).
        most_branches: branches (rounds x workers) of one program that a compiler takes: it compiles all of them.
        most_blocks: blocks of a product that travel next to it: a compiler unrolls them, and they become small.
    """

    start_s: float = 2e-4
    branch_s: float = 1e-5
    most_branches: int = 2**12
    most_blocks: int = 16


class Stack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Costs of a training program beyond its arithmetic.

    Args:
        fused_attention: attention never writes its s x s values.
        attention_kernel: name of the kernel that does so among `Constants.attention`; devices on which that was not
            measured, and "", take its products by their sizes.
        traffic: what its memory-bound operators read and write over what XLA's would: more where less is fused.
        core_traffic: the same for softmax and dropout of the attention core.
        softmax_batches: the fused softmax takes so many heads at once: where those of a device, of all examples of a
            microbatch, are no multiple of it, its operators run one by one; 1 where it takes any number.
        start_s: host seconds to start a kernel of the forward pass or the update; 0 for programs that are compiled.
        start_backward_s: the same of the backward pass.
        collective_s: host seconds to start one collective of a layer.
        wait_s: seconds that devices of a tensor-parallel group wait for the slowest of them, each time that they
            meet: twice a layer and pass.
        link_share: fraction of a link's rate that parameters reach which are gathered where they are used (ZeRO-3), and
            their gradients.
        microbatch_s: seconds of each microbatch on each stage outside of layers.
        step_s: seconds of each step outside of microbatches.
        gradient_bytes: bytes of an element of the gradients that replicas reduce.
        bf16_gradient_bytes: bytes that are kept for an element of the gradients where products are in bf16, which
            is summed in f32.
        accumulate_bytes: bytes that adding a microbatch's gradients to those of the others reads and writes, an
            element.
        partition_bytes: the same where gradients or optimizer state are partitioned (ZeRO).
        runs_whole_again: what the step recomputes runs again whole, with its collectives; compilers leave out what
            nothing reads.
        gathers_again: parameters that are gathered where they are used (ZeRO-3) are given up after each run, so that
            what runs again gathers them once, and its backward pass once more.
        copies_stacks: loops write what they stack into zeros, and copy what their body reads as well.
        keeps_narrow_parameters: the parameters that products read are kept in the width of products next to those of
            the optimizer, and gradients too: no microbatch converts them.
        asynchronous: collectives overlap with computation as far as values allow; the shares below are of those that do
            not say so.
        tp_overlap: fraction of tensor-parallel collectives that compute hides.
        dp_overlap: fraction of gradient and parameter collectives that compute may hide.
        combine_bytes: gradients are sent together up to so many bytes; 0 sends each alone.
        gather_bytes: the same of parameters that are gathered where they are used (ZeRO-3).
        pp_overlap: fraction of the sends between stages that compute hides; the sender awaits the rest.
        scatter_sends: devices of a tensor-parallel group each send a part of what goes to the next stage
            (SC21, section 4.1).
        fused_loss: the loss keeps no copy of the logits in f32.
        reserved_bytes: bytes of a device that its runtime and libraries take.
        fragmentation: fraction of the planned bytes that an allocator wastes.
    """

    fused_attention: bool
    attention_kernel: str
    traffic: _Positive
    core_traffic: _Positive
    softmax_batches: _Count
    start_s: _NotNegative
    start_backward_s: _NotNegative
    collective_s: _NotNegative
    wait_s: _NotNegative
    link_share: _Fraction
    microbatch_s: _NotNegative
    step_s: _NotNegative
    gradient_bytes: _Positive
    bf16_gradient_bytes: _Positive
    accumulate_bytes: _NotNegative
    partition_bytes: _NotNegative
    runs_whole_again: bool
    gathers_again: bool
    copies_stacks: bool
    keeps_narrow_parameters: bool
    asynchronous: bool
    tp_overlap: _Fraction
    dp_overlap: _Fraction
    combine_bytes: _NotNegative
    gather_bytes: _NotNegative
    pp_overlap: _Fraction
    scatter_sends: bool
    fused_loss: bool
    reserved_bytes: _NotNegative
    fragmentation: _NotNegative


class ProductSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes at which a product reaches half of the best rate of a device.

    Args:
        half_waves: waves of output tiles; see `Kernels`.
        half_depth: size of the contracted dim.
    """

    half_waves: _NotNegative
    half_depth: _NotNegative


class AttentionKernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Share of a device's peak that attention in one kernel was measured to reach, by the length of a sequence.

    Args:
        forward: (tokens, share) of the forward pass, lengths rising.
        backward: the same of the backward pass, whose products count with those that make the scores again.
    """

    forward: tuple[tuple[float, _Fraction], ...]
    backward: tuple[tuple[float, _Fraction], ...]

    def share(self, tokens: Numbers, *, backward: bool) -> Numbers:
        """The share for a length, linear in its logarithm between two that were measured."""
        points = self.backward if backward else self.forward
        at, shares = zip(*points, strict=True)
        return np.asarray(np.interp(np.log(tokens), np.log(at), shares))


class Constants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All constants of the model.

    Args:
        kernels: how fast kernels run.
        network: how collectives behave.
        stacks: training programs by name.
        cores: units that run tiles of matrix products at the same time, by start of a device's kind.
        best_f8: fraction of the peak that the best matrix product in f8 reaches, by start of a device's kind.
        attention: measured kernels of attention, by name and start of a device's kind.
        products: measured sizes that slow products down, by start of a device's kind and dtype; elsewhere those of
            `kernels` hold.
    """

    kernels: Kernels
    network: NetworkRates
    stacks: Mapping[str, Stack]
    cores: Mapping[str, int]
    best_f8: Mapping[str, _Fraction]
    attention: Mapping[str, Mapping[str, AttentionKernel]]
    products: Mapping[str, Mapping[str, ProductSizes]]

    def with_values(self, values: Iterable[tuple[str, float]]) -> Constants:
        """The same with other numbers, by table and key of the file, as ``kernels.half_depth``.

        Raises:
            AutoparError: there is no such table or key, or a value is impossible there.
        """
        plain: dict[str, Any] = msgspec.to_builtins(self)
        for path, value in values:
            name, _, key = path.rpartition(".")
            table: Any = plain
            for part in name.split("."):
                table = table.get(part) if isinstance(table, dict) else None
            if not isinstance(table, dict) or not isinstance(table.get(key), float):
                raise AutoparError(f"no number of {constants_file().name} is called {path!r}")
            table[key] = value
        return _checked(plain)

    def stack(self, choice: StackChoice) -> Stack:
        """The training program called so; AutoparError if there is none."""
        name = choice if isinstance(choice, str) else choice.name
        if name not in self.stacks:
            raise AutoparError(f"no stack is called {name!r}", remedy=f"one of {', '.join(sorted(self.stacks))}")
        return self.stacks[name]

    def cores_of(self, kind: str) -> int | None:
        """Cores of a device by its kind; None where it is not known."""
        cores = [n for start, n in sorted(self.cores.items()) if kind.startswith(start)]
        return cores[-1] if cores else None

    def best_f8_of(self, kind: str) -> float:
        """Fraction of the f8 peak that a device reaches, by its kind; 0.75 where it is not known."""
        shares = [share for start, share in sorted(self.best_f8.items()) if kind.startswith(start)]
        return shares[-1] if shares else 0.75

    def products_of(self, kind: str) -> Mapping[str, ProductSizes]:
        """Measured sizes by dtype of a device by its kind; none where no products were measured there."""
        measured = [sizes for start, sizes in sorted(self.products.items()) if kind.startswith(start)]
        return measured[-1] if measured else {}

    def attention_of(self, name: str, kind: str) -> AttentionKernel | None:
        """The measured rates of an attention kernel; None where it was not measured on that device.

        Args:
            name: of the kernel.
            kind: jax's name of the kind of device.
        """
        measured = [kernel for start, kernel in sorted(self.attention.get(name, {}).items()) if kind.startswith(start)]
        return measured[-1] if measured else None


def constants_file() -> Path:
    """Path of the file of constants of training programs (`Constants`) that comes with autopar."""
    return folder() / "training" / "constants.toml"


@functools.cache
def load_constants() -> Constants:
    """Reads the constants that come with autopar.

    Raises:
        AutoparError: a key is unknown or missing or its value impossible.
    """
    path = constants_file()
    try:
        return _checked(tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise AutoparError(f"{path.name}: {error}", remedy="correct that value in the file") from error


@functools.lru_cache(maxsize=32)
def constants_of(stack: StackChoice) -> Constants:
    """The constants that price a program: those that come with autopar, with those that the stack has of its own.

    Raises:
        AutoparError: as `Constants.with_values`.
    """
    return load_constants() if isinstance(stack, str) else load_constants().with_values(stack.constants)


def _checked(plain: Any) -> Constants:
    """The constants of plain data; AutoparError says what is unknown, missing or impossible."""
    try:
        return msgspec.convert(plain, Constants)
    except msgspec.ValidationError as error:
        raise AutoparError(f"{constants_file().name}: {error}", remedy="correct that value") from error
