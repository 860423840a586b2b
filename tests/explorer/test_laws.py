"""The laws that run in the page are SciPy's, and the bundle is made of the sources beside it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import gradstats.explorer
from gradstats.explorer.data import DRAWN
from gradstats.statistics.laws import LAWS

JS = Path(gradstats.explorer.__file__).parent / "js"
pytestmark = [
    pytest.mark.skipif(not shutil.which("node"), reason="node is not installed"),
    pytest.mark.skipif(
        not (JS / "node_modules").exists(), reason=f"npm ci has not run in {JS}, as .ci/run does"
    ),
]

SHAPES = {
    "a": (0.3, 1.0, 2.5),
    "c": (-0.4, 0.0, 1e-5, 0.25, 0.9),
    "df": (0.7, 2.0, 30.0),
    "beta": (0.4, 1.0, 2.0),
    "s": (0.5, 1.5),
}
SHARES = [1 - 1e-9, 0.99, 0.5, 0.1, 1e-3, 1e-6, 1e-12]


def parameters(name):
    (shape,) = LAWS[name].shapes or ("",)
    values = (
        [abs(v) + 0.2 for v in SHAPES["c"]] if name == "dweibull" else SHAPES.get(shape, (None,))
    )
    for scale in (3e-4, 2.0):
        for value in values:
            yield {"scale": scale} | ({shape: value} if shape else {})


def answers(questions, tmp_path):
    # evaluated, because node looks for packages beside a file
    script = Path(__file__).with_name("laws.mjs").read_text(encoding="utf-8")
    done = subprocess.run(
        ["node", "--input-type=module", "--eval", script, JS / "src" / "laws.js", tmp_path],
        cwd=JS,
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_law_of_the_page_is_scipys(tmp_path):
    questions, expected = [], []
    for name in DRAWN:
        for params in parameters(name):
            law = LAWS[name].magnitude(**params)
            x = law.isf(SHARES)
            questions.append({"name": name, "params": params, "x": x.tolist(), "q": SHARES})
            expected.append({"sf": law.sf(x), "pdf": law.pdf(x), "isf": x})
    assert len({q["name"] for q in questions}) == 8
    for question, found, known in zip(
        questions, answers(questions, tmp_path), expected, strict=True
    ):
        for what, values in known.items():
            np.testing.assert_allclose(
                np.array(found[what], float),
                values,
                rtol=1e-8,
                atol=0,
                err_msg=f"{what} of {question['name']} {question['params']}",
            )


def test_the_bundle_is_made_of_the_sources_beside_it(tmp_path):
    subprocess.run(["node", "build.mjs", tmp_path], cwd=JS, check=True, timeout=200)
    for name in ("explorer.js", "explorer.LICENSES.txt"):
        committed = (JS.parent / name).read_bytes()
        assert (tmp_path / name).read_bytes() == committed, (
            "npm run build, and commit what it makes"
        )


def test_the_licences_name_every_package_of_the_bundle():
    licences = (JS.parent / "explorer.LICENSES.txt").read_text(encoding="utf-8")
    for name in json.loads((JS / "package.json").read_text())["dependencies"]:
        assert f"\n{name} " in licences
    assert "Permission to use, copy, modify" in licences  # ISC, of Observable Plot and d3
    assert "Apache License" in licences
