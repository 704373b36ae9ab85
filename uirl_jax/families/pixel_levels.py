"""Values of pixels as transformers gives them to a model: a table over the 256 levels."""

from typing import Protocol

import numpy as np

Three = tuple[float, float, float]


class Normalisation(Protocol):
    """What is read here of a family's image settings."""

    @property
    def rescale_factor(self) -> float: ...

    @property
    def image_mean(self) -> Three: ...

    @property
    def image_std(self) -> Three: ...


def level_values(images: Normalisation) -> np.ndarray:
    """float32[3,256], the normalised value of every level of a channel."""
    # Rescaled in float64 and normalised in float32, as in the reference.
    level_l = (np.arange(256, dtype=np.float64) * images.rescale_factor).astype(np.float32)
    mean_c = np.array(images.image_mean, np.float32)
    std_c = np.array(images.image_std, np.float32)
    return (level_l[None] - mean_c[:, None]) / std_c[:, None]
