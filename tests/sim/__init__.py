"""Deterministic simulation of whole engines: `python -m tests.sim --seeds N [--start S]`.

Real engine code (driver, control, machines, I/O worker) runs on a seeded virtual-clock loop over
a simulated network, host and memory. Two rules: everything that could differ between two runs
comes from the seed, and the checkers know nothing of the engine's code.
"""
