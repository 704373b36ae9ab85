"""The text of an optimised XLA program as computations of instructions.

As TPU and CPU compilers write it (`compiled.as_text()`); what it costs is `hlo`'s to say.
"""

import dataclasses
import math
import re

_DTYPE_BYTES = {
    **{"pred": 1, "s4": 1, "u4": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1},
    **{"s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4},
    **{"s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16},
}
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a shape; `fast` where it lies outside of HBM."""

    dtype: str
    dims: tuple[int, ...]
    fast: bool

    @property
    def size_bytes(self) -> int:
        return _DTYPE_BYTES.get(self.dtype, 4) * math.prod(self.dims)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation. `rest` is everything behind the operands."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    rest: str
    root: bool

    def called(self, role: str) -> str:
        match = re.search(rf"\b{role}=%?([\w.\-]+)", self.rest)
        return match[1] if match else ""


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line == "}":  # a kernel's metadata has lines of its own that begin like this one
            current = None
        elif line.rstrip().endswith("{") and (line.startswith(("%", "ENTRY"))):
            name = line.removeprefix("ENTRY ").split(" ")[0].lstrip("%")
            computations[name] = current = {}
            entry = name if line.startswith("ENTRY") else entry
        elif current is not None:
            instruction = _instruction(line)
            if instruction is not None:
                current[instruction.name] = instruction
    return computations, entry


def _instruction(line: str) -> Instruction | None:
    head = _HEAD.match(line)
    if not head:
        return None
    rest = line[head.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else _ARRAY.match(rest).end()
    arrays = tuple(
        Array(
            dtype,
            tuple(int(n.removeprefix("<=")) for n in dims.split(",") if n),
            bool(re.search(r"S\([1-9]", layout)),
        )
        for dtype, dims, layout in _ARRAY.findall(rest[:end])
        if dtype in _DTYPE_BYTES
    )
    opcode = _OPCODE.match(rest, end)
    start = opcode.end() - 1
    close = _closing(rest, start)
    inside = rest[start + 1 : close]
    literal = opcode[1] in ("parameter", "constant")
    return Instruction(
        name=head[2],
        opcode=opcode[1],
        arrays=arrays,
        operands=() if literal else tuple(re.findall(r"%([\w.\-]+)", inside)),
        rest=rest[start + 1 :] if literal else rest[close + 1 :],
        root=bool(head[1]),
    )


def _closing(text: str, start: int) -> int:
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return start + match.start()
    return len(text)
