"""Tests over the source text: what a reader may rely on and no type checker sees.

Each check is a function from one module to its offences, so that it can also be shown a planted
offence: a check that never fails is no check.
"""
