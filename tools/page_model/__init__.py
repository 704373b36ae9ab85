"""How a small model learns to read small pages; `tools.make_page_model` is the command.

`drawn_pages` draws pages (`drawn_text`, `dense_drawing`), `screen_pages` takes them from Chromium's
screens, `page_questions` asks about them; `page_sight` teaches the vision tower alone,
`page_pointing` the whole model to find what is named, `page_answers` writes the answers in the
model's action format, and `module_training` is the loop.
"""
