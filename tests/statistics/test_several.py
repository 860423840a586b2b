"""Several fits of one sample: their table."""

from __future__ import annotations

import numpy as np

from gradstats import fit, fit_all


def test_the_table_has_each_fits_shape_and_scale_with_intervals():
    x = np.random.default_rng(0).laplace(size=20_000)
    table = fit_all(x).summary().set_index("model")
    assert table["tail_error"].is_monotonic_increasing
    alone = fit(x, "dgamma", table.loc["dgamma", "method"])
    for name, parameter in (("shape", "a"), ("scale", "scale")):
        expected = (alone.params[parameter], *alone.interval(parameter))
        row = table.loc["dgamma", [name, f"{name}_low", f"{name}_high"]]
        assert tuple(row) == expected
    assert np.isnan(table.loc["laplace", ["shape", "shape_low", "shape_high"]].astype(float)).all()
    assert table.loc["laplace", "scale_low"] < 1 < table.loc["laplace", "scale_high"]
