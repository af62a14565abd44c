import pytest

from sharpness.data.examples import Examples


def test_choosing():
    assert Examples(5, list).choose() == [0, 1, 2, 3, 4]
    assert Examples(5, list).choose(2) == [0, 1]
    some = Examples(100, list).choose(10, seed=1)
    assert some == Examples(100, list).choose(10, seed=1) != Examples(100, list).choose(10, seed=2)
    assert len(set(some)) == 10
    assert Examples(100, list).choose(20, seed=1)[:10] == some  # a larger choice holds the smaller one
    with pytest.raises(ValueError, match="6 examples were asked for, but there are 5"):
        Examples(5, list).choose(6)
