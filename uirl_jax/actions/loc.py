"""Places said by two tokens of the vocabulary, one for each axis, then what they are about.

    loc        <loc0512><loc0100> click    the vertical one first (PaliGemma)
    loc_1000   <loc_100><loc_512> click    the horizontal one first (Florence-2)
    points_64  <x_6><y_32> click           with tokens of its own for either axis

    "hello" type      down 100 <loc0512><loc0100> scroll
    <loc0000><loc0000><loc1023><loc1023> drag

All else is as in the format `coordinates`. An axis has a fixed number of bins, whatever its length.
No published model has the tokens of `points_32` and `points_64`: tools.add_point_tokens adds them.

Source: arXiv:2407.07726, section 3.2.5; big_vision, configs/proj/paligemma/README.md;
arXiv:2311.06242, section 4.1; transformers, models/florence2/processing_florence2.py. That few bins
are enough for small pages: arXiv:2306.00245, appendix (32 by 32 on MiniWoB++).
"""

import dataclasses
import functools
import re

from uirl_jax.actions.arguments import read_coordinates, usage_coordinates, write_coordinates
from uirl_jax.actions.coordinates import BINS
from uirl_jax.actions.kinds import AXES, KINDS, quote
from uirl_jax.errors import ActionError
from uirl_jax.types import Action


@dataclasses.dataclass(frozen=True)
class Places:
    """One family of tokens.

    Attributes:
      space: of coordinates.BINS.
      across, down: the token of a bin along x and along y, as format strings.
      digits: of a token's number, as a regular expression.
      vertical_first: of the two tokens of a place.
    """

    space: str
    across: str
    down: str
    digits: str
    vertical_first: bool = False

    @property
    def bins(self) -> int:
        return BINS[self.space]

    @functools.cached_property
    def tokens(self) -> tuple[str, ...]:
        axes = dict.fromkeys((self.across, self.down))
        return tuple(token.format(place) for token in axes for place in range(self.bins))

    @property
    def _order(self) -> tuple[str, str]:
        return (self.down, self.across) if self.vertical_first else (self.across, self.down)

    @functools.cached_property
    def _pair(self) -> re.Pattern[str]:
        one = (
            f"{before}({self.digits}){after.partition('}')[2]}"
            for before, _, after in (token.partition("{") for token in self._order)
        )
        return re.compile("".join(one) + " ?")

    def usage(self, kind: str) -> str:
        """`direction amount [<x_N><y_N>] scroll`: how the format writes a kind, for a prompt."""
        place = "".join(re.sub(r"\{.*\}", "N", token) for token in self._order)
        words = re.sub(r"\bx2? y2?\b", place, usage_coordinates(kind))
        return words.replace(f"{place} {place}", place + place)

    def read(self, text: str) -> Action:
        """The action in bins. Raises: ActionError."""
        body, _, name = text.rpartition(" ")
        if name not in KINDS or not _says_where(name):
            return read_coordinates(text)
        x, y = (2, 1) if self.vertical_first else (1, 2)
        plain, pairs = self._pair.subn(lambda pair: f"{int(pair[x])} {int(pair[y])} ", body)
        action = read_coordinates(f"{plain.rstrip(' ')} {name}".strip(" "))
        said = sum(vars(action)[axis] is not None for axis in AXES)
        if said != 2 * pairs:
            example = self._place(100, 512)
            raise ActionError(
                f"{quote(text)} has {pairs} places, expected {said // 2} like {example}"
            )
        return action

    def write(self, action: Action) -> str:
        """Raises: ActionError: a coordinate is not a bin."""
        text = write_coordinates(action)
        if not _says_where(action.kind):
            return text
        spec = KINDS[action.kind]
        *values, _ = text.split(" ")
        parts: list[str] = []
        across = 0
        for argument, value in zip(spec.required + spec.optional, values, strict=False):
            if argument not in AXES:
                parts.append(value)
            elif AXES[argument] == 0:
                across = self._bin(value)
            else:
                pair = self._place(across, self._bin(value))
                if parts and parts[-1].endswith(">"):
                    parts[-1] += pair  # four tokens of a drag, as of a box
                else:
                    parts.append(pair)
        return " ".join([*parts, action.kind])

    def _place(self, across: int, down: int) -> str:
        values = (down, across) if self.vertical_first else (across, down)
        return "".join(
            token.format(value) for token, value in zip(self._order, values, strict=True)
        )

    def _bin(self, value: str) -> int:
        if not (value.isdecimal() and int(value) < self.bins):
            raise ActionError(f"{quote(value)} is no bin, expected 0 to {self.bins - 1}")
        return int(value)


LOC = Places("loc", "<loc{:04d}>", "<loc{:04d}>", "[0-9]{4}", vertical_first=True)
LOC_1000 = Places("loc_1000", "<loc_{}>", "<loc_{}>", "[0-9]{1,4}")
POINTS = {
    space: Places(space, "<x_{}>", "<y_{}>", "[0-9]{1,2}") for space in ("points_32", "points_64")
}


def _says_where(kind: str) -> bool:
    """Whether an action of the kind says where."""
    spec = KINDS[kind]
    return any(argument in AXES for argument in spec.required + spec.optional)
