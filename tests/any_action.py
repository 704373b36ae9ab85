"""A hypothesis strategy for valid actions."""

from hypothesis import strategies as st

from uirl_jax import actions
from uirl_jax.types import Action


def any_action(width_px: int, height_px: int) -> st.SearchStrategy[Action]:
    x, y = st.integers(0, width_px - 1), st.integers(0, height_px - 1)
    seconds = st.integers(0, 60_000).map(lambda ms: ms / 1000)
    typeable = st.text(st.characters(exclude_categories=("Cs", "Cc")) | st.sampled_from('\n\t"\\'))
    prefixes = st.lists(st.sampled_from(sorted(actions.MODIFIERS)), unique=True, max_size=3)
    last = st.sampled_from(
        sorted((actions.NAMED_KEYS | actions.CHARACTER_KEYS) - actions.MODIFIERS)
    )
    keys = st.builds(lambda names, key: "+".join([*names, key]), prefixes, last)
    scroll = {"direction": st.sampled_from(actions.DIRECTIONS), "amount": st.integers(1, 10_000)}
    pointing = st.sampled_from(
        ["click", "double_click", "triple_click", "right_click", "middle_click", "move"]
    )
    return st.one_of(
        st.builds(Action, pointing, x=x, y=y),
        st.builds(Action, st.just("long_press"), x=x, y=y, seconds=st.none() | seconds),
        st.builds(Action, st.just("drag"), x=x, y=y, x2=x, y2=y),
        st.builds(Action, st.just("type"), text=typeable),
        st.builds(Action, st.just("keys"), keys=keys),
        st.builds(Action, st.just("scroll"), **scroll),
        st.builds(Action, st.just("scroll"), x=x, y=y, **scroll),
        st.builds(Action, st.just("wait"), seconds=seconds),
        st.just(Action("navigate_back")),
        st.builds(Action, st.just("system_button"), text=st.sampled_from(["home", "menu"])),
        st.builds(Action, st.just("answer"), text=typeable),
        st.builds(Action, st.just("terminate"), text=st.sampled_from(actions.STATUSES)),
    )
