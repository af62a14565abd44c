import numpy as np

from reproduction.plots import plot_ablations


def test_a_relaxation_has_its_own_figure(tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {"checkpoint": f"m{i}", "kind": "fit", "train_error": 0.1, "test_error": 0.1 + rng.uniform()} for i in range(5)
    ]
    for switch in ({}, {"geodesic": "first-order"}, {"relaxation": 0.1}, {"relaxation": 0.3}):
        rows += [
            {"checkpoint": f"m{i}", "kind": "sharpness", "measure": "geodesic-inv", "ablation": switch, "rho": 0.1,
             "sharpness": rng.uniform()}
            for i in range(5)
        ]  # fmt: skip
    drawn = plot_ablations(rows, "gap", tmp_path, prefix="study_")
    assert [p.name for p in drawn] == ["study_ablations.png", "study_relaxation.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in drawn)
    assert plot_ablations([r for r in rows if not r.get("ablation")], "gap", tmp_path) == []
