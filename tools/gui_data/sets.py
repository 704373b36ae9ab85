"""The kinds of sources, and what reads each."""

from collections.abc import Callable, Iterator

from tools.gui_data import (
    aitw,
    android_control,
    gui_r1,
    jsonl,
    odyssey,
    own_screens,
    screenspot,
    seeclick,
    ui_r1,
)
from tools.gui_data.source import Draft, Source
from uirl_jax.errors import ConfigError

READERS: dict[str, Callable[[Source], Iterator[Draft]]] = {
    "jsonl": jsonl.read,
    "grounding": own_screens.read,
    "aitw": aitw.read,
    "android_control": android_control.read,
    "gui_odyssey": odyssey.read,
    "screenspot": screenspot.read,
    "screenspot_v2": screenspot.read_v2,
    "screenspot_pro": screenspot.read_pro,
    "seeclick": seeclick.read,
    "rico": seeclick.read,  # widget captions and RICOSCA are lists of the same release
    "gui_r1": gui_r1.read,
    "ui_r1": ui_r1.read,
}
# What else may be given with a source of the kind.
WITH_SPLITS = ("aitw", "android_control", "gui_odyssey")
WITH_IMAGES = (
    *("jsonl", "gui_odyssey", "screenspot", "screenspot_v2", "screenspot_pro"),
    *("seeclick", "rico", "ui_r1"),
)
DEMO, ONLINE = "demo", "mobileagent_bench"
KINDS = (DEMO, *READERS, ONLINE)


def refuse_unread(kind: str, *, has_images: bool, has_splits: bool) -> None:
    """Raises ConfigError for a flag that a source of this kind does not read."""
    for flag, is_given, kinds in (
        ("images", has_images, WITH_IMAGES),
        ("splits", has_splits, WITH_SPLITS),
    ):
        if is_given and kind not in kinds:
            raise ConfigError(
                f"--{flag}: --kind={kind} does not read it; those that do: {', '.join(kinds)}"
            )


def refuse_online(kind: str) -> None:
    """Raises ConfigError for a benchmark that is played, and has no recorded screens.

    Source: MobileAgentBench/mobile-agent-bench, README.md.
    """
    if kind == ONLINE:
        raise ConfigError(
            "MobileAgentBench has no recorded screens: it is 100 tasks to be played online in 10 "
            "apps of SimpleMobileTools; that needs an Android emulator with these apps, adb and a "
            "verifier server in front of them (docs/verifiers.md)"
        )
