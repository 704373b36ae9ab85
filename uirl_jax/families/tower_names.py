"""Names of tensors where a vision tower, a projector and a language model stand side by side.

Three layouts come to the first, that of the published files:

    language_model.model.layers.0...   vision_tower.vision_model.encoder...   published
    model.language_model.layers.0...   model.vision_tower.vision_model...     transformers 4.52
    model.language_model.layers.0...   model.vision_tower.encoder...          transformers 5

transformers 5 saves without `model.`, and a model that it made without `vision_model.`, too.
"""

import re

TOWER = "vision_tower.vision_model"
PROJECTOR = "multi_modal_projector"
TEXT = "language_model.model"
HEAD = "language_model.lm_head"


def published_name(name: str) -> str | None:
    """A tensor's name in the published layout; None: a buffer."""
    if name.endswith(("rotary_emb.inv_freq", "embeddings.position_ids")):
        return None
    name = re.sub(r"^lm_head\b", HEAD, name)
    name = re.sub(r"^model\.language_model\.", f"{TEXT}.", name)
    name = re.sub(rf"^model\.(vision_tower|{PROJECTOR})\.", r"\1.", name)
    return re.sub(r"^vision_tower\.(?!vision_model\.)", f"{TOWER}.", name)


def current_name(published: str) -> str:
    """The reverse of published_name, for transformers 5."""
    name = re.sub(rf"^{re.escape(HEAD)}\b", "lm_head", published)
    name = re.sub(rf"^{re.escape(TEXT)}\.", "model.language_model.", name)
    name = re.sub(rf"^{re.escape(TOWER)}\.", "model.vision_tower.", name)
    return re.sub(rf"^{PROJECTOR}\.", f"model.{PROJECTOR}.", name)
