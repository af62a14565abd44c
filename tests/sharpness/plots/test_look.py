import subprocess
import sys

import matplotlib
import numpy as np

from sharpness.plots import look


def test_a_users_settings_and_backend_stay():
    code = (
        "import matplotlib, sys; matplotlib.use('svg'); size = matplotlib.rcParams['font.size']\n"
        "from sharpness import Profile, plots\n"
        "plots.plot_profile(Profile('adaptive', (0.0, 1.0), {'first-order': (1.0, 2.0)}, 1.0))\n"
        "assert matplotlib.get_backend() == 'svg' and matplotlib.rcParams['font.size'] == size\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_colours_differ_for_colour_blind_readers():
    def seen(colour, matrix):
        return matrix @ np.array(matplotlib.colors.to_rgb(colour)) ** 2.2

    # Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB.
    blind = {
        "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                       [-0.003882, -0.048116, 1.051998]],
        "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                         [-0.011820, 0.042940, 0.968881]],
    }  # fmt: skip

    def nearest(colours):
        return min(
            np.linalg.norm(seen(a, np.array(m)) - seen(b, np.array(m)))
            for m in blind.values() for i, a in enumerate(colours) for b in colours[:i]
        )  # fmt: skip

    assert nearest(list(look.COLOURS.values())) > 0.15
    assert nearest(["#ff0000", "#806000", "#00ff00"]) < nearest(list(look.COLOURS.values()))
    assert len(set(look.MARKERS.values())) == len(look.COLOURS)
