import json

import pytest

from sharpness.comparison import compare
from sharpness.rows import read_results, write_results
from sharpness.tables import formatted
from tests.studies import study


def test_rows_survive_a_csv(tmp_path):
    rows = study()
    write_results(tmp_path / "r.csv", rows)
    write_results(tmp_path / "results.jsonl", rows)
    one, two = (compare(read_results(p), resamples=20) for p in (tmp_path / "r.csv", tmp_path))
    assert formatted(one) == formatted(two)
    back = read_results(tmp_path / "r.csv")
    assert [r["checkpoint"] for r in back] == [r["checkpoint"] for r in rows]
    assert back[2]["ablation"] == {}
    assert back[2]["sharpness"] == pytest.approx(rows[2]["sharpness"], rel=1e-7)
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="holds no results"):
        read_results(tmp_path / "bad.csv")
    with pytest.raises(FileNotFoundError, match="no results at"):
        read_results(tmp_path / "none")


def test_the_result_of_one_run_is_named(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"command": "sharpness run", "results": []}, indent=2))
    with pytest.raises(ValueError, match="holds no results of a sweep: it is the result of one run, not of a sweep"):
        read_results(path)


def test_json_of_a_row_is_readable(tmp_path):
    write_results(tmp_path / "r.jsonl", study(3))
    assert all(json.loads(line)["kind"] for line in (tmp_path / "r.jsonl").read_text().splitlines())
