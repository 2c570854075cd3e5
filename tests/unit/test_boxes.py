"""Boxes: folding, spreading and joining, by hand."""

from __future__ import annotations

import numpy as np

from kvferry.engine.boxes import Box, Fragments, fold, join, spread


def test_fold_takes_the_longest_run_of_both_sides() -> None:
    assert fold(2, [(4, 16, 16), (8, 2, 2)]) == (64, ())
    assert fold(2, [(4, 16, 20), (8, 2, 2)]) == (16, ((4, 16, 20),))
    assert fold(2, [(8, 2, 2), (4, 16, 16), (3, 64, 100), (1, 999, 0)]) == (64, ((3, 64, 100),))
    assert fold(2, [(4, 16, 64), (2, 64, 16), (8, 2, 2)]) == (16, ((2, 64, 16), (4, 16, 64)))


def test_spread_lists_the_last_axis_fastest() -> None:
    assert spread([(2, 100), (3, 10)]).tolist() == [0, 10, 20, 100, 110, 120]
    assert spread([]).tolist() == [0]


def test_a_box_lists_its_fragments_on_both_sides() -> None:
    box = Box(5, 7, *fold(2, [(4, 16, 64), (2, 64, 16), (8, 2, 2)]))
    assert (box.count, box.bytes) == (8, 128)
    fragments = box.fragments()
    assert fragments.source.tolist() == [5, 21, 37, 53, 69, 85, 101, 117]
    assert fragments.target.tolist() == [7, 71, 135, 199, 23, 87, 151, 215]
    assert fragments.lengths.tolist() == [16] * 8


def test_join_needs_both_sides_to_touch() -> None:
    source = np.array([20, 0, 10, 30])
    target = np.array([120, 100, 110, 140])
    alike = np.zeros(4, dtype=np.int64)
    joined = join([Fragments(source, target, np.full(4, 10), alike, alike)])
    assert [array.tolist() for array in joined[:3]] == [[0, 30], [100, 140], [30, 10]]
