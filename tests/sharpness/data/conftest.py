"""A folder of pictures and tables."""

import pytest

from tests.pictures import png


@pytest.fixture
def folder(tmp_path, pictures):
    for name, pixels in pictures.items():
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(pixels))
    return tmp_path / "images"
