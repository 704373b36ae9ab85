"""Readers of published sets of screens and steps, for `tools.prepare_gui_data`.

`sets` has the table of kinds; a module reads each. `places` converts coordinates, and nothing else
does. `reading`, `pictures`, `tfrecords` and `columns` read files of strangers, within limits.
"""
