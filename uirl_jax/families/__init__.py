"""The border to a model family: `border` says what one gives, `table` lists them."""
