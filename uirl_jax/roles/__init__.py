"""The roles of a run, a file each: what a process does once its config was checked.

`main` parses the command line and calls one of them; `run` builds the objects that they need.
"""
