"""The sweep, among real processes and from torchrun."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
from conftest import ROOT
from ranks import run_ranks
from workers import network as cases

from gradstats.compressors import COMPRESSORS
from gradstats.network import ALGORITHMS, Network, exchange
from gradstats.network import __main__ as module

pytestmark = pytest.mark.distributed


@functools.cache
def networks():
    return run_ranks(3, cases.sweep, [2, 3], COMPRESSORS)


def test_everything_is_measured_among_every_number_of_workers():
    first, second, third = networks()
    assert first.about["world_size"] == 3
    for world in (2, 3):
        for operation in ALGORITHMS:
            line = first.line(operation, world)
            assert line.world == world
            assert line.sizes[0] == 128
            assert all(0 < s < 10 for s in line.seconds)
            assert line.degrees >= 2
    operations = {line.operation for line in first.lines}
    assert operations >= {f"select:{name}" for name in COMPRESSORS if name != "none"}
    # the slowest rank's time is everybody's
    assert second.lines == first.lines
    alone = {2} if third.about["world_size"] == 3 else set()  # what the third rank had no part in
    both = [x for x in first.lines if x.operation not in ALGORITHMS or x.world not in alone]
    assert both == list(third.lines)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_measured_network_prices_every_system(name):
    network = networks()[0]
    for world in (2, 3, 64):
        split = exchange(name, 100_000, 0.01, world).split(network)
        assert 0 < sum(split.values()) < 100
        assert split["communicate"] > 0
        assert (split["select"] > 0) == (name != "none")


def run(*arguments, torchrun=2):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(torchrun)]
    return subprocess.run(
        [sys.executable, *(launch if torchrun else []), "-m", "gradstats.network", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=120,
    )


def test_from_torchrun(tmp_path):
    output = tmp_path / "network.json"
    small = ["--largest", "32768", "--largest-numel", "32768", "--repeats", "2"]
    done = run("-o", str(output), *small, "--select", "none", "topk", "--check")
    assert done.returncode == 0, done.stderr
    assert "all_reduce" in done.stdout
    assert "÷ measured" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    network = Network.load(output)
    assert network.about["backend"] == "gloo"
    assert network.line("select:topk", 1).slope >= 0


def test_bad_input_is_one_line(capsys, monkeypatch):
    done = run(torchrun=0)
    assert done.returncode == 2
    assert done.stderr.startswith("error: start it on every rank: torchrun")
    assert done.stderr.count("\n") == 1
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", "0")
    for arguments, message in (
        (["--worlds", "2"], "collectives need 2 to 1 of the 1 ranks"),
        ([], "collectives need 2"),
    ):
        with pytest.raises(SystemExit, match="2"):
            module.main(arguments)
        assert message in capsys.readouterr().err
