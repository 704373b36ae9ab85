"""What single instructions of a program cost: matrix products, attention kernels, collectives."""

import math
import re
from collections.abc import Callable

from tools.planner.hlo_text import Instruction

# Bytes sent of n members' collective, of the bytes that one of them holds before it; by the ring.
_SENT: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: n - 1,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
}


def dot_flops(dot: Instruction, operands: list[Instruction]) -> float:
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.rest)
    lhs = operands[0].arrays[0].dims
    depth = math.prod(lhs[int(i)] for i in contracted[1].split(",") if i) if contracted else 1
    return 2.0 * math.prod(dot.arrays[0].dims) * depth


def convolution_flops(convolution: Instruction, operands: list[Instruction]) -> float:
    """A TPU's matrix products are convolutions; a batch dimension becomes a dilated spatial one.

    Only positions where the window meets the array are counted, as XLA's HloCostAnalysis does.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.rest)
    lhs, rhs = operands[0].arrays[0].dims, operands[1].arrays[0].dims
    out = convolution.arrays[0].dims
    groups = re.search(r"batch_group_count=(\d+)", convolution.rest)
    fma = rhs[labels[2].index("i")] * out[labels[3].index("f")] * out[labels[3].index("b")]
    fma /= int(groups[1]) if groups else 1
    window = re.search(r"window=\{([^}]*)\}", convolution.rest)
    fields = dict(field.split("=") for field in window[1].split()) if window else {}
    spatial = sorted(c for c in labels[1] if c.isdigit())
    for number, label in enumerate(spatial):

        def field(name: str, default: int, number: int = number) -> int:
            return int(fields[name].split("x")[number]) if name in fields else default

        padding = fields["pad"].split("x")[number].split("_") if "pad" in fields else ("0", "0")
        in_size, out_size = lhs[labels[1].index(label)], out[labels[3].index(label)]
        size = rhs[labels[2].index(label)]
        stride, low = field("stride", 1), int(padding[0])
        base, dilation = field("lhs_dilate", 1), field("rhs_dilate", 1)
        fma *= sum(
            0 <= at < (in_size - 1) * base + 1 and at % base == 0
            for position in range(out_size)
            for tap in range(size)
            for at in (position * stride - low + tap * dilation,)
        )
    return 2.0 * fma


def kernel_flops(kernel: Instruction, operands: list[Instruction]) -> float:
    """Splash attention: 2 products a query and key forward, 3 for dq, 4 for dk and dv.

    A causal kernel is given the queries' positions beside the two sides' segments, and an entry a
    tile (int8[1,q,k]); it skips the tiles after a query's.
    Source: jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel.
    """
    products = next(
        (n for part, n in (("_fwd", 2), ("_dq", 3), ("_dkv", 4)) if part in kernel.name), 0
    )
    floats = [o.arrays[0] for o in operands if o.arrays and o.arrays[0].dtype in ("bf16", "f32")]
    if "splash" not in kernel.name or not floats:
        return 0.0
    q, k = floats[0].dims, floats[1].dims
    causal = sum(o.arrays[0].dtype == "s32" for o in operands) > 2
    tiles = next((o.arrays[0].dims for o in operands if o.arrays[0].dtype == "s8"), None)
    share = _causal_share(q[-2], k[-2], tiles[-2:]) if causal and tiles else 1.0
    return 2.0 * products * math.prod(q) * k[-2] * share


def _causal_share(queries: int, keys: int, tiles: tuple[int, ...]) -> float:
    """The part of a causal kernel's tiles that it computes.

    The last query attends to all keys: more keys than queries are a cache's, before them. Twice as
    many are the row's, given twice, for shared prompts (models.splash): which of these tiles are
    computed depends on the row, and all that a causal row could need are counted.
    """
    q_tiles, kv_tiles = tiles
    if keys == 2 * queries:
        keys, kv_tiles = keys // 2, kv_tiles // 2
    q_tile, kv_tile = queries // q_tiles, keys // kv_tiles
    computed = sum(
        min(kv_tiles, 1 + (keys - queries + (i + 1) * q_tile - 1) // kv_tile)
        for i in range(q_tiles)
    )
    return computed / (q_tiles * kv_tiles)


def sent_bytes(kind: str, collective: Instruction, operands: list[Instruction]) -> float:
    """Bytes that one device sends, by the ring: (n - 1) / n of the whole, twice for all-reduce."""
    members = group_size(collective.rest)
    inside = sum(array.size_bytes for operand in operands for array in operand.arrays)
    if kind == "collective-permute":
        return float(inside)
    return inside * _SENT[kind](members)


def between_slices(
    send: Instruction, operands: list[Instruction]
) -> tuple[str, float, float] | None:
    """(kind, 1, bytes that one device sends to other slices); None: the host alone receives it.

    libtpu writes a collective over slices as one inside the slice, and a transfer of each device's
    part through the hosts, here of device 0 ... 7 of the slices 1 and 2:

        _xla_megascale_target="{1,2}x{0:7}", _xla_megascale_transfer_type="ALL_REDUCE"
    """
    transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', send.rest)
    if not transfer:
        return None
    kind = transfer[1].lower().replace("_", "-")
    target = re.search(r'_xla_megascale_target="\{([^}]*)\}', send.rest)
    slices = sum(
        int(last or first) - int(first) + 1
        for first, _, last in (part.partition(":") for part in target[1].split(","))
    )
    inside = sum(array.size_bytes for array in operands[0].arrays)
    return kind, 1.0, inside * _SENT.get(kind, lambda n: 1.0)(slices)


def group_size(rest: str) -> int:
    named = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", rest)
    if named:  # mesh['a'=2,'b'=4] {'a'}, or {'a':(1)2}: a part of an axis
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        return math.prod(
            int(part) if part else sizes[name]
            for name, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
        )
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", rest)
    if iota:
        return int(iota[2])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    return len(listed[1].split(",")) if listed else 1
