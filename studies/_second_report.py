"""The statistics of ``second_task.py``: partial rank correlations over three collections, judged together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from reproduction.power import draw
from reproduction.statistics import _balanced, _counts, _prepared, _signs, _tau
from sharpness.measures import MEASURES
from sharpness.plots import COLOURS, figure

Array = npt.NDArray[np.float64]
#: The hypothesis: networks that are sharper by this measure lose more by rounding, given the controls.
PRIMARY = ("complete-inv worst large", "rounding")
#: The bits that decide: where pilots lost 0.03 to 0.15 nats.
DECISIVE = {"minilm": 3, "vit": 3, "gpt": 2}
CONTROLS = ("loss", "error")
TARGETS = ("forgetting", "rounding", *(f"rounding to {bits} bits" for bits in (8, 4, 3, 2)))
AXES = ("rate", "decay", "smoothing", "optimizer", "seed")
#: How many networks of each collection there are when the hypothesis is tested, and the level of its interval then: the
#: bounds of O'Brien and Fleming (1979) for two looks, which err in 5 % of studies together.
LOOKS = {24: 0.9948, 48: 0.9520}
#: An interval below it refutes.
SLIGHT = 0.1


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a network's recipe, predictors and targets; targets are increases of the first task's test loss."""
    second = [r for r in row["second"] if r["method"] == "AdamW"]
    own = row["rounding"]["own"]
    return {
        **{k: row[k] for k in ("collection", "number", *AXES, "loss", "error")},
        **row["predictors"],
        "distance moved": float(np.mean([r["distance"] for r in second])),
        "forgetting": float(np.mean([r["loss"] for r in second])) - row["loss"],
        "rounding": own[f"{DECISIVE[row['collection']]} bits"] - row["loss"],
        **{f"rounding to {k}": v - row["loss"] for k, v in own.items() if k.endswith("bits")},
    }


def complete(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Cut the collections to the networks of the last look, the first in their order."""
    numbers = {c: {r["number"] for r in rows if r["collection"] == c} for c in DECISIVE}
    count = min(next(n for n in itertools.count() if n not in known) for known in numbers.values())
    if not (looks := [look for look in LOOKS if look <= count]):
        raise ValueError(f"{count} networks of each collection are complete; the first look is at {min(LOOKS)}")
    return [r for r in rows if r["number"] < max(looks)]


def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, pd.DataFrame]:
    """Tabulate the networks of each collection that are not left out."""
    frame = pd.DataFrame([flat(r) for r in rows if "left_out" not in r])
    return {str(name): part.reset_index(drop=True) for name, part in frame.groupby("collection", sort=False)}


def predictors_of(found: Mapping[str, pd.DataFrame], share: float = 0.9) -> list[str]:
    """List the predictors that at least nine tenths of every collection have."""
    names = next(iter(found.values())).columns
    apart = {"collection", "number", *AXES, *TARGETS}
    return [n for n in names if n not in apart and all(f[n].notna().mean() >= share for f in found.values())]


def correlations(
    found: Mapping[str, pd.DataFrame], pairs: Sequence[tuple[str, str]], given: Sequence[str] = CONTROLS, *,
    resamples: int = 10_000, level: float = 0.95, seed: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """Compute partial τ of pairs (predictor, target) in each collection and their mean, with two intervals of each.

    ``low`` and ``high`` are those of a single coefficient, ``all_low`` and ``all_high`` hold for all rows of the table
    at once (Beran 1988). Networks are resampled within their collection, the same for all pairs.
    """
    values, draws = list[dict[str, Any]](), list[Array]()
    for x, y in pairs:
        parts = list[tuple[float, Array]]()
        for place, (name, frame) in enumerate(found.items()):
            kept = frame.dropna(subset=[x, y])
            controls = [kept[c].to_numpy(float) for c in given if c not in (x, y)]
            a, b = _prepared([(x, kept[x].to_numpy(float)), (y, kept[y].to_numpy(float))], controls)
            statistic, count = _tau(_signs(a), _signs(b)), len(kept)
            sample = statistic(_counts(count, resamples, seed + place).astype(np.float32))
            parts.append((float(statistic(np.ones((1, count)))[0]), sample))
            values.append({"predictor": x, "target": y, "collection": name, "networks": count, "τ": parts[-1][0]})
            draws.append(sample)
        if len(found) > 1:
            mean, sample = (np.mean([p[i] for p in parts], axis=0) for i in (0, 1))
            values.append(
                {
                    "predictor": x,
                    "target": y,
                    "collection": "mean",
                    "networks": sum(map(len, found.values())),
                    "τ": float(mean),
                }
            )
            draws.append(sample)
    each = _balanced([d for d in draws if np.isfinite(d).any()], level)
    for row, sample in zip(values, draws, strict=True):
        for name, width in (("", level), ("all_", each)):
            ends = (
                np.nanquantile(sample, [(1 - width) / 2, (1 + width) / 2])
                if np.isfinite(sample).any()
                else (math.nan,) * 2
            )
            row |= {f"{name}low": float(ends[0]), f"{name}high": float(ends[1])}
    return pd.DataFrame(values)


def answer(low: float, high: float) -> str:
    """Say what the interval of the hypothesis's coefficient means."""
    return "confirmed" if low > 0 else "refuted" if high < SLIGHT else "unresolved"


def primary(found: Mapping[str, pd.DataFrame], level: float, resamples: int = 10_000) -> dict[str, Any]:
    """Test the hypothesis: the mean over the collections decides."""
    row = correlations(found, [PRIMARY], resamples=resamples, level=level).iloc[-1].to_dict()
    return {**row, "level": level, "answer": answer(row["low"], row["high"])}


def granulated(frame: pd.DataFrame, x: str, y: str) -> dict[str, float]:
    """Compute granulated Kendall's τ (Jiang et al. 2020): over networks that differ in one axis alone, and the mean."""
    known, means = frame.dropna(subset=[x, y]), dict[str, float]()
    apart = {axis: known[axis].to_numpy()[:, None] != known[axis].to_numpy() for axis in AXES}
    single = np.triu(sum(m.astype(int) for m in apart.values()) == 1)
    agree = _signs(known[x].to_numpy(float)) * _signs(known[y].to_numpy(float))
    for axis, differ in apart.items():
        signs = agree[single & differ]
        means[axis] = float(signs.mean()) if len(signs) else math.nan
    return {**means, "mean": float(np.mean([v for v in means.values() if not math.isnan(v)] or [math.nan]))}


def power(studies: int = 200) -> list[dict[str, Any]]:
    """Simulate studies of three collections: in what share the hypothesis is confirmed or refuted, up to each look."""
    rows = []
    for effect in (0.0, 0.1, 0.15, 0.2, 0.3):
        rng, answers = np.random.default_rng(round(100 * effect)), list[dict[int, str]]()
        for _ in range(studies):
            whole = {}
            for name in "abc":
                controls, measures, target = draw(rng, max(LOOKS), effect)
                columns = (*zip(CONTROLS, controls, strict=True), (PRIMARY[0], measures[0]), (PRIMARY[1], target))
                whole[name] = pd.DataFrame(dict(columns))
            said, verdict = dict[int, str](), "unresolved"
            for count, level in LOOKS.items():
                if verdict == "unresolved":  # else the study is over
                    found = {name: frame[:count] for name, frame in whole.items()}
                    verdict = primary(found, level, 2000)["answer"]
                said[count] = verdict
            answers.append(said)
        for count in LOOKS:
            shares = {k: sum(a[count] == k for a in answers) / studies for k in ("confirmed", "refuted")}
            rows.append({"networks": count, "effect": effect, "studies": studies, **shares})
    return rows


def differences(found: Mapping[str, pd.DataFrame], target: str, resamples: int = 10_000) -> pd.DataFrame:
    """Compute mean partial τ of the invariant measure minus those of measures that depend on the gauge."""
    rows, measure = list[dict[str, Any]](), PRIMARY[0]
    for other in ("euclidean worst large", "adaptive worst large", "geodesic-inv worst large"):
        parts = list[tuple[float, Array]]()
        for place, frame in enumerate(found.values()):
            columns = [(n, frame[n].to_numpy(float)) for n in (measure, other, target)]
            a, b, y = _prepared(columns, [frame[c].to_numpy(float) for c in CONTROLS])
            counts = _counts(len(frame), resamples, place).astype(np.float32)
            one, two = (_tau(_signs(v), _signs(y)) for v in (a, b))
            ones = np.ones((1, len(frame)))
            parts.append((float((one(ones) - two(ones))[0]), one(counts) - two(counts)))
        value, sample = (np.mean([p[i] for p in parts], axis=0) for i in (0, 1))
        low, high = np.nanquantile(sample, (0.025, 0.975))
        rows.append(
            {"measure": measure, "other": other, "target": target, "difference": value, "low": low, "high": high}
        )
    return pd.DataFrame(rows)


def gauges(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """List damage, and Euclidean and adaptive sharpness, of every network in every gauge."""
    found = list[dict[str, Any]]()
    for r in (r for r in rows if "left_out" not in r):
        own = {m: r["predictors"][f"{m} worst large"] for m in ("euclidean", "adaptive")}
        for gauge, values in r["rounding"].items():
            damage = {k: v - r["loss"] for k, v in values.items() if k.endswith("bits")}
            sharp = {m: values.get(m, own[m]) for m in own}
            found.append({"collection": r["collection"], "number": r["number"], "gauge": gauge, **damage, **sharp})
    return pd.DataFrame(found)


def report(rows: Sequence[Mapping[str, Any]], folder: Path, resamples: int = 10_000) -> None:
    """Write tables: the hypothesis, all partial correlations, granulated ones, gauges, and the second trainings."""
    rows = complete(rows)
    found, level = tables(rows), LOOKS[1 + max(r["number"] for r in rows)]
    names = predictors_of(found)
    pairs = list(product(names, TARGETS))
    second = [{k: r[k] for k in ("collection", "number", "loss", "error")} | {f"after {k}": v for k, v in s.items()}
              for r in rows if "left_out" not in r for s in r["second"]]  # fmt: skip
    grains = [{"collection": c, "predictor": x, "target": y, **granulated(frame, x, y)}
              for c, frame in found.items() for x, y in pairs]  # fmt: skip
    written = {
        "hypothesis": pd.DataFrame([primary(found, level)]),
        "partial": correlations(found, pairs, resamples=resamples),
        "partial_distance": correlations(found, pairs, (*CONTROLS, "distance moved"), resamples=resamples),
        "differences": pd.concat([differences(found, y, resamples) for y in TARGETS[:2]]),
        "granulated": pd.DataFrame(grains), "gauges": gauges(rows), "second": pd.DataFrame(second),
    }  # fmt: skip
    for name, frame in written.items():
        text = frame.to_csv(index=False, float_format="%.4g", lineterminator="\n")
        (folder / f"second_task_{name}.csv").write_text(text, encoding="utf-8")
    picture(written["partial"], folder.parent / "images" / "second_task.png")
    print(written["hypothesis"].to_string())


def picture(partial: pd.DataFrame, path: Path) -> None:
    """Draw partial τ of the main predictors with rounding and with forgetting: collections, means with intervals."""
    shown = {f"{m} worst large": f"{m}, worst" for m in MEASURES}
    shown |= {n: n for n in ("euclidean trace", "geodesic-inv trace", "critical sharpness", "distance moved")}
    shown = {name: label for name, label in shown.items() if name in set(partial.predictor)}
    with figure(path, (10, 4.2), 1, 2, sharey=True) as (_, (panels,)):
        for axes, target in zip(panels, ("rounding", "forgetting"), strict=True):
            own = partial[(partial.target == target) & partial.predictor.isin(list(shown))]
            for place, name in enumerate(shown):
                rows = own[own.predictor == name].set_index("collection")
                each, mean = rows.drop("mean")["τ"], rows.loc["mean"]
                axes.plot(each, [place] * len(each), "o", color="0.75", markersize=4)
                error = [[mean["τ"] - mean.low], [mean.high - mean["τ"]]]
                axes.errorbar(mean["τ"], place, xerr=error, fmt="D", color=COLOURS.get(name.split()[0], "0.3"))
            axes.axvline(0, color="0.6", linewidth=0.8)
            axes.set(title=f"what {target} costs", xlabel="partial τ, given loss and error")
        axes.set_yticks(range(len(shown)), shown.values())
        axes.invert_yaxis()
