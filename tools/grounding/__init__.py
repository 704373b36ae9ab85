"""Screens of real web components with the boxes of what can be clicked (tools.make_grounding_data).

`pages` and `themes` compose pages, `libraries` fetches style sheets, `sources` says which screen
comes from where, `browser` draws it and reads its boxes (`read_page.js`), `questions` writes the
instructions, and `dataset` the files.
"""
