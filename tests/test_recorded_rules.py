"""The rules of recorded steps, each against an example by hand and against another formulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recorded_rows import BOX, SIZE, click, step
from uirl_jax.types import Action
from uirl_jax.verifiers.recorded import rules
from uirl_jax.verifiers.recorded.row import Box


def at(x, y, kind="click"):
    return Action(kind, x=x, y=y)


def drag(x, y, x2, y2):
    return Action("drag", x=x, y=y, x2=x2, y2=y2)


def scroll(direction):
    return Action("scroll", direction=direction, amount=300)


@pytest.mark.parametrize("name", rules.RULES)
def test_no_rule_pays_for_text_that_was_no_action(name):
    assert rules.RULES[name](None, click()) == 0.0


@pytest.mark.parametrize(
    ("action", "recorded", "same"),
    [
        (at(0, 0), at(5, 5), True),
        (at(0, 0), at(5, 5, "long_press"), False),
        (drag(0, 0, 9, 9), scroll("up"), True),
        (Action("system_button", text="home"), Action("system_button", text="home"), True),
        (Action("system_button", text="home"), Action("system_button", text="menu"), False),
        (Action("terminate", text="success"), Action("terminate", text="failure"), False),
        (Action("keys", keys="enter"), Action("keys", keys="tab"), True),
        (Action("answer", text="5"), Action("type", text="5"), False),
    ],
)
def test_types_are_the_same_by_kind_button_and_end(action, recorded, same):
    assert rules.type_(action, step(recorded)) == float(same)


@pytest.mark.parametrize(("x", "y", "hit"), [(20, 40, 1), (60, 80, 1), (61, 80, 0), (19, 60, 0)])
def test_a_point_on_an_edge_is_in_the_box(x, y, hit):
    assert rules.point_in_box(at(x, y), click()) == hit
    assert rules.point_in_box(at(x, y), click(box=None)) == 0.0


def test_only_touches_are_placed():
    for action in (at(40, 60, "move"), drag(40, 60, 41, 61), scroll("up")):
        for name in ("point_in_box", "distance", "gaussian", "coverage", "quadratic"):
            assert rules.RULES[name](action, click()) == 0.0
    assert rules.point_in_box(at(40, 60, "long_press"), click()) == 1.0


def test_distance_is_gui_r1s_box_or_without_one_140_pixels():
    wide = click(200, 200, None, size=(600, 600))
    assert rules.distance(at(200, 339), wide) == 1.0
    assert rules.distance(at(200, 340), wide) == 0.0  # below 140, not at
    long_box = click(box=Box(0, 0, 500, 10), size=(600, 600))
    assert rules.distance(at(499, 9), long_box) == 1.0  # in the box, 249 from its centre
    assert rules.distance(at(500, 9), long_box) == rules.distance(at(499, 10), long_box) == 0.0
    assert rules.distance(at(250, 11), long_box) == 0.0  # beside the box, 6 from its centre


def test_gaussian_is_e_to_the_minus_half_at_an_edge():
    assert rules.gaussian(at(40, 60), click()) == 1.0
    assert rules.gaussian(at(60, 60), click()) == pytest.approx(0.60653, abs=1e-5)  # one sigma
    assert rules.gaussian(at(60, 80), click()) == pytest.approx(0.36788, abs=1e-5)  # in both
    assert rules.gaussian(at(40, 60), click(box=Box(40, 60, 40, 90))) == 0.0  # no width


@given(st.integers(0, 99), st.integers(0, 199))
def test_coverage_is_the_bhattacharyya_coefficient_of_both_gaussians(x, y):
    """The formula in full, with covariances, as GUI-G2 writes it."""
    found = rules.coverage(at(x, y), click())
    ours = theirs = np.diag([20.0**2, 20.0**2])
    mean = (ours + theirs) / 2
    off = np.array([x - 40.0, y - 60.0])
    far = off @ np.linalg.inv(mean) @ off / 8 + 0.5 * math.log(
        np.linalg.det(mean) / math.sqrt(np.linalg.det(ours) * np.linalg.det(theirs))
    )
    assert found == pytest.approx(math.exp(-far), rel=1e-9)


def test_quadratic_falls_to_0_at_15_hundredths_of_the_screen():
    assert rules.quadratic(at(40, 60), click()) == 1.0
    assert rules.quadratic(at(40, 75), click()) == pytest.approx(0.25)  # 0.075: (1 - 1/2)^2
    assert rules.quadratic(at(55, 60), click()) == pytest.approx(0.0)
    assert rules.quadratic(at(99, 199), click()) == 0.0


def published_matching(touch, lift, kind, touch2, lift2, kind2, boxes):
    """AITW's check_actions_match in numpy: y before x, boxes y, x, height, width; kind 4 is a dual
    point."""
    if kind != 4 or kind2 != 4:
        return kind == kind2
    taps = [np.linalg.norm(np.subtract(*pair)) <= 0.04 for pair in ((touch, lift), (touch2, lift2))]
    if taps[0] != taps[1]:
        return False
    if not taps[0]:
        one, two = np.abs(np.subtract(lift, touch)), np.abs(np.subtract(lift2, touch2))
        return np.argmax(one) == np.argmax(two)
    near = np.linalg.norm(np.subtract(touch, touch2)) <= 0.14
    for y, x, height, width in boxes:
        top, left = max(0, y - 1.4 * height / 2), max(0, x - 1.4 * width / 2)
        high, wide = min(1, height * 2.4), min(1, width * 2.4)
        if all(top <= p[0] <= top + high and left <= p[1] <= left + wide for p in (touch, touch2)):
            return True
    return bool(near)


def test_aitw_agrees_with_the_published_matching_on_gestures():
    """1,000 pairs, of which many match and many do not."""
    rng, matched = np.random.default_rng(0), 0
    for _ in range(1000):
        gestures, dual = [], []
        for _ in range(2):
            x, y = int(rng.integers(100)), int(rng.integers(200))
            reach = int(rng.choice([0, 3, 60]))
            x2 = int(np.clip(x + rng.integers(-reach, reach + 1), 0, 99))
            y2 = int(np.clip(y + rng.integers(-reach, reach + 1), 0, 199))
            gestures.append(drag(x, y, x2, y2))
            dual += [(y / 200, x / 100), (y2 / 200, x2 / 100)]
        left, top = rng.integers(80), rng.integers(160)
        box = Box(int(left), int(top), int(left) + 12, int(top) + 24)
        boxes = [(box.top / 200, box.left / 100, 24 / 200, 12 / 100)]
        found = rules.aitw(gestures[0], step(gestures[1], elements=[box]))
        expected = published_matching(dual[0], dual[1], 4, dual[2], dual[3], 4, boxes)
        assert found == float(expected)
        matched += expected
    assert 50 < matched < 950


@pytest.mark.parametrize(
    ("action", "recorded", "matches"),
    [
        (at(40, 60), at(54, 60), True),  # 0.14 across
        (at(40, 60), at(55, 60), False),
        (at(40, 60), at(40, 88), True),  # 0.14 down
        (at(40, 60, "long_press"), at(40, 60), True),  # both are taps
        (drag(50, 150, 50, 50), scroll("up"), True),  # the axis alone counts
        (drag(50, 150, 50, 143), at(50, 150), True),  # 0.035: a tap
        (drag(50, 150, 50, 141), at(50, 150), False),  # 0.045: a swipe
        (Action("navigate_back"), at(40, 60), False),
        (Action("navigate_back"), Action("navigate_back"), True),
        (Action("type", text="a"), Action("type", text="b"), True),  # by type
        (Action("keys", keys="enter"), Action("keys", keys="tab"), False),
        (Action("terminate", text="success"), Action("terminate", text="failure"), False),
    ],
)
def test_aitw_by_hand(action, recorded, matches):
    assert rules.aitw(action, step(recorded)) == float(matches)


def test_aitw_takes_taps_in_one_box_enlarged_to_24_tenths():
    element = Box(0, 0, 20, 20)  # grows to 48 across, from the edge of the screen
    recorded = step(at(2, 2), elements=[element])
    assert rules.aitw(at(48, 2), recorded) == 1.0
    assert rules.aitw(at(49, 2), recorded) == 0.0


@pytest.mark.parametrize(
    ("ours", "recorded", "f1"),
    [
        ("Musk", "musk", 1.0),
        ("elon musk", "Musk", 2 / 3),
        ("a", "banana", 0.0),
        ("no no no", "no", 0.5),
        ("", "x", 0.0),
        ("", "", 1.0),
    ],
)
def test_text_f1_counts_words(ours, recorded, f1):
    recorded_step = step(Action("type", text=recorded))
    assert rules.text_f1(Action("type", text=ours), recorded_step) == pytest.approx(f1)
    assert rules.text_f1(Action("answer", text=ours), recorded_step) == 0.0


def test_text_similarity_of_kitten_and_sitting_is_4_of_7():
    found = rules.text_similarity(
        Action("type", text="Kitten "), step(Action("type", text="sitting"))
    )
    assert found == pytest.approx(4 / 7)
    assert rules.text_similarity(at(1, 1), step(Action("type", text=""))) == 0.0


@given(st.text("ab", max_size=9), st.text("abc", max_size=9))
def test_edits_are_those_of_the_table(one, other):
    table = np.zeros((len(one) + 1, len(other) + 1), int)
    table[:, 0], table[0] = np.arange(len(one) + 1), np.arange(len(other) + 1)
    for i in range(1, len(one) + 1):
        for j in range(1, len(other) + 1):
            replaced = table[i - 1, j - 1] + (one[i - 1] != other[j - 1])
            table[i, j] = min(replaced, table[i - 1, j] + 1, table[i, j - 1] + 1)
    assert rules.edits(one, other) == table[-1, -1]


def test_texts_as_long_as_may_be_are_compared_quickly():
    assert rules.edits("a" * 4096, "b" * 4095) == 4096


@pytest.mark.parametrize(
    ("action", "recorded", "right"),
    [
        (at(25, 45), click(), True),
        (at(10, 45), click(), False),
        (at(54, 60), click(box=None), True),  # AITW's reach where there is no box
        (at(40, 60, "double_click"), click(), False),
        (scroll("down"), step(scroll("down")), True),
        (drag(50, 150, 50, 50), step(scroll("down")), True),  # the finger goes up
        (drag(50, 150, 50, 50), step(scroll("up")), False),
        (drag(80, 100, 20, 99), step(scroll("right")), True),
        (Action("type", text="elon musk"), step(Action("type", text="Musk")), True),
        (Action("type", text="a b c d"), step(Action("type", text="a")), False),
        (Action("keys", keys="tab"), step(Action("keys", keys="enter")), False),
        (Action("terminate", text="success"), click(), False),  # a claim is worth nothing
        (Action("wait", seconds=1.0), step(Action("wait", seconds=2.0)), True),
    ],
)
def test_match_by_hand(action, recorded, right):
    assert rules.match(action, recorded) == float(right)


@given(st.data())
def test_every_part_is_from_0_to_1(data):
    x, y = st.integers(0, SIZE[0] - 1), st.integers(0, SIZE[1] - 1)
    any_action = st.one_of(
        st.builds(at, x, y, st.sampled_from(sorted(rules.TOUCHES | {"move"}))),
        st.builds(drag, x, y, x, y),
        st.builds(scroll, st.sampled_from(["up", "left"])),
        st.builds(lambda text: Action("type", text=text), st.text(max_size=20)),
        st.builds(lambda text: Action("terminate", text=text), st.sampled_from(["success"])),
        st.none(),
    )
    action, recorded = data.draw(any_action), data.draw(any_action.filter(bool))
    box = data.draw(st.none() | st.just(BOX))
    found = rules.parts(action, step(recorded, box, image=b""))
    assert set(found) == set(rules.RULES)
    assert all(0.0 <= value <= 1.0 for value in found.values())
    same = rules.parts(recorded, step(recorded, image=b""))
    assert same["match"] == same["aitw"] == same["type"] == 1.0 or recorded.kind == "move"
