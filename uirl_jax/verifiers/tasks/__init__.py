"""The hermetic desktop: `desktop` opens it, `window` is its input side, `drawing` its pixels."""
