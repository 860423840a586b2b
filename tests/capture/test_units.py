"""Parts of parameters as layers of their own: experts, rows of embeddings, heads."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from ranks import run_ranks
from support.terminal import main
from workers import units

from capture import Capture
from gradstats import open_trace
from gradstats.errors import InputError

# These models train faster than any disk writes.
pytestmark = pytest.mark.filterwarnings("ignore:.*slower than the training:capture.CaptureWarning")


def test_experts_rows_and_heads_are_layers(tmp_path, capsys):
    model, path = units.Experts(), tmp_path / "a.zarr"
    with Capture(path, model, units=units.UNITS) as capture:
        model(units.batch(0)).square().mean().backward()
        capture.step()
    trace = open_trace(path)
    names = {layer.name: layer for layer in trace.layers}
    assert [n for n in names if n.startswith("experts")] == [f"experts[{i}]" for i in range(4)]
    assert names["experts[1]"].shape == (6, 5)
    assert names["query.weight[2]"].shape == (2, 6)
    assert names["scale[3]"].shape == (1,)
    assert names["embedding.weight[10]"].shape == (6,)
    gradient = trace.read(0)
    for part in range(4):
        layer = names[f"experts[{part}]"]
        assert np.array_equal(gradient[layer.slice], model.experts.grad[part].flatten().numpy())
    assert sum(layer.numel for layer in trace.layers) == sum(p.numel() for p in model.parameters())
    # a name with brackets is a name, and every table by layer has it

    def layers(*command):
        with pytest.raises(SystemExit):
            main([*command, "--format", "json"])
        return {r["layer"] for r in json.loads(capsys.readouterr().out)}

    found = layers("fit", str(path), "--layer", "experts[1]", "--model", "laplace")
    assert found == {"all", "experts[1]"}
    found = layers("quality", str(path), "--layer", "experts*", "--estimator", "exact")
    assert found >= {f"experts[{i}]" for i in range(4)}


@pytest.mark.distributed
def test_parts_of_shards(tmp_path):
    """Three ranks of FSDP2 hold parts of experts: the trace reads as that of the model in one piece."""
    seen = run_ranks(3, units.sharded, str(tmp_path / "a.zarr"), str(tmp_path / "c.zarr"))
    trace = open_trace(tmp_path / "a.zarr")
    whole = open_trace(units.sketched(tmp_path / "b.zarr"))
    assert trace.layers == whole.layers
    assert len(whole.sketches(0)) == len(whole.layers) == 1 + 4 + 4 + 3 + 11
    for step, mean in enumerate(np.mean(seen, axis=0)):
        np.testing.assert_allclose(trace.read(step), mean, rtol=2e-5, atol=2e-7)
    # a compressor speaks of parameters: of those in one piece, in their places
    said = open_trace(tmp_path / "c.zarr").layer_compression(0)
    for values in said.values():
        assert np.isfinite(values[0]).tolist() == [la.name == "bias" for la in whole.layers]


def test_units_that_cannot_be_are_refused(tmp_path):
    model = units.Experts()
    for given, message in [
        ({"*.experts": 0}, "no captured parameter matches"),
        ({"experts": 1}, "names dimension 1"),
        ({"experts": (0, 3)}, "does not fall into 3 equal parts"),
        ({"experts": "0"}, "a dimension, or a dimension and a number of parts"),
        ({"experts": (0, 0)}, "a dimension, or a dimension and a number of parts"),
        (["experts"], "maps name patterns to a dimension"),
    ]:
        with pytest.raises(InputError, match=message):
            Capture(tmp_path / "a.zarr", model, units=given)
    assert torch.is_tensor(model.experts)
