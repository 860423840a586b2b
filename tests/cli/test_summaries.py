"""What tables show first: a summary that fits a screen; and the format that a file's name asks for."""

import json
import shutil
import sys
import time

import numpy as np
import pytest
import zarr
from conftest import DATA
from support.terminal import records, run
from support.traces import LAYERS, write

from gradstats import quality_series
from gradstats.analysis.info import info_summary
from gradstats.analysis.rules import judged_rules
from gradstats.analysis.stages import worst_stages
from gradstats.cli import main
from gradstats.cli.output import analyse, note_statuses, worst_first
from gradstats.trace import Layer, Shard, TraceWriter, create_trace
from gradstats.trace.sources import open_source

EF = DATA / "resnet20-ef.zarr"


@pytest.mark.parametrize(
    ("command", "rows"),
    [(("info", EF), 2), (("compressibility", EF), 7), (("quality", EF, "--by-stage"), 18)],
)
def test_a_summary_fits_a_screen(command, rows):
    short, whole = run(*command), run(*command, "--all")
    assert len(short.stdout.splitlines()) <= 48
    assert "--all" in short.stderr
    body, everything = (
        [line for line in done.stdout.splitlines() if line.startswith(" ") and "──" not in line]
        for done in (short, whole)
    )
    assert rows <= len(body) < len(everything)
    assert len(records(*command)) > rows


def test_a_summary_has_the_last_step_of_each_trace(tmp_path):
    for name, steps in (("long", [0, 100, 200]), ("short", [0, 100])):
        path = tmp_path / f"{name}.zarr"
        create_trace(path, LAYERS)
        write(path, steps, kinds=["gradient"])

    def work(sources, *, steps, on_progress, **_):
        return [{"trace": s.name, "step": key[2]} for s in sources for key in s.select(steps=steps)]

    found = analyse("reading", tmp_path, work, last=True)
    assert [(r["trace"], r["step"]) for r in found] == [("long", 200), ("short", 100)]


def test_a_folder_has_the_rows_of_each_of_its_traces(tmp_path):
    for name, steps in (("a", range(2)), ("b", range(3, 6))):
        create_trace(tmp_path / f"{name}.zarr", LAYERS)
        write(tmp_path / f"{name}.zarr", steps, kinds=["gradient"], compression=True)
    for command in (
        "info",
        "compression",
        "compression --per-layer",
    ):
        name, *options = command.split()
        both, a, b = (records(name, tmp_path / w, *options) for w in (".", "a.zarr", "b.zarr"))
        assert a
        assert b
        assert both == a + b, command
    assert run("info", tmp_path).stderr == "5 gradients; --all has a row of each.\n"


def test_layers_that_changed_most_are_shown_and_the_others_counted(tmp_path):
    for name, add in (("a", 0), ("b", 1)):
        np.savez(tmp_path / name, **{f"w{i}": np.arange(9.0, dtype="f4") + add for i in range(25)})
    done = run("delta", tmp_path / "a.npz", tmp_path / "b.npz", "--per-layer")
    assert "the 20 rows of most changes, of 25; --all has every one\n" in done.stderr


@pytest.mark.parametrize("steps", [(), ("--step", 10)])
def test_a_title_does_not_name_the_last_step_of_others(steps):
    title = " ".join(run("fit", EF, "--kind", "gradient", *steps).stdout.split())
    assert "The nearest model, fitted at the steps shown;" in title
    assert "tail error: the largest at ratios down to 0.0001" in title


def test_a_law_is_said_of_the_rank_that_it_is_of():
    """One rank is looked at where none is asked for."""
    fit = (
        "fit",
        DATA / "ranks" / "resnet8.zarr",
        "--kind",
        "gradient",
        "--model",
        "laplace",
        "--step",
        300,
    )
    assert run(*fit).stdout.startswith("resnet8, gradient, rank 0 of 2: ")
    assert run(*fit, "--rank", 1).stdout.startswith("resnet8, gradient: ")
    assert run("fit", EF, *fit[2:6], "--step", 10).stdout.startswith("resnet20-ef, gradient: ")


def test_the_heaviest_layers_are_only_first_where_the_title_says_so():
    peaks = ("pot", EF, "--kind", "gradient", "--layers")
    assert "; heaviest first" in run(*peaks).stdout
    assert "heaviest" not in run(*peaks, "--all").stdout


def test_a_union_is_that_of_the_workers_and_not_of_the_ranks():
    title = " ".join(run("agreement", DATA / "ranks" / "resnet8.zarr").stdout.split())
    assert "union: positions that --workers would select together, ÷ k" in title


def test_a_stage_is_blamed_in_so_many_of_the_gradients():
    budget = records("quality", EF, "--by-stage", "--kind", "gradient", "--estimator", "sidco-e")
    here = [r for r in budget if r["ratio"] == 0.001 and r["blame"]]
    blamed = [r["stage"] for r in here]
    worst = max(set(blamed), key=blamed.count)
    shown = run("quality", EF, "--by-stage", "--kind", "gradient", "--estimator", "sidco-e").stdout
    (row,) = (line.split() for line in shown.splitlines() if " 0.001 " in line)
    factor = np.mean([r["factor"] for r in here if r["stage"] == worst])
    assert f"{blamed.count(worst)} of 4" in " ".join(row)
    assert float(row[-1]) == pytest.approx(factor, rel=0.01)


def test_the_quality_of_stages_is_that_of_the_last():
    labels = {"trace": "t", "kind": "gradient", "layer": "all", "estimator": "a", "ratio": 0.01}
    budget = [
        labels
        | {"step": step, "rank": 0, "stage": stage, "blame": stage == 1, "factor": 2.0}
        | {"quality": quality}
        for step, stages in enumerate([(0.1, 2.0), (0.2, 3.0)])
        for stage, quality in enumerate(stages, 1)
    ]
    (found,) = worst_stages(budget)
    assert (found["quality"], found["stages"], found["blamed"]) == (2.5, "2", "2 of 2")


def test_info_has_the_most_zeros_and_the_gradients_with_any_nan(tmp_path):
    create_trace(path := tmp_path / "run.zarr", LAYERS, world_size=2)
    for rank, zeros in enumerate((3, 5)):
        writer = TraceWriter(path, rank)
        for step in range(0, 101, 20):
            values = np.ones(620, np.float32)
            values[: zeros if step == 40 else 1] = 0
            values[10:14] = np.nan if step == 60 else 1
            writer.append(step, {"gradient": values})
        writer.close()
    (found,) = info_summary(open_source(path))
    assert (found["zeros"], found["nonfinite"], found["gradients"]) == (5, 2, 12)
    assert (found["ranks"], found["steps"]) == ("0, 1", "6, 0 to 100 every 20")


def test_of_a_layer_the_law_with_the_least_tail_error_is_shown():
    command = ["fit", EF, "--step", 100, "--kind", "gradient"]
    command += ["--layer", "fc.weight", "--layer", "conv1.weight"]
    fits = records(*command)
    shown = run(*command).stdout.splitlines()
    for layer in ("fc.weight", "conv1.weight"):
        best = min((r for r in fits if r["layer"] == layer), key=lambda r: r["tail_error"])
        (row,) = (line.split() for line in shown if line.startswith(f" {layer} "))
        assert row[1] == best["model"]


def test_the_nearest_rules_come_first():
    names = ["sidco-e", "micro", "dgc", "exact"]
    rules = judged_rules(quality_series(EF, [0.01], names, kinds=["gradient"]))
    command = ["quality", EF, "--kind", "gradient", "--ratio", 0.01, "--all"]
    shown = run(*command, *(f"--estimator={name}" for name in names)).stdout
    rows = [line.split()[0] for line in shown.splitlines() if line.startswith(" ")]
    assert [name for name in rows if name in names] == [r["estimator"] for r in rules]


def test_layers_have_the_order_of_the_model():
    names = ["fc.weight", "conv1.weight", "blocks.0.conv1.weight"]
    command = ["quality", EF, "--kind", "gradient", "--ratio", 0.01, "--estimator", "sidco-p"]
    shown = run(*command, "--step", 100, *(f"--layer={name}" for name in names)).stdout
    rows = [line.split()[0] for line in shown.splitlines() if line.startswith(" ")]
    assert [name for name in rows if name in names] == [*names[1:], names[0]]


def test_the_worst_twenty_layers_come_first():
    labels = {"trace": "t", "step": 0, "rank": 0, "kind": "gradient"}
    rows = [labels | {"layer": f"l{i}", "c": float(i)} for i in (*range(12), *range(24, 11, -1))]
    rows += [labels | {"layer": "none", "c": float("nan")}, labels | {"layer": "all", "c": 0.0}]
    expected = ["all", *(f"l{i}" for i in range(24, 4, -1))]
    assert [r["layer"] for r in worst_first(rows, "c")] == expected
    few = [r["layer"] for r in worst_first(rows[-4:], "c")]
    assert few == ["all", "l13", "l12", "none"]


@pytest.mark.parametrize(
    ("name", "start"),
    [("x.csv", "trace,step"), ("x.json", "["), ("x.md", "| trace"), ("x.tex", "\\begin{tabular}")],
)
def test_a_name_gives_the_format(name, start, tmp_path):
    for command in (("info", EF, "-o", tmp_path / name), ("info", "-o", tmp_path / name, EF)):
        assert run(*command).returncode == 0
        text = (tmp_path / name).read_text("utf-8")
        assert text.startswith(start)
        if name.endswith("json"):
            assert len(json.loads(text)) == 8


def test_parquet_has_what_json_has(tmp_path, monkeypatch):
    import pyarrow
    from pyarrow.parquet import read_table

    path = tmp_path / "x.parquet"
    for command in (
        ("info", EF),
        ("fit", EF, "--step", 10, "--kind", "gradient"),
        ("compressibility", EF),
        ("drift", EF),
        ("pot", EF, "--layers", "--kind", "gradient", "--step", 10),
    ):
        assert run(*command, "-o", path).returncode == 0
        table = read_table(path)
        wanted = records(*command)
        assert table.column_names == list(wanted[0])
        assert command[0] != "drift" or table.schema.field("slope").type == pyarrow.float64()
        for found, record in zip(table.to_pylist(), wanted, strict=True):
            for name, value in record.items():
                if isinstance(value, dict):  # a struct has the fields of all records
                    inside = {k: v for k, v in (found[name] or {}).items() if v is not None}
                    assert inside == {k: v for k, v in value.items() if v is not None}
                elif table.schema.field(name).type == pyarrow.string() and value is not None:
                    assert found[name] in (value, json.dumps(value))
                else:
                    assert found[name] == value
    done = run("info", EF, "--format", "parquet")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gradstats: parquet is no text: give -o FILE.parquet\n"
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    done = run("info", EF, "-o", tmp_path / "y.parquet")
    assert len(done.stderr.splitlines()) == 1
    assert "pip install 'gradstats[parquet]'" in done.stderr
    assert not (tmp_path / "y.parquet").exists()


def test_a_name_without_a_format_is_refused(tmp_path):
    for options, message in (
        (("-o", tmp_path / "x.pdf"), "name it .csv, .json, .md, .parquet, .tex, .txt, or give"),
        (("-o", tmp_path / "x.csv", "--format", "json"), "--format json is not what "),
        (("--format", "json", "-o", tmp_path / "x.csv"), "--format json is not what "),
    ):
        done = run("info", EF, *options)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
        assert message in done.stderr
    assert run("info", EF, "-o", tmp_path / "plain", "--format", "csv").returncode == 0


def test_replicates_that_cannot_reject_are_named():
    few = ("fit", EF, "--per-layer", "--step", 10, "--kind", "gradient", "--model", "laplace")
    done = run(*few, "--bootstrap", 2, "--size", 50)
    assert "2 replicates cannot reject anything at 5 % among 59 layers (Holm): it takes 1,179" in (
        " ".join(done.stderr.split())
    )


def test_info_of_many_ranks_is_short_and_opens_no_array_of_theirs(tmp_path, monkeypatch, capsys):
    """Opening one takes 5 ms, and a trace of hundreds of ranks has thousands."""
    path, ranks = tmp_path / "many.zarr", 48
    layers = [Layer(f"l{i}", 50 * i, (50,)) for i in range(12)]
    create_trace(path, layers, world_size=ranks)
    values = np.random.default_rng(0).laplace(size=600).astype(np.float32)
    for rank in range(ranks):
        writer = TraceWriter(path, rank, store="sketches")
        for step in range(1 + rank % 2):
            writer.append(step, {"gradient": values}, loss=1.0)
        writer.close()

    def opened(*_, **__):
        raise AssertionError("an array was opened")

    monkeypatch.setattr(zarr, "open_array", opened)
    with pytest.raises(SystemExit) as end:
        main(["info", str(path)])
    assert not end.value.code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert f" {ranks * 3 // 2} " in lines[-1]
    assert sum("has fewer: 1 of 2 steps" in line for line in lines) == 8
    assert any("not named here: 16; --all" in line for line in lines)
    assert run("info", path, "--all").stdout.count("has fewer") == ranks // 2


def test_a_remark_is_said_once_of_what_it_is_of(monkeypatch):
    """Of more than three layers one is an example, however many fits each of them has."""
    said = []
    monkeypatch.setattr("gradstats.cli.output.note", said.append)
    found = [("a", "short")] * 3 + [("b", "ok")] * 2 + [("b", "short")]
    found += [(layer, "flat") for layer in "cdefcdc"]
    fits = [{"layer": layer, "status": status} for layer, status in found]
    note_statuses(fits, "json", "layer")
    assert said == []
    note_statuses(fits, "table", "layer")
    assert said == [
        "a: short (3 of the fits)",
        "b: short (1 of the fits)",
        "flat: 4 layers, such as c",
    ]


def test_info_says_where_each_rank_with_fewer_steps_ended(tmp_path):
    """Of those that lack most first; the last step is where it was killed, or writes on."""
    path, steps = tmp_path / "killed.zarr", (5, 10, 20, 40)
    create_trace(path, [Layer("w", 0, (50,))], world_size=3)
    for rank in range(3):
        writer = TraceWriter(path, rank)
        for step in steps[: 4 - rank]:
            writer.append(step, {"gradient": np.ones(50, np.float32)})
        writer.close()
    lines = run("info", path).stdout.splitlines()
    assert [line for line in lines if "has fewer" in line] == [
        "  rank 2 has fewer: 2 of 4 steps, the last 10",
        "  rank 1 has fewer: 3 of 4 steps, the last 20",
    ]


def test_info_of_a_trace_without_steps_has_no_table(tmp_path):
    path = tmp_path / "begun.zarr"
    create_trace(path, LAYERS)
    for options in [], ["--all"]:
        said = run("info", path, *options).stdout
        assert "captured 0 steps" in said
        assert "──" not in said
    assert records("info", path) == []


@pytest.mark.slow
def test_info_of_256_ranks_of_700_sharded_parameters_is_quick(tmp_path):
    """By hand, alone on the machine: 3 s of CPU, and 2 s where every rank has the whole gradient."""
    path, ranks, parameters = tmp_path / "sharded.zarr", 256, 700
    layers = [Layer(f"l{i}", 2 * ranks * i, (ranks, 2)) for i in range(parameters)]
    create_trace(path, layers, world_size=ranks)
    first = [Shard(layer.name, (0, 0), (1, 2)) for layer in layers]
    writer = TraceWriter(path, 0, shards=first, shard_ranks=range(ranks))
    writer.append(0, {"gradient": np.ones(2 * parameters, np.float32)})
    writer.close()
    about = json.loads((path / "rank00000" / "zarr.json").read_text())
    for rank in range(1, ranks):
        group = path / f"rank{rank:05d}"
        shutil.copytree(path / "rank00000", group)
        about["attributes"]["rank"] = rank
        for shard in about["attributes"]["shards"]:
            shard["offset"][0] = rank
        (group / "zarr.json").write_text(json.dumps(about))
    began = time.process_time()
    done = run("info", path)
    assert time.process_time() - began < 8
    assert len(done.stdout.splitlines()) <= 20
    assert "1 steps, 256 of 256 ranks" in done.stdout


def test_the_name_alone_says_what_to_do_with_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run()
    assert done.returncode == 0
    for have in ("nothing yet", "a training", "a trace", "a folder of dumps", "a cluster"):
        assert have in done.stdout
    assert "gradstats report run.zarr" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    (tmp_path / "mine.zarr").mkdir()
    assert "gradstats report mine.zarr" in run().stdout


def test_a_flag_has_no_type_in_the_help():
    for command in ((), ("fit",), ("capture",), ("plot",)):
        text = run(*command, "--help").stdout
        assert "--help" in text
        assert "bool" not in text
    assert "<int" in run("fit", "--help").stdout
