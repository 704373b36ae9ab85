"""A list of groceries: tick the named items, then press Order. The screen is page.html."""

from uirl_jax.types import Action
from uirl_jax.verifiers import own_tasks

ITEMS = ("bread", "butter", "cheese", "eggs", "flour", "milk", "rice", "salt")


class Task(own_tasks.PageTask):
    variants = {"items": ("1", "2", "3")}  # how many items are named

    def __init__(self, rng, options):
        self.width_px, self.height_px = 320, 240
        shown = [ITEMS[i] for i in rng.permutation(len(ITEMS))[:5]]
        self.wanted = shown[: options.get("items", 2)]
        self.data = sorted(shown)
        self.instruction = f"Tick {', '.join(self.wanted)} and press Order."

    def progress(self, state):
        right = len(set(state["ticked"]) & set(self.wanted))
        wrong = len(state["ticked"]) - right
        success = right == len(self.wanted) and wrong == 0
        reward = float(success) if state["ordered"] else None
        return {"right": right, "wrong": wrong, "done": state["ordered"], "reward": reward}

    def script(self, state, rng, wrong):
        missing = [item for item in self.wanted if item not in state["ticked"]]
        x, y = state["positions"]["Order" if wrong or not missing else missing[0]]
        return Action("click", x=round(x), y=round(y))
