"""Ways to move bytes: NIXL, and memory copies in one process.

`worker` drives any of them, `runner` gives it a thread, `transport` puts n of them together.
Nothing is imported here: importing kvferry must not import NIXL.
"""
