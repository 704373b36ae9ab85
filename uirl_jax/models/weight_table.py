"""A family's table: which published tensors make up each leaf, LoRA targets, sharding rules.

Read by `weights` (base weights), `peft_adapters`, `lora` and `sharding`. Touches no file and no
array.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from uirl_jax.errors import ConfigError, ModelError

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of the base weights and the tensors that it is made of."""

    path: str  # "text/blocks/q_proj/kernel"
    tensors: tuple[str, ...]  # published names; one per layer of a stacked leaf
    shape: Shape  # of the leaf
    stacked: bool
    transposed: bool
    tensor_shape: Shape  # of each tensor


def _zero(cfg: Any) -> int:
    return 0


class Stack(NamedTuple):
    """Blocks whose leaves have a leading layer axis."""

    prefix: str  # of the published names; followed by the layer's number
    modules: Mapping[str, str]  # module within a block -> published module within a layer
    first: Callable[[Any], int] = _zero  # config -> number of the first layer


def _same(name: str) -> str:
    return name


@dataclasses.dataclass(frozen=True)
class WeightTable:
    """The tables of one family.

    The last name of a leaf's path gives its kind: `kernel` is the transpose of torch's `weight`,
    `bias` is torch's `bias`, and any other (`scale`, `embedding`) is torch's `weight`.

    Attributes:
      stacks: path of stacked blocks -> their tensors.
      single: path -> tensor, for every other leaf.
      lora_groups: LoRA target -> its projections.
      sharding_rules: last two names of a leaf's path, or the last one -> meanings of its dimensions
        (`sharding.AXIS_RULES`).
      shapes: path -> (config -> shape of the published tensor), for a tensor that has neither the
        leaf's shape nor its transpose, such as a convolution.
      published_name: a tensor's name in any layout -> its name in this table; None: not a weight.
      current_name: a module's name in this table -> its name in current transformers.
      redundant: config -> other tensors that a file may hold, such as a tied head.
      peft_targets: projection -> its entry in PEFT's target_modules, if the projection's own last
        name would match other modules too; {layer} in it stands for the number of every layer.
      unused: start of the paths of leaves that are held for the files alone: nothing computes them,
        and adapters of them are read and dropped.
    """

    stacks: Mapping[str, Stack]
    single: Mapping[str, str]
    lora_groups: Mapping[str, tuple[str, ...]]
    sharding_rules: Mapping[str, tuple[str | None, ...]]
    shapes: Mapping[str, Callable[[Any], Shape]] = dataclasses.field(default_factory=dict)
    published_name: Callable[[str], str | None] = _same
    current_name: Callable[[str], str] = _same
    redundant: Callable[[Any], Collection[str]] = lambda cfg: ()
    peft_targets: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unused: tuple[str, ...] = ()

    @property
    def projections(self) -> tuple[str, ...]:
        """All projections that may carry adapters."""
        return tuple(dict.fromkeys(name for group in self.lora_groups.values() for name in group))

    def projections_of(self, targets: Collection[str]) -> frozenset[str]:
        """The projections of LoRA targets: names of groups or of projections.

        Raises: ConfigError: an unknown target.
        """
        unknown = [t for t in targets if t not in self.lora_groups and t not in self.projections]
        if unknown:
            known = (*self.lora_groups, *self.projections)
            raise ConfigError(
                f"lora.targets={tuple(targets)}: {unknown[0]!r} is unknown, expected some of "
                f"{known}"
            )
        return frozenset(name for t in targets for name in self.lora_groups.get(t, (t,)))

    def targets_of(self, projections: Collection[str]) -> tuple[str, ...]:
        """The reverse of projections_of: groups as far as they are complete, then projections."""
        remaining = set(projections)
        # A group that contains another one ("all") is written as its parts.
        unions = {
            name
            for name, members in self.lora_groups.items()
            if any(set(g) < set(members) for n, g in self.lora_groups.items() if n != name)
        }
        groups = [
            name
            for name, members in self.lora_groups.items()
            if name not in unions and set(members) <= remaining
        ]
        for name in groups:
            remaining -= set(self.lora_groups[name])
        return (*groups, *(name for name in self.projections if name in remaining))

    def leaf(self, cfg: Any, path: str, shape: Shape) -> Leaf:
        """The entry of one leaf. Raises: ModelError: not in the table."""
        *_, kind = path.split("/")
        suffix = "bias" if kind == "bias" else "weight"
        transposed = kind == "kernel"
        start = next((start for start in self.stacks if path.startswith(f"{start}/")), None)
        if start is None:
            if path not in self.single:
                raise ModelError(f"{path}: a leaf without a name in WeightTable.single")
            tensors, tensor_shape = (self.single[path],), shape
        else:
            stack = self.stacks[start]
            module = path.removeprefix(f"{start}/").rpartition("/")[0]
            if module not in stack.modules:
                raise ModelError(f"{path}: a leaf without a name in WeightTable.stacks[{start!r}]")
            module = stack.modules[module]
            layers = range(stack.first(cfg), stack.first(cfg) + shape[0])
            tensors = tuple(f"{stack.prefix}.{i}.{module}.{suffix}" for i in layers)
            tensor_shape = shape[1:]
        if transposed:
            tensor_shape = tensor_shape[::-1]
        if path in self.shapes:
            published = self.shapes[path](cfg)
            assert math.prod(published) == math.prod(tensor_shape), (path, published, tensor_shape)
            tensor_shape = published
        return Leaf(path, tensors, shape, start is not None, transposed, tensor_shape)
