"""A thermostat: press + or - until it shows the named temperature, then OK. Drawn with Pillow."""

from PIL import Image, ImageDraw, ImageFont

from uirl_jax.types import Action
from uirl_jax.verifiers import own_tasks

BOXES = {"-": (12, 92, 68, 132), "+": (84, 92, 140, 132), "OK": (156, 92, 212, 132)}


class Task(own_tasks.DrawnTask):
    variants = {"most": ("1", "3", "6")}  # largest number of presses needed

    def __init__(self, rng, options):
        self.width_px, self.height_px = 224, 168
        self.degrees, self.presses, self.done = 20, 0, False
        self.wanted = self.degrees + int(rng.integers(1, options.get("most", 3) + 1))
        self.instruction = f"Set the thermostat to {self.wanted} degrees and press OK."

    def draw(self):
        image = Image.new("RGB", (self.width_px, self.height_px), (232, 235, 240))
        draw = ImageDraw.Draw(image)
        texts = {name: (box, name) for name, box in BOXES.items()}
        texts["display"] = ((12, 20, 212, 72), f"{self.degrees} degrees")
        for (x0, y0, x1, y1), text in texts.values():
            draw.rectangle((x0, y0, x1, y1), fill=(255, 255, 255), outline=(70, 70, 70))
            middle = ((x0 + x1) // 2, (y0 + y1) // 2)
            draw.text(middle, text, fill=0, font=ImageFont.load_default(18), anchor="mm")
        return image

    def act(self, action):
        if action.kind != "click":
            return
        for name, (x0, y0, x1, y1) in BOXES.items():
            if x0 <= action.x <= x1 and y0 <= action.y <= y1:
                self.presses += 1
                self.degrees += {"+": 1, "-": -1, "OK": 0}[name]
                self.done = name == "OK"

    def progress(self):
        reward = float(self.degrees == self.wanted) if self.done else None
        return {"presses": self.presses, "done": self.done, "reward": reward}

    def script(self, rng, wrong):
        name = "OK" if wrong or self.degrees == self.wanted else "+"
        x0, y0, x1, y1 = BOXES[name]
        return Action("click", x=(x0 + x1) // 2, y=(y0 + y1) // 2)
