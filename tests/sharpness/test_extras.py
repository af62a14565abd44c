import sys

import pytest

from sharpness import Profile, plots


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'quotient-manifolds\[plot\]'"):
        plots.plot_profile(Profile("adaptive", (0.0, 1.0), {"first-order": (1.0, 2.0)}, 1.0))
