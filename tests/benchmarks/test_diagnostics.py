"""The studies behind the figures of live runs count what they say, in trainings that are given."""

from __future__ import annotations

from types import SimpleNamespace

import diagnostics


def test_build_up_is_the_mean_union_of_the_later_steps_over_k(monkeypatch):
    asked = []

    def train(compressor, **settings):
        asked.append((compressor, settings["nproc"], settings["nproc"] * settings["batch_size"]))
        unions = [10**6] * 10 + [10 * settings["nproc"], 20 * settings["nproc"]]
        records = [{"union": n, "selected": 10, "target": 10, "numel": 1000} for n in unions]
        return SimpleNamespace(records=records), None

    monkeypatch.setattr(diagnostics, "train", train)
    records = diagnostics.build_up()
    assert {r["compressor"] for r in records} == {"topk", "sidco-e", "cltk", "micro"}
    assert [r["build_up"] for r in records] == [1.5 * r["nproc"] for r in records]
    assert {batch for *_, batch in asked} == {64}  # of all workers together
    assert "| `micro` | 1.50 | 3.00 | 6.00 | 12.00 |" in diagnostics.summary("build_up", records)


def test_overlap_is_the_union_of_as_many_workers(monkeypatch):
    def train(compressor, **settings):
        assert (compressor, settings["ratio"], settings["batch_size"]) == ("topk", 0.001, 8)
        records = [{"union": n, "target": 5} for n in [99] * 10 + [4 * settings["nproc"]] * 20]
        return SimpleNamespace(records=records, numel=5000), None

    monkeypatch.setattr(diagnostics, "train", train)
    records = diagnostics.overlap()
    assert [r["nproc"] for r in records] == [2, 4, 8, 16]
    assert [r["build_up"] for r in records] == [1.6, 3.2, 6.4, 12.8]
    assert records[-1]["density"] == 64 / 5000
    assert diagnostics.summary("overlap", records).endswith("| 16 | 12.80 | 1.28 % |")


def test_deltas_above_one_are_counted():
    records = [
        {"layer": layer, "target": k, "delta": delta}
        for layer, k, delta in (("a", 1, 1.2), ("b", 5, 0.5), ("c", 5, 1.1), ("d", 9, 1.0))
    ]
    assert diagnostics.summary("delta", records) == (
        "δ > 1 in 2 of 4, of which 1 in layers with k > 1; largest 1.20 in a (k = 1); median 1.050"
    )
