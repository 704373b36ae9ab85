"""What a compiled program does: FLOPs, HBM bytes and collectives, with loop bodies multiplied out.

Reads the text of an optimised XLA program of one device (`compiled.as_text()`), as TPU and CPU
compilers write it. XLA's own cost_analysis() counts the body of a loop once, and a Pallas kernel as
nothing. Only matrix products and kernels are counted as FLOPs: elementwise work does not run on the
matrix units. Arrays in fast memory (TPU: layouts with S(1) and above) are no HBM traffic.
"""

import dataclasses
import functools
import re
from typing import Any

from tools.planner import hlo_ops as ops
from tools.planner.hlo_text import Array, Instruction, parse

_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
# Instructions that move nothing: names for what is already there, or counted where they end.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"),
    *("while", "conditional", "call", "partition-id", "replica-id", "opt-barrier"),
    *("copy-done", "slice-done", "async-done", "async-update", "custom-call-done"),
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Totals of one device. Collectives are by kind: how many, and bytes that leave the device.

    Those between slices are in `between_slices` alone: hosts carry them over their network.
    """

    flops: float = 0.0  # matrix products
    kernel_flops: float = 0.0  # Pallas attention kernels, by formula: XLA does not know them
    hbm_bytes: float = 0.0
    collectives: tuple[tuple[str, float, float], ...] = ()  # (kind, count, bytes sent)
    between_slices: tuple[tuple[str, float, float], ...] = ()
    # The bodies of loops whose length only the data decide, taken once: a decode step.
    open_loops: "Cost | None" = None

    @property
    def total_flops(self) -> float:
        return self.flops + self.kernel_flops

    @property
    def sent_bytes(self) -> float:
        return sum(sent for _, _, sent in self.collectives)

    def __add__(self, other: "Cost") -> "Cost":
        loops = [cost.open_loops for cost in (self, other) if cost.open_loops]
        return Cost(
            self.flops + other.flops,
            self.kernel_flops + other.kernel_flops,
            self.hbm_bytes + other.hbm_bytes,
            _by_kind((*self.collectives, *other.collectives)),
            _by_kind((*self.between_slices, *other.between_slices)),
            sum(loops[1:], loops[0]) if loops else None,
        )

    def times(self, trips: float) -> "Cost":
        return Cost(
            trips * self.flops,
            trips * self.kernel_flops,
            trips * self.hbm_bytes,
            tuple((kind, trips * count, trips * sent) for kind, count, sent in self.collectives),
            tuple((kind, trips * count, trips * sent) for kind, count, sent in self.between_slices),
            self.open_loops,
        )


def _by_kind(collectives: tuple[tuple[str, float, float], ...]) -> tuple[Any, ...]:
    kinds = dict.fromkeys(kind for kind, _, _ in collectives)
    return tuple(
        (
            kind,
            sum(count for k, count, _ in collectives if k == kind),
            sum(sent for k, _, sent in collectives if k == kind),
        )
        for kind in kinds
    )


class Program:
    """The computations of one program, and what they cost.

    Args:
      dearer_share: of a conditional's runs, those that take the side with more FLOPs; the text
        does not say it. 1: costs are from above.
    """

    def __init__(self, text: str, dearer_share: float = 1.0) -> None:
        self.computations, self.entry = parse(text)
        self.dearer_share = dearer_share

    @functools.cached_property
    def cost(self) -> Cost:
        """Of one run; loops of unknown length are left out of it and in `open_loops`."""
        return self._cost(self.entry)

    @functools.cached_property
    def kernels(self) -> int:
        """How many Pallas kernels are in the text."""
        return sum(
            _target(i) == "tpu_custom_call" for c in self.computations.values() for i in c.values()
        )

    @functools.cached_property
    def largest_array(self) -> Array:
        """Of all that is ever named outside of fusions, whose insides are never held."""
        fused = {
            instruction.called("calls")
            for computation in self.computations.values()
            for instruction in computation.values()
            if instruction.opcode == "fusion"
        }
        return max(
            (
                array
                for name, computation in self.computations.items()
                if name not in fused
                for instruction in computation.values()
                for array in instruction.arrays
            ),
            key=lambda array: array.size_bytes,
        )

    @functools.cached_property
    def saved_bytes(self) -> int:
        """The most that one loop leaves behind for another: what layers keep for the backward pass.

        A carried array counts where its first dimension is the loop's length and the body changes
        it: not the stacked weights, which go through unchanged.
        """
        most = 0
        for computation in self.computations.values():
            for loop in computation.values():
                if loop.opcode != "while":
                    continue
                body = self.computations[loop.called("body")]
                trips = self._trips(loop, computation)
                root = next(i for i in body.values() if i.root)
                saved = 0
                for position, array in enumerate(loop.arrays):
                    if not (trips and trips > 1 and array.dims[:1] == (trips,)):
                        continue
                    source = body.get(root.operands[position])
                    same = (
                        source is not None
                        and source.opcode == "get-tuple-element"
                        and body[source.operands[0]].opcode == "parameter"
                        and f"index={position}" in source.rest.split(", ")
                    )
                    saved += 0 if same else array.size_bytes
                most = max(most, saved)
        return most

    # ------------------------------------------------------------------------------------- loops

    def _trips(self, loop: Instruction, computation: dict[str, Instruction]) -> int | None:
        """How often a loop's body runs; None where only the data decide."""
        known = re.search(r'known_trip_count[^}]*"n":"(\d+)"', loop.rest)
        if known:
            return int(known[1])
        condition = self.computations[loop.called("condition")]
        root = next(i for i in condition.values() if i.root)
        if root.opcode == "fusion":
            operands = root.operands
            inner = self.computations[root.called("calls")]
            root = next(i for i in inner.values() if i.root)
            parameters = {i.name: position for position, i in _parameters(inner)}
            bounds = [operands[parameters[o]] if o in parameters else o for o in root.operands]
        else:
            bounds = list(root.operands)
        if root.opcode != "compare" or "direction=LT" not in root.rest:
            return None
        end = _constant(condition.get(bounds[1]))
        counter = condition.get(bounds[0])
        if end is None or counter is None or counter.opcode != "get-tuple-element":
            return None
        position = int(re.search(r"index=(\d+)", counter.rest)[1])
        start = computation.get(loop.operands[0])
        start = computation.get(start.operands[position]) if start and start.operands else None
        while start is not None and start.opcode in ("copy", "bitcast"):
            start = computation.get(start.operands[0])
        return end - (_constant(start) or 0)

    # -------------------------------------------------------------------------------------- costs

    @functools.cache  # noqa: B019 - a program lives as long as its costs
    def _cost(self, name: str) -> Cost:
        """Of one run of a computation that is not fused."""
        computation = self.computations[name]
        total = Cost()
        channels: set[str] = set()  # one collective may be spread over several fusions
        for instruction in computation.values():
            total += self._own_cost(instruction, computation, channels)
        return total

    def _own_cost(
        self, instruction: Instruction, computation: dict[str, Instruction], channels: set[str]
    ) -> Cost:
        if instruction.opcode == "while":
            body = self._cost(instruction.called("body"))
            body += self._cost(instruction.called("condition"))
            trips = self._trips(instruction, computation)
            if trips is None:
                return Cost(open_loops=body)
            return body.times(trips)
        if instruction.opcode == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.rest)
            names = (
                [name.strip().lstrip("%") for name in branches[1].split(",")]
                if branches
                else [
                    instruction.called("true_computation"),
                    instruction.called("false_computation"),
                ]
            )
            # Of equal FLOPs the side that moves less: most blocks skip the lookup of a level.
            sides = sorted(
                (self._cost(name) for name in names),
                key=lambda cost: (cost.total_flops, -cost.hbm_bytes),
            )
            if self.dearer_share == 1.0:
                return sides[-1]
            return sides[-1].times(self.dearer_share) + sides[0].times(1.0 - self.dearer_share)
        if instruction.opcode == "call":
            return self._cost(instruction.called("to_apply"))
        if instruction.opcode == "async-start":
            return self._cost(instruction.called("calls"))
        cost = Cost(hbm_bytes=self._hbm_bytes(instruction, computation))
        return cost + self._arithmetic(instruction, computation, channels)

    def _arithmetic(
        self, instruction: Instruction, computation: dict[str, Instruction], channels: set[str]
    ) -> Cost:
        """FLOPs and collectives of an instruction, fused ones included."""
        if instruction.opcode == "fusion":
            inner = self.computations[instruction.called("calls")]
            return sum((self._arithmetic(i, inner, channels) for i in inner.values()), Cost())
        operands = [computation[name] for name in instruction.operands if name in computation]
        if instruction.opcode == "dot":
            return Cost(flops=ops.dot_flops(instruction, operands))
        if instruction.opcode == "convolution":
            return Cost(flops=ops.convolution_flops(instruction, operands))
        if _target(instruction) == "tpu_custom_call":
            return Cost(kernel_flops=ops.kernel_flops(instruction, operands))
        if instruction.opcode == "send" and (found := ops.between_slices(instruction, operands)):
            return Cost(between_slices=(found,))
        kind = instruction.opcode.removesuffix("-start")
        if kind in _COLLECTIVES:
            channel = re.search(r"channel_id=(\d+)", instruction.rest)
            if channel:
                if channel[1] in channels:
                    return Cost()
                channels.add(channel[1])
            return Cost(collectives=((kind, 1.0, ops.sent_bytes(kind, instruction, operands)),))
        return Cost()

    def _hbm_bytes(self, instruction: Instruction, computation: dict[str, Instruction]) -> float:
        """What one instruction reads and writes; every array once, slices of it where it is cut."""
        if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
            return 0.0
        operands = [computation[name] for name in instruction.operands if name in computation]
        if instruction.opcode in ("copy-start", "slice-start"):
            # (result, operand, ...) or ((operand), result, ...): read from one memory to the other.
            moved = [a for a in instruction.arrays if a.dims and a.dtype != "u32"]
            smallest = min((array.size_bytes for array in moved), default=0)
            return float(smallest * sum(not array.fast for array in moved[:2]))
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            return float(2 * _bytes(instruction.arrays))
        if instruction.opcode in ("dynamic-update-slice", "scatter"):
            return float(2 * _bytes(operands[-1 if instruction.opcode == "scatter" else 1].arrays))
        if instruction.opcode != "fusion":
            return float(
                _bytes(instruction.arrays) + sum(_bytes(operand.arrays) for operand in operands)
            )
        return float(self._fusion_reads(instruction, operands) + self._fusion_writes(instruction))

    def _fusion_reads(self, fusion: Instruction, operands: list[Instruction]) -> int:
        inner = self.computations[fusion.called("calls")]
        return sum(
            self._read(parameter, inner)
            for position, parameter in _parameters(inner)
            if position < len(operands) and not all(a.fast for a in operands[position].arrays)
        )

    def _read(self, source: Instruction, inner: dict[str, Instruction]) -> int:
        """Bytes of one value that fused instructions look at: all of it, or the slices they cut."""
        whole = sum(array.size_bytes for array in source.arrays)
        total = 0
        for user in (i for i in inner.values() if source.name in i.operands):
            first = user.operands[0] == source.name
            if user.opcode in ("dynamic-slice", "slice", "gather") and first:
                total += sum(array.size_bytes for array in user.arrays)
            elif user.opcode in ("dynamic-update-slice", "scatter") and first:
                continue  # written in place
            elif user.opcode == "bitcast":
                total += self._read(user, inner)
            elif user.opcode == "fusion":
                nested = self.computations[user.called("calls")]
                total += sum(
                    self._read(parameter, nested)
                    for position, parameter in _parameters(nested)
                    if user.operands[position] == source.name
                )
            elif user.opcode in ("tuple", "get-tuple-element") or _moves_in_background(user):
                continue  # handed on
            else:
                return whole
        return min(total, whole)

    def _fusion_writes(self, fusion: Instruction) -> int:
        inner = self.computations[fusion.called("calls")]
        root = next(i for i in inner.values() if i.root)
        sources = [root]
        if root.opcode == "tuple":
            sources = [inner[name] for name in root.operands]
        return sum(
            self._written(source, array, inner)
            for array, source in zip(fusion.arrays, sources, strict=False)
            if not array.fast
        )

    def _written(self, source: Instruction, array: Array, inner: dict[str, Instruction]) -> int:
        while source.opcode == "bitcast":
            source = inner[source.operands[0]]
        if source.opcode == "fusion" and len(source.arrays) == 1:
            nested = self.computations[source.called("calls")]
            return self._written(next(i for i in nested.values() if i.root), array, nested)
        if source.opcode in ("dynamic-update-slice", "scatter"):
            update = inner[source.operands[1 if source.opcode == "dynamic-update-slice" else -1]]
            return sum(a.size_bytes for a in update.arrays)
        if source.opcode in ("parameter", "get-tuple-element") or _moves_in_background(source):
            return 0
        return array.size_bytes


def _parameters(computation: dict[str, Instruction]) -> list[tuple[int, Instruction]]:
    return [(int(i.rest.split(")")[0]), i) for i in computation.values() if i.opcode == "parameter"]


def _moves_in_background(instruction: Instruction) -> bool:
    """A collective that runs beside the fusion's own work: interconnect, counted there."""
    return instruction.opcode.removesuffix(
        "-start"
    ) in _COLLECTIVES or "AsyncCollective" in _target(instruction)


def _target(instruction: Instruction) -> str:
    if instruction.opcode != "custom-call":
        return ""
    match = re.search(r'custom_call_target="([^"]*)"', instruction.rest)
    return match[1] if match else ""


def _bytes(arrays: tuple[Array, ...]) -> int:
    return sum(array.size_bytes for array in arrays if not array.fast)


def _constant(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    match = re.match(r"(-?\d+)\)", instruction.rest)
    return int(match[1]) if match else None
