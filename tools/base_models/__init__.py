"""Small models with random weights and trained tokenizers, one architecture each family.

`tools.make_base_model` is the command; the tests and tools.make_page_model take models from here.
"""
