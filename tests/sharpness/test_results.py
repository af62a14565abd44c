import pytest

import sharpness
from tests import networks


def test_table_json_and_directions(tmp_path):
    model, batch = networks.vit(), networks.images()
    result = sharpness.evaluate(model, [batch], rho=[0.1, 0.2], steps=2)
    table = str(result).splitlines()
    assert "geodesic-inv sharpness of ViTForImageClassification: 1 batch, power ascent of 2 steps" in table[0]
    assert table[1] == "second-order geodesics"
    assert len([line for line in table if line.split()[0] in ("0.1", "0.2")]) == 2
    result.to_json(tmp_path / "r.json")
    import json

    found = json.loads((tmp_path / "r.json").read_text())
    assert found == result.to_dict()
    assert found["sharpness"]["0.1"] == float(result[0.1])
    assert list(tmp_path.iterdir()) == [tmp_path / "r.json"]
    with pytest.raises(ValueError, match="several radii"):
        result.direction(0)
    with pytest.raises(KeyError, match="no direction for batch 5"):
        result[0.1].direction(5)
    with pytest.raises(KeyError, match="was not measured"):
        result[0.7]
    without = sharpness.evaluate(model, [batch], rho=0.1, steps=2, keep_directions=False)
    with pytest.raises(KeyError, match="keep_directions"):
        without.direction(0)


def test_rows_of_a_dataframe():
    model, batch = networks.vit(), networks.images()
    result = sharpness.evaluate(model, [batch, batch], rho=[0.01, 0.05], progress=False)
    frame = result.to_dataframe()
    assert len(frame) == 4
    assert set(frame.measure) == {"geodesic-inv"}
    assert frame[frame.rho == 0.05].value.tolist() == [b.value for b in result[0.05].batches]
