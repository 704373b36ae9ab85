"""Rewards of an action beside a recorded step: named rules, each from 0 to 1, combined by weights.

A rule is a function of (action, step); the action is None where the text was none. A rule pays 0
on a step that it does not concern (`text_f1` where nothing was typed), so that weights of several
rules may stand side by side: a step pays by those that concern it. numpy and files are not needed;
`task` calls the rules, `rewards` has the weights. docs/recorded.md has a table of them.

The recording alone decides. That the policy says it has succeeded (terminate) is right where the
recorded step is that same end, and is worth nothing anywhere else.
"""

import collections
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from uirl_jax.types import Action
from uirl_jax.verifiers.recorded.row import Box, Step

Rule = Callable[[Action | None, Step], float]

TOUCHES = frozenset(
    {"click", "double_click", "triple_click", "right_click", "middle_click", "long_press"}
)
TEXTS = frozenset({"type", "answer"})
NEAR_PX = 140.0  # GUI-R1
QUADRATIC_REACH = 0.15  # NeMo, of the screen
TAP_REACH = 0.14  # AITW, of the screen
SWIPE_LENGTH = 0.04  # AITW: what is longer is a swipe
BOX_GROWTH = 1.4  # AITW: a box grows by it, to 2.4 times its sides
SAME_TEXT_F1 = 0.5  # GUI-R1
MAX_COMPARED_CHARS = 4096  # what one `type` may have


class _Gesture(NamedTuple):
    """Where a finger touches and lifts, in parts of the screen, y before x as in AITW."""

    touch: tuple[float, float]
    lift: tuple[float, float]

    @property
    def is_tap(self) -> bool:
        return math.dist(self.touch, self.lift) <= SWIPE_LENGTH

    @property
    def main_axis(self) -> int:
        """0: vertical, also where both are equal; 1: horizontal."""
        down, right = (abs(b - a) for a, b in zip(self.touch, self.lift, strict=True))
        return int(right > down)


def form(action: Action | None, step: Step) -> float:
    """The text was an action of the format, with arguments that may be.

    Source: the format reward of GUI-R1 (arXiv:2504.10458, section 3.3).
    """
    return float(action is not None)


def type_(action: Action | None, step: Step) -> float:
    """The kinds of action are the same.

    A drag is a scroll, as GUI-R1 takes a scroll for a swipe; the buttons of a phone are kinds of
    their own, and so are the two ways to end (AITW: press home, complete, impossible).

    Source: arXiv:2504.10458, section 3.3; icey-zhang/GUI-R1 (044e414), r1gui.py,
    `_canonical_action`.
    """
    return float(action is not None and _name(action) == _name(step.action))


def point_in_box(action: Action | None, step: Step) -> float:
    """The touch is in the recorded box, edges included; 0 where no box is recorded.

    Source: ScreenSpot's measure (SeeClick, arXiv:2401.10935, section 4.1); UI-R1's and GUI-R1's
    reward.
    """
    point = _touch(action, step)
    return float(point is not None and step.box is not None and step.box.contains(*point))


def distance(action: Action | None, step: Step) -> float:
    """1 inside the box, edges left out; without a box less than 140 pixels from the recorded point.

    The pixels are those of the row's picture as it was prepared; GUI-R1's are those of the picture
    as the model is shown it. On small pictures 140 are everywhere: `quadratic` measures in parts of
    the screen.

    Source: ritzz-ai/GUI-R1 (d43eea2), verl/utils/reward_score/r1gui.py, `r1gui_accuracy_reward`.
    """
    point, recorded = _touch(action, step), _touch(step.action, step)
    if point is None or recorded is None:
        return 0.0
    if step.box is None:
        return float(math.dist(point, recorded) < NEAR_PX)
    left, top, right, bottom = step.box
    return float(left < point[0] < right and top < point[1] < bottom)


def gaussian(action: Action | None, step: Step) -> float:
    """exp(-(dx^2 / sx^2 + dy^2 / sy^2) / 2) about the box's centre, s = half its width and height.

    Source: GUI-G2's point reward (arXiv:2507.15846, section 3), alpha 0.5. Not rounded to three
    decimals, as its code does.
    """
    return math.exp(-_spread(action, step) / 2)


def coverage(action: Action | None, step: Step) -> float:
    """Bhattacharyya coefficient of two Gaussians: of the recorded box, and as wide about the touch.

    exp(-d / 8) with the d = dx^2 / sx^2 + dy^2 / sy^2 of `gaussian`. GUI-G2's policy names a box;
    ours touches a point, and its box is taken to have the recorded size, which makes the term of
    the covariances 0.

    Source: arXiv:2507.15846, section 3, the coverage reward.
    """
    return math.exp(-_spread(action, step) / 8)


def quadratic(action: Action | None, step: Step) -> float:
    """(1 - d / 0.15)^2 within d < 0.15, d the distance from the centre in parts of the screen.

    Source: NeMo Gym's GUI pointing reward, by a description of it; its code was not found.
    """
    point, centre = _touch(action, step), _centre(step)
    if point is None or centre is None:
        return 0.0
    off = math.dist(_part(point, step), _part(centre, step))
    return max(0.0, 1.0 - off / QUADRATIC_REACH) ** 2


def aitw(action: Action | None, step: Step) -> float:
    """AITW's action matching: whether both would lead to a like screen.

    Two taps: within 0.14 of the screen, or both in one of the screen's boxes, each enlarged by 1.4
    of its sides. Two swipes: the same main axis, in either direction. A gesture is a tap if touch
    and lift are at most 0.04 apart. All else, or beside a gesture: by type, and keys and buttons
    are types; what was typed is not compared.

    Source: google-research/google-research (1d49f2c), android_in_the_wild/action_matching.py,
    `check_actions_match`. It limits an enlarged box's far edges by its height and width, not by the
    screen: so here.
    """
    if action is None:
        return 0.0
    ours, recorded = _gesture(action, step), _gesture(step.action, step)
    if ours is None or recorded is None:
        return float(ours is recorded and _name(action, keys=True) == _name(step.action, keys=True))
    if ours.is_tap != recorded.is_tap:
        return 0.0
    if not ours.is_tap:
        return float(ours.main_axis == recorded.main_axis)
    boxes = step.elements if step.box is None else (*step.elements, step.box)
    near = math.dist(ours.touch, recorded.touch) <= TAP_REACH
    return float(near or any(_both_in(box, step, ours, recorded) for box in boxes))


def text_f1(action: Action | None, step: Step) -> float:
    """F1 of the words typed and recorded, in lower case; 0 unless both type, or both answer.

    A word counts as often as it stands there. GUI-R1's code takes sets, and full marks for a single
    word that is a part of the other: "a" for "banana". Not so here.

    Source: SQuAD's F1 (arXiv:1606.05250, section 6.1); GUI-R1 (arXiv:2504.10458, section 3.3).
    """
    texts = _texts(action, step)
    if texts is None:
        return 0.0
    ours, recorded = (collections.Counter(text.split()) for text in texts)
    if not ours or not recorded:
        return float(ours == recorded)
    common = (ours & recorded).total()
    return 2 * common / (ours.total() + recorded.total())


def text_similarity(action: Action | None, step: Step) -> float:
    """1 - edits / length of the longer text, in lower case and without blanks at the ends.

    Source: the normalised Levenshtein similarity of ANLS (arXiv:1905.13648, section 3), without its
    threshold, as GUI-Odyssey compares texts (arXiv:2406.08451).
    """
    texts = _texts(action, step)
    if texts is None:
        return 0.0
    longer = max(map(len, texts))
    return 1.0 if not longer else 1.0 - edits(*texts) / longer


def match(action: Action | None, step: Step) -> float:
    """The action is right: what success of a recorded step means, and what moves a walk on.

    The type is, and so is: of a touch its place, in the box, or without one within AITW's 0.14; of
    a scroll or drag its direction; of keys which they are; of a text its F1, at least 0.5.

    Source: the accuracy reward of GUI-R1, with AITW's reach where no box is recorded.
    """
    recorded = step.action
    if action is None or _name(action, keys=True) != _name(recorded, keys=True):
        return 0.0
    if recorded.kind in TOUCHES:
        if step.box is not None:
            return point_in_box(action, step)
        point, centre = _touch(action, step), _centre(step)
        assert point is not None and centre is not None  # both are touches
        return float(math.dist(_part(point, step), _part(centre, step)) <= TAP_REACH)
    if recorded.kind in ("scroll", "drag"):
        return float(direction(action) == direction(recorded))
    if recorded.kind in TEXTS:
        return float(text_f1(action, step) >= SAME_TEXT_F1)
    return 1.0


COMPLETION = "completion"  # of an episode, not of a step: the whole row was walked
RULES: Mapping[str, Rule] = {
    "form": form,
    "type": type_,
    "match": match,
    "point_in_box": point_in_box,
    "distance": distance,
    "gaussian": gaussian,
    "coverage": coverage,
    "quadratic": quadratic,
    "aitw": aitw,
    "text_f1": text_f1,
    "text_similarity": text_similarity,
}
NAMES = (*RULES, COMPLETION)


def parts(action: Action | None, step: Step) -> dict[str, float]:
    """Every rule's value by its name, `completion` left out."""
    return {name: rule(action, step) for name, rule in RULES.items()}


def direction(action: Action) -> str:
    """Where a scroll goes; of a drag: where a scroll with the like effect goes, which is the other
    way than the finger (a finger that moves up shows what is further down)."""
    if action.kind != "drag":
        return action.direction or ""
    assert action.x is not None and action.x2 is not None  # of every valid drag
    assert action.y is not None and action.y2 is not None
    right_px, down_px = action.x2 - action.x, action.y2 - action.y
    if abs(right_px) > abs(down_px):
        return "left" if right_px > 0 else "right"
    return "up" if down_px > 0 else "down"


def edits(one: str, other: str) -> int:
    """Levenshtein's distance: characters to insert, delete or replace.

    A column of the table as two integers of len(one) bits, so that two texts of 4,096 characters
    take milliseconds. Source: H. Hyyrö, "A bit-vector algorithm for computing Levenshtein and
    Damerau edit distances", 2003, figure 2.
    """
    if not one or not other:
        return len(one) + len(other)
    places: dict[str, int] = collections.defaultdict(int)
    for place, character in enumerate(one):
        places[character] |= 1 << place
    last, full = 1 << (len(one) - 1), (1 << len(one)) - 1
    more, less, count = full, 0, len(one)  # vertical steps of +1 and of -1
    for character in other:
        equal = places.get(character, 0)
        across = (((equal & more) + more) ^ more) | equal | less
        up, down = less | ~(across | more) & full, more & across
        count += bool(up & last) - bool(down & last)
        up, down = (up << 1 | 1) & full, down << 1 & full
        more, less = down | ~(across | up) & full, up & across
    return count


def _name(action: Action, *, keys: bool = False) -> str:
    """The kind of an action, with what makes kinds of their own. Args: keys: which keys do too."""
    if action.kind in ("scroll", "drag"):
        return "scroll"
    word = ""
    if action.kind in ("system_button", "terminate"):
        word = action.text or ""
    elif keys and action.kind == "keys":
        *modifiers, key = (action.keys or "").split("+")
        word = "+".join([*sorted(modifiers), key])  # ctrl+shift+t is shift+ctrl+t
    return f"{action.kind} {word}"


def _touch(action: Action | None, step: Step) -> tuple[float, float] | None:
    """Where a touch is, on a step that records one."""
    if action is None or action.kind not in TOUCHES or step.action.kind not in TOUCHES:
        return None
    assert action.x is not None and action.y is not None  # of every valid touch
    return action.x, action.y


def _centre(step: Step) -> tuple[float, float] | None:
    return step.box.centre if step.box is not None else _touch(step.action, step)


def _spread(action: Action | None, step: Step) -> float:
    """dx^2 / sx^2 + dy^2 / sy^2, s half a side of the box; inf without a touch or a box."""
    point, box = _touch(action, step), step.box
    if point is None or box is None or not (box.right > box.left and box.bottom > box.top):
        return math.inf
    x, y = box.centre
    sigma_x, sigma_y = (box.right - box.left) / 2, (box.bottom - box.top) / 2
    return ((point[0] - x) / sigma_x) ** 2 + ((point[1] - y) / sigma_y) ** 2


def _part(point: tuple[float, float], step: Step) -> tuple[float, float]:
    return point[0] / step.width_px, point[1] / step.height_px


def _texts(action: Action | None, step: Step) -> tuple[str, str] | None:
    recorded = step.action
    if action is None or action.kind not in TEXTS or action.kind != recorded.kind:
        return None
    ours, theirs = (
        (one.text or "")[:MAX_COMPARED_CHARS].lower().strip() for one in (action, recorded)
    )
    return ours, theirs


def _gesture(action: Action, step: Step) -> _Gesture | None:
    """AITW's dual point; of a scroll a swipe along its axis. None: not a gesture."""
    if action.kind in TOUCHES or action.kind == "drag":
        assert action.x is not None and action.y is not None  # of every valid one
        x, y = _part((action.x, action.y), step)
        if action.kind != "drag":
            return _Gesture((y, x), (y, x))
        assert action.x2 is not None and action.y2 is not None
        x2, y2 = _part((action.x2, action.y2), step)
        return _Gesture((y, x), (y2, x2))
    if action.kind == "scroll":
        vertical = action.direction in ("up", "down")
        return _Gesture((0.5, 0.5), (0.0, 0.5) if vertical else (0.5, 0.0))
    return None


def _both_in(box: Box, step: Step, *gestures: _Gesture) -> bool:
    """Whether all touch the enlarged box. As AITW: half the growth on the near sides, no further
    than the screen; then height and width of 2.4 times, at most the screen's."""
    left, top = _part((box.left, box.top), step)
    right, bottom = _part((box.right, box.bottom), step)
    width, height = right - left, bottom - top
    left, top = max(0.0, left - BOX_GROWTH * width / 2), max(0.0, top - BOX_GROWTH * height / 2)
    right = left + min(1.0, width + BOX_GROWTH * width)
    bottom = top + min(1.0, height + BOX_GROWTH * height)
    return all(left <= g.touch[1] <= right and top <= g.touch[0] <= bottom for g in gestures)
