"""Small models with random weights and trained tokenizers, one architecture for each family.

`tools.make_base_model` is the command; `tools.make_page_model`, the tests and
`examples/own_model/` take models from here, too.
"""
