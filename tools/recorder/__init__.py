"""The recorder's parts: what a person's gesture means, the episode it is part of, the page."""
