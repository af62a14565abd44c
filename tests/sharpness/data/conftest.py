"""A folder of pictures and tables."""

import numpy as np
import pytest

from tests.pictures import png


@pytest.fixture
def folder(tmp_path, pictures):
    for name, pixels in pictures.items():
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(pixels))
    return tmp_path / "images"


@pytest.fixture
def pictures():
    rng = np.random.default_rng(0)
    return {f"{c}/{i}.png": rng.integers(0, 256, (6, 4, 3), dtype=np.uint8) for c in ("dog", "cat") for i in range(3)}
