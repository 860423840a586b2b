"""The sweep, among real processes and as torchrun starts it."""

from __future__ import annotations

import argparse
import functools
import os
import socket
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from ranks import run_ranks
from support.every import every
from support.installed import files_of
from support.programs import program as started
from workers import network as cases

from gradstats.compressors import COMPRESSORS, Reduced
from gradstats.errors import InputError
from gradstats.network import ALGORITHMS, Network, exchange, measure
from gradstats.network import __main__ as program

pytestmark = pytest.mark.distributed


@functools.cache
def networks():
    return run_ranks(3, cases.sweep, [2, 3], COMPRESSORS)


@pytest.mark.slow
def test_everything_is_measured_among_every_number_of_workers():
    first, second, third = networks()
    assert first.about["world_size"] == 3
    for world in (2, 3):
        for operation in ALGORITHMS:
            line = first.line(operation, world)
            assert line.world == world
            assert line.sizes[0] == 128
            assert len(line.seconds) == len(
                line.sizes
            )  # none where another number's line is scaled
            assert all(0 < s < 10 for s in line.seconds)
            assert line.degrees >= 2
    operations = {line.operation for line in first.lines}
    assert operations >= {f"select:{name}" for name in COMPRESSORS if name != "none"}
    # the slowest rank's time is everybody's
    assert second.lines == first.lines
    alone = {2} if third.about["world_size"] == 3 else set()  # what the third rank had no part in
    both = [x for x in first.lines if x.operation not in ALGORITHMS or x.world not in alone]
    assert both == list(third.lines)


def test_a_hop_is_a_part_of_the_way_around_the_ring():
    for seconds in run_ranks(3, cases.of_a_second):
        assert seconds.pop("hop") == {0.5}
        assert set().union(*seconds.values()) == {1.0}


def test_the_step_that_finds_a_threshold_is_not_among_those_timed(monkeypatch):
    """Of each size and repeat what the rule itself says that it took, from the second step on."""

    class Slow:
        def __init__(self):
            self.steps = 0

        def reduce(self, gradient, group):
            self.steps += 1
            gradient.zero_()  # as compressors may
            return Reduced([0], select_seconds=1000.0 * gradient.numel() + self.steps)

    monkeypatch.setattr(measure, "compressing", lambda name, ratio: Slow())
    monkeypatch.setattr(measure, "_slowest", lambda seconds, group, device: list(seconds))
    gradients = [torch.ones(3), torch.ones(5)]
    assert measure._selecting("topk", 0.1, gradients, 3, None) == [
        [3002, 3003, 3004],
        [5002, 5003, 5004],
    ]
    assert all(bool(gradient.all()) for gradient in gradients)


def test_messages_have_the_size_that_is_written_down():
    for seen in run_ranks(2, cases.message_sizes, 4096):
        assert seen == dict.fromkeys(
            ("all_reduce", "all_gather", "broadcast", "reduce_scatter"), 4096
        )


@pytest.mark.parametrize(("rank", "gpus", "enough"), [(0, 0, False), (1, 1, False), (1, 2, True)])
def test_nccl_needs_a_gpu_for_each_rank(monkeypatch, rank, gpus, enough):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setattr(program.dist, "is_backend_available", lambda backend: True)
    monkeypatch.setattr(program.torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(program.torch.cuda, "set_device", lambda device: None)
    options = argparse.Namespace(select=[], load=[], backend="nccl")
    if enough:
        assert program._device(options) == f"cuda:{rank}"
    else:
        with pytest.raises(InputError, match=f"this host has {gpus}"):
            program._device(options)


@pytest.mark.slow
@every("name", COMPRESSORS)
def test_a_measured_network_prices_every_system(name):
    network = networks()[0]
    for world in (2, 3, 64):
        split = exchange(name, 100_000, 0.01, world).split(network)
        assert 0 < sum(split.values()) < 100
        assert split["communicate"] > 0
        assert (split["select"] > 0) == (name != "none")


PROGRAM = [sys.executable, "-m", "gradstats.network"]


@pytest.mark.slow
def test_as_torchrun_starts_it(tmp_path):
    output = tmp_path / "network.json"
    small = ["--largest", "32768", "--largest-numel", "32768", "--repeats", "2"]
    (tmp_path / "rayleigh.py").write_text(files_of("rule.md")["rayleigh.py"])
    options = ["-o", str(output), *small, "--select", "none", "topk", "rayleigh", "--check"]
    options += ["--load", str(tmp_path / "rayleigh.py")]
    done = started(*PROGRAM[1:], *options, cwd=ROOT, ranks=2)
    assert "all_reduce" in done.stdout
    assert "÷ measured" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    network = Network.load(output)
    assert network.about["backend"] == "gloo"
    assert network.line("select:topk", 1).slope >= 0
    assert network.line("select:rayleigh", 1).slope >= 0


def test_help_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        program.main(["--help"])
    out = capsys.readouterr().out
    assert "--largest-numel N" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.fixture
def alone(monkeypatch):
    """The environment of one rank without others."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", "0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--worlds", "2"], "collectives need 2 to 1 of the 1 ranks"),
        (["--worlds", "0"], "collectives need 2"),
        ([], "collectives need 2"),
        (["-o", "no/folder.json"], "cannot write no/folder.json: No such file"),
        (["--select", "zip"], "no compressor 'zip'"),
        (["--load", "no.py"], "cannot load no.py: No such file"),
        (["--backend", "pigeon"], "no backend 'pigeon'"),
        (["--repeats", "many"], "argument --repeats: invalid int value: 'many'"),
        (["--slow"], "unrecognized arguments: --slow"),
    ],
)
def test_bad_input_is_one_line(alone, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        program.main(arguments)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert message in err
    assert not list(tmp_path.iterdir())


def test_a_rank_that_is_not_started_as_one_says_how(alone, monkeypatch, capsys):
    monkeypatch.delenv("RANK")
    with pytest.raises(SystemExit, match="2"):
        program.main([])
    assert capsys.readouterr().err.startswith("error: start it on every rank: torchrun")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(SystemExit, match="2"):
        program.main([])
    assert capsys.readouterr().err.startswith("error: rank 3 cannot join the others: ")


@pytest.mark.slow
def test_every_rank_ends_with_2_where_the_first_cannot_write(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    output = tmp_path / "no" / "folder.json"
    ranks = [
        subprocess.Popen(
            [*PROGRAM, "-o", str(output)],
            env=os.environ | group | {"RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert said == [f"error: cannot write {output}: No such file or directory\n", ""]
