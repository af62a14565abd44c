import pytest

from sharpness.data.examples import choose


def test_choosing():
    assert choose(5) == [0, 1, 2, 3, 4]
    assert choose(5, 2) == [0, 1]
    some = choose(100, 10, seed=1)
    assert some == choose(100, 10, seed=1) != choose(100, 10, seed=2)
    assert len(set(some)) == 10
    assert choose(100, 20, seed=1)[:10] == some  # a larger choice holds the smaller one
    with pytest.raises(ValueError, match="6 examples were asked for, but there are 5"):
        choose(5, 6)
