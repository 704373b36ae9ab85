"""Which published tensors make up which leaf of a model: the form of a family's table of names.

Base weights (`weights`), adapters (`peft_adapters`), shardings and LoRA targets are all read from
it. No file and no array is touched here.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from uirl_jax.errors import ConfigError

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of the base and where it comes from."""

    path: str  # "text/blocks/q_proj/kernel"
    tensors: tuple[str, ...]  # in the published layout; one per layer where the leaf is stacked
    shape: Shape  # of the leaf
    stacked: bool
    transposed: bool
    tensor_shape: Shape  # of each tensor


class Stack(NamedTuple):
    """Blocks whose leaves have a leading layer axis."""

    prefix: str  # of the published names; the layer's number follows
    modules: Mapping[str, str]  # leaf within a block -> module of a layer


def _same(name: str) -> str:
    return name


@dataclasses.dataclass(frozen=True)
class WeightTable:
    """The tables of one family.

    A leaf's last name says what it is: `kernel` is the transpose of torch's `weight`, `scale` and
    other parameters are its `weight`, `bias` its `bias`.

    Attributes:
      stacks: leaf path of stacked blocks -> their tensors.
      single: leaf path -> tensor, for every other leaf.
      shapes: leaf path -> (config -> shape of the published tensor), where that is not the leaf's
        own or its transpose, as for convolutions.
      published_name: a tensor's name in any layout -> its name in this table; None: not a weight.
      current_name: a module's name in this table -> its name in today's transformers.
      redundant: config -> tensors that a file may hold beside these, such as a tied head.
      lora_groups: LoRA target -> the projections that it stands for.
      peft_targets: projection -> its name among PEFT's target_modules, where the projection's own
        last name would match other modules too.
      sharding_rules: last two names of a leaf, or its last one -> what its dimensions mean
        (`sharding.AXIS_RULES`).
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

    @property
    def projections(self) -> tuple[str, ...]:
        """Every projection that may carry adapters, each once."""
        return tuple(dict.fromkeys(name for group in self.lora_groups.values() for name in group))

    def projections_of(self, targets: Collection[str]) -> frozenset[str]:
        """The projections of LoRA targets, each a group's name or a projection's own.

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
        """The reverse of projections_of: the largest groups by name, then single projections."""
        remaining = set(projections)
        # A union of other groups ("all") is written as those groups.
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
        """The table's line for one leaf. Raises: KeyError: the table has none."""
        *_, kind = path.split("/")
        suffix = "bias" if kind == "bias" else "weight"
        transposed = kind == "kernel"
        start = next((start for start in self.stacks if path.startswith(f"{start}/")), None)
        if start is None:
            tensors, tensor_shape = (self.single[path],), shape
        else:
            stack = self.stacks[start]
            module = stack.modules[path.removeprefix(f"{start}/").rpartition("/")[0]]
            tensors = tuple(f"{stack.prefix}.{i}.{module}.{suffix}" for i in range(shape[0]))
            tensor_shape = shape[1:]
        if transposed:
            tensor_shape = tensor_shape[::-1]
        if path in self.shapes:
            published = self.shapes[path](cfg)
            assert math.prod(published) == math.prod(tensor_shape), (path, published, tensor_shape)
            tensor_shape = published
        return Leaf(path, tensors, shape, start is not None, transposed, tensor_shape)
