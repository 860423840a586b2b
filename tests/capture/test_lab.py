"""The network lab, for real: namespaces, tc, gloo over the shaped links. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import experiment
import numpy as np
import pytest
from support import terminal
from support.every import every
from support.programs import Program
from support.terminal import main
from torch.distributed.elastic.multiprocessing import SignalException
from workers import lab as cases

from capture.lab import run
from capture.lab.caller import caller
from capture.lab.cluster import Cluster, LabError, shaped_network
from capture.lab.launch import launch
from capture.lab.run import measure_network
from capture.workloads.config import RunConfig, RunResult
from capture.workloads.launch import RunFailedError
from gradstats.errors import GradstatsError, InputError
from gradstats.network import ALGORITHMS, Network
from gradstats.network.plan import plan
from gradstats.network.rates import parse_rate

GRADSTATS = str(Path(sys.executable).with_name("gradstats"))
LAB = (GRADSTATS, "bench-network", "--nproc", "2", "--rate", "50")
LANES = ("communicate_seconds", "overlapped_seconds")


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def inventory():
    """Return namespaces by name, all network namespaces that have a process, and the host's interfaces."""
    inodes = {os.stat(path).st_ino for path in processes("ns/net")}
    return ip("netns"), inodes, ip("-brief", "link")


def processes(file):
    for path in Path("/proc").glob(f"[0-9]*/{file}"):
        with contextlib.suppress(OSError):
            path.stat()
            yield path


@pytest.fixture(scope="module")
def _rights():
    try:
        with shaped_network(1, 10**9):
            pass
    except GradstatsError as error:
        pytest.skip(f"no network lab here: {error}")


@pytest.fixture
def lab(_rights, monkeypatch):
    """Whatever the test does, it leaves the machine as it was; ranks are root's where it does not say whose."""
    monkeypatch.delenv("SUDO_UID", raising=False)
    before = inventory()
    yield
    end = time.monotonic() + 60
    while (
        inventory() != before and time.monotonic() < end
    ):  # the kernel ends processes in its own time
        time.sleep(0.1)
    assert inventory() == before


def refused(*args, **environment):
    """Run a command in this process that is to fail, and return its one line."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as done:
        main(list(args))
    assert done.value.code == 2
    assert stderr.getvalue().count("\n") == 1
    return stderr.getvalue()


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100", 10**8),
        ("1gbit", 10**9),
        ("2.5Gbit", 25 * 10**8),
        ("500kbit", 500_000),
        (".5", 500_000),
    ],
)
def test_rates_are_read_as_tc_writes_them(text, rate):
    assert parse_rate(text) == rate


@every("text", ["", "fast", "-1", "0", "1mbps", "1e3", "0.5kbit", "nan"])
def test_other_rates_are_refused(text):
    assert "Mbit/s" in refused("bench-network", "--rate", text)


def test_settings_are_checked_before_anything_is_built():
    assert "nproc" in refused("bench-network", "--nproc", "0")
    assert "1 to 200" in refused("bench-network", "--nproc", "201")
    assert "more than 3" in refused("bench-network", "--steps", "3")
    assert "room for" in refused("bench-network", "--local-steps", "4", "--delay", "4")
    assert "is of local steps" in refused("bench-network", "--fragments", "2")
    assert "go with local steps" in refused(
        "bench-network", "--local-steps", "4", "--compressor", "powersgd"
    )
    assert "did you mean marsit" in refused("bench-network", "--compressor", "marsitt")


@pytest.mark.parametrize("tool", ["ip", "tc"])
def test_a_missing_tool_is_named(tool, tmp_path, monkeypatch):
    other = "tc" if tool == "ip" else "ip"
    (tmp_path / other).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"needs {tool}, of the package iproute2" in refused("bench-network")


def test_a_network_is_shaped_and_apart_from_the_host(lab):
    before = ip("-brief", "link")
    with shaped_network(3, (7 * 10**6, 9 * 10**6)) as network:
        assert (network.up, network.down, network.rate) == (7 * 10**6, 9 * 10**6, 7 * 10**6)
        assert ip("-brief", "link") == before
        names = ip("netns").split()
        assert set(network.ranks) < {name for name in names if name.startswith("gradstats-lab-")}
        for name in network.ranks:
            (link,) = json.loads(ip("-n", name, "-json", "link", "show", "type", "veth"))
            assert link["operstate"] == "UP"
        shown = {
            name: subprocess.run(["tc", "-n", name, "qdisc"], capture_output=True, text=True).stdout
            for name in names
            if name.startswith("gradstats-lab-")
        }
        sent = "".join(shown.pop(name) for name in network.ranks)
        received = "".join(shown.values())
        assert sent.count("tbf") == sent.count("rate 7Mbit burst 32Kb") == 3
        assert received.count("tbf") == received.count("rate 9Mbit burst 32Kb") == 3


def test_what_other_programs_made_stays_whatever_its_name(lab):
    foreign = "gradstats-lab-0-hub", "gradstats-lab-mine"
    for name in foreign:
        ip("netns", "add", name)
    theirs = subprocess.Popen(["ip", "netns", "exec", foreign[0], "sleep", "1000"])
    try:
        while not ip("netns", "pids", foreign[0]):
            time.sleep(0.01)
        with shaped_network(1, 10**9):
            assert set(foreign) < set(ip("netns").split())
        assert set(foreign) <= set(ip("netns").split())
        assert theirs.poll() is None
    finally:
        theirs.kill()
        theirs.wait()
        for name in foreign:
            ip("netns", "delete", name)


def test_a_name_that_is_taken_is_refused_and_stays(lab):
    taken = f"gradstats-lab-{os.getpid()}-1"
    ip("netns", "add", taken)
    try:
        with pytest.raises(LabError, match=f"{taken} already"), shaped_network(2, 10**9):
            pass
        assert [n for n in ip("netns").split() if n.startswith("gradstats-lab-")] == [taken]
    finally:
        ip("netns", "delete", taken)


def test_a_second_lab_is_refused(lab):
    with shaped_network(1, 10**9):
        said = refused("bench-network")
        assert f"another network lab is running, process {os.getpid()}" in said


@pytest.mark.parametrize(
    ("privileges", "why"),
    [
        (("--reuid", "65534", "--regid", "65534", "--clear-groups"), "takes root"),
        (("--bounding-set", "-sys_admin"), "not permitted"),  # root of an ordinary container
    ],
)
def test_without_the_rights_it_is_one_line(lab, privileges, why):
    done = subprocess.run(["setpriv", *privileges, *LAB], capture_output=True, text=True)
    assert done.returncode == 2
    assert why in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_part_that_is_refused_leaves_nothing(lab):
    with pytest.raises(LabError, match=r"tc .*rate"), shaped_network(2, 10**40):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_takes_the_network_down(lab, number):
    before = signal.getsignal(number)
    with pytest.raises(SignalException) as raised, shaped_network(1, 10**9):
        signal.raise_signal(number)
    assert raised.value.sigval == number
    assert signal.getsignal(number) is before


@pytest.mark.slow
@pytest.mark.distributed
def test_a_training_says_where_its_time_goes(lab):
    names = ("none", "topk")
    done = terminal.run(
        *LAB[1:],
        *("--down", "1gbit", "--local-steps", "0", "--local-steps", "4"),
        *("--steps", "6", "--batch-size", "4", "--format", "json"),
        *(f"--compressor={n}" for n in names),
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stderr.splitlines()
    assert all(" after " in line for line in lines), done.stderr
    assert "ran as root" in last
    every = {(r["local_steps"], r["compressor"]): r for r in json.loads(done.stdout)}
    assert tuple(every) == tuple((steps, name) for steps in (0, 4) for name in names)
    records = {name: every[0, name] for name in names}
    dense, topk = records.values()
    for record in every.values():
        assert (record["nproc"], record["rate"]) == (2, 50)
        assert (record["up"], record["down"]) == (50, 1000)
        assert record["utilisation"] == pytest.approx(record["compute"] / record["seconds"])
        assert 0 < record["loss"] < 10
        assert record["compute_alone"] == dense["compute_alone"] >= record["compute"] > 0
        parts = [record[name] for name in ("compute", "select", "communicate")]
        assert sum(parts) <= record["seconds"] * (1 + 1e-9)
        assert record["seconds"] > record["select"] + record["communicate"] > 0
    numel = 269_722
    assert dense["bytes"] == pytest.approx(4 * numel, rel=0.05)  # a ring of two: 2(n−1)/n = 1
    assert 8 * 270 < topk["bytes"] < 0.02 * dense["bytes"]
    assert dense["seconds"] > 0.9 * 8 * dense["bytes"] / 50e6
    exchange = dense["seconds"] - dense["compute_alone"]
    assert dense["communicate"] == pytest.approx(max(exchange, 0))
    assert topk["select"] > 0 == dense["select"]
    assert dense["overlapped"] is None
    for name, record in records.items():  # one exchange in four steps
        local = every[4, name]
        assert local["bytes"] == pytest.approx(record["bytes"] / 4, rel=0.1, abs=1000)
    # a ring of two sends what it receives: the faster direction is of no use
    assert every[4, "none"]["seconds"] > 0.9 * 8 * numel / 50e6
    assert every[4, "none"]["ratio"] is None


def test_steps_in_which_a_compressor_measures_are_not_counted(monkeypatch):
    asked = []

    def launch(cluster, function, config):
        asked.append(config.steps)
        settling = config.steps - 10  # slow, long and lossy until it has chosen
        values = [9.0] * settling + [1.0] * 10
        records = [{"select_seconds": v, "selected": v, "target": 1} for v in values]
        records = [r | dict.fromkeys(LANES, r["select_seconds"]) for r in records]
        losses = [float(step) for step in range(config.steps)]
        result = RunResult(losses=losses, seconds=values, records=records)
        return [(result, values)]

    monkeypatch.setattr(run, "launch", launch)
    cluster = Cluster(("a",), "198.18.0.1", 10**6, 10**6)
    config = RunConfig(workload="resnet20-digits", nproc=1, steps=10)
    for name, options, settling in (
        ("topk", {}, 0),
        ("lags", {}, 121),
        ("lags", {"calibrate": 3}, 19),
        ("lags", {"adaptive": False}, 0),
        ("powersgd", {}, 0),
    ):
        record, losses, seconds = run.train(
            config.replace(compressor=name, options=options), cluster, compute=0.5
        )
        assert asked.pop() == 10 + settling
        assert record["seconds"] == record["bytes"] == record["quality"] == 1
        assert record["select"] == record["communicate"] == 1
        assert record["loss"] == 9  # of the tenth step, as that of all others
        assert losses == list(range(10))
        assert len(seconds) == 10


def test_local_steps_are_averaged_over_whole_intervals(monkeypatch):
    asked = []

    def launch(cluster, function, config):
        asked.append((config.steps, config.local_steps))
        steps = range(config.steps)
        # the first interval is slow, and then every fourth step exchanges
        values = [9.0 if step < 4 else 5.0 if step % 4 == 3 else 1.0 for step in steps]
        records = [{"select_seconds": 9.0, "selected": 9, "target": 1}]
        records += [{"select_seconds": 2.0, "selected": 1, "target": 1}] * (config.steps // 4 - 1)
        records = [r | dict.fromkeys(LANES, r["select_seconds"]) for r in records]
        result = RunResult(losses=[1.0] * len(steps), seconds=values, records=records)
        return [(result, values)]

    monkeypatch.setattr(run, "launch", launch)
    cluster = Cluster(("a",), "198.18.0.1", 10**6, 10**7)
    config = RunConfig(workload="resnet20-digits", nproc=1, steps=10, local_steps=4)
    record, losses, seconds = run.train(config, cluster, compute=0.5)
    assert asked == [(16, 4)]
    assert len(losses) == 12
    assert seconds == [1, 1, 1, 5] * 3
    assert record["seconds"] == record["bytes"] == 2
    assert record["select"] == record["communicate"] == 0.5
    assert record["quality"] == 1
    assert record["utilisation"] == 0.25
    assert (record["rate"], record["up"], record["down"]) == (1, 1, 10)


@contextlib.contextmanager
def running(folder):
    """A lab whose ranks have entered their namespaces, and the process that runs it."""
    with Program(folder, "-m", "gradstats", *LAB[1:], "--steps", "100000") as process:
        names = [f"gradstats-lab-{process.pid}-{rank}" for rank in range(2)]
        while not all(name in ip("netns") and ip("netns", "pids", name) for name in names):
            assert process.poll() is None, process.stderr
            time.sleep(0.1)
        yield process
        process.kill(signal.SIGTERM)
        process.wait()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("then", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_twice_leaves_nothing(lab, then, tmp_path):
    with running(tmp_path) as process:
        for number in (signal.SIGINT, then):
            os.killpg(process.pid, number)  # as a terminal does, or a supervisor
            time.sleep(0.05)
        ends = {130: "gradstats: interrupted", 143: "gradstats: terminated"}
        code = process.wait()
        assert code in (130, 128 + then)  # of two at once, either may be first
        # c10d's warnings are off where its ranks' processes are not forked
        lines = [line for line in process.stderr.splitlines() if "[c10d]" not in line]
        assert lines == [ends[code]]


@pytest.mark.distributed
def test_what_a_killed_lab_leaves_ends_with_the_next(lab, tmp_path):
    with running(tmp_path) as process:
        process.kill()
        process.wait()
        name = f"gradstats-lab-{process.pid}-0"
        assert name in ip("netns")
        # its ranks end by themselves, and other programs may be there
        left = subprocess.Popen(["ip", "netns", "exec", name, "sleep", "1000"])
        while str(left.pid) not in ip("netns", "pids", name).split():
            time.sleep(0.01)
    with shaped_network(1, 10**9):
        assert f"gradstats-lab-{process.pid}" not in ip("netns")
        assert left.wait(timeout=10) == -signal.SIGKILL


@pytest.mark.distributed
def test_ranks_are_the_users_who_called_sudo(lab, monkeypatch):
    nobody = pwd.getpwnam("nobody")
    monkeypatch.setenv("SUDO_UID", str(nobody.pw_uid))
    monkeypatch.setenv("SUDO_GID", str(nobody.pw_gid))
    groups = sorted(os.getgrouplist(nobody.pw_name, nobody.pw_gid))
    uids, gids = ("\t".join([str(number)] * 4) for number in nobody[2:4])
    with tempfile.TemporaryDirectory() as folder, shaped_network(2, 10**9) as network:
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
        for numbers, of, refused, home, owner in launch(network, cases.whose, folder):
            assert numbers == {(uids, gids)}
            assert of == groups
            assert refused == 3
            assert home == nobody.pw_dir
            assert owner == nobody.pw_uid
        with pytest.raises(RunFailedError, match=r"rank [01] failed: LookupError: .*such thing"):
            launch(network, cases.failing)
        monkeypatch.delenv("SUDO_UID")
        for numbers, _, refused, _, owner in launch(network, cases.whose, folder):
            assert numbers == {("\t".join("0000"), "\t".join("0000"))}
            assert (refused, owner) == (0, 0)


def test_the_caller_is_who_sudo_says(monkeypatch):
    for name in ("SUDO_UID", "SUDO_GID"):
        monkeypatch.delenv(name, raising=False)
    assert caller() is None
    monkeypatch.setenv("SUDO_UID", "0")  # root called sudo
    assert caller() is None
    nobody = pwd.getpwnam("nobody")
    monkeypatch.setenv("SUDO_UID", str(nobody.pw_uid))
    assert (caller().uid, caller().gid) == (nobody.pw_uid, nobody.pw_gid)
    monkeypatch.setenv("SUDO_GID", "0")  # as sudo says, not as the list of users does
    assert caller().gid == 0
    for name, wrong in (("SUDO_GID", "-1"), ("SUDO_UID", "me"), ("SUDO_UID", str(2**40))):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(InputError, match=r"no user .* unset SUDO_UID"):
            caller()


def kill_while_exchanging(namespace):
    """Kill the rank in a namespace once it has sent 2 MB."""
    sent, end = 0, time.monotonic() + 60
    while sent < 2e6:
        assert time.monotonic() < end, "the ranks exchange nothing"
        time.sleep(0.1)
        (link,) = json.loads(ip("-n", namespace, "-s", "-json", "link", "show", "eth0"))
        sent = link["stats64"]["tx"]["bytes"]
    os.kill(int(ip("netns", "pids", namespace)), signal.SIGKILL)


@pytest.mark.distributed
def test_a_killed_rank_ends_the_others(lab):
    with shaped_network(2, 50 * 10**6) as network:
        killer = threading.Thread(target=kill_while_exchanging, args=[network.ranks[1]])
        killer.start()
        with pytest.raises(RunFailedError, match=r"rank [01] failed: .*") as raised:
            measure_network(network, 500_000, 0.1, [])
        killer.join()
        assert "\n" not in str(raised.value)


def test_a_burst_is_what_tc_is_told(lab):
    with shaped_network(1, 10**8, burst=8192) as network:
        shown = subprocess.run(
            ["tc", "-n", network.ranks[0], "qdisc"], capture_output=True, text=True
        ).stdout
        assert "rate 100Mbit burst 8Kb" in shown
        (link,) = json.loads(ip("-n", network.ranks[0], "-json", "-d", "link", "show", "eth0"))
        assert link["gso_max_size"] < 8192
    assert "at least 4096" in refused("bench-network", "--burst", "100")


@pytest.mark.slow
@pytest.mark.distributed
def test_a_network_measured_in_the_lab_is_its_links_and_makes_a_plan(lab, tmp_path):
    # messages of a whole second: of shorter ones a busy machine's pauses are a fifth, as CI showed
    file = tmp_path / "network.json"
    short = ("--steps", "5", "--batch-size", "4", "--compressor", "none", "--compressor")
    done = terminal.run(*LAB[1:], *short, "torch-topk", "--measure", file)
    assert done.returncode == 0, done.stderr
    assert f"wrote {file}" in done.stderr
    network = Network.load(file)
    assert network.about["rate"] == 50e6
    assert {line.world for line in network.lines if line.operation in ALGORITHMS} == {2}
    alpha, beta = network.link()
    assert alpha.value < 0.01
    assert beta.value == pytest.approx(8 / 50e6, rel=0.15)  # headers are 4 % of it
    for operation, size in (("all_reduce", 2e6), ("all_gather", 1e6)):
        bound = size * 8 / 50e6  # 2(n - 1)/n and n - 1 times the bytes, each 1 for two ranks
        seconds = network.line(operation, 2).at(size)
        assert bound - 0.006 < seconds < 3 * bound + 0.05, operation  # a bucket saves up 5 ms
    shape = {"model": np.zeros(269_722, np.float32)}
    (dense,) = plan(shape, network, 0.05, [2], compressors=["none"])
    assert dense["transfer"] == pytest.approx(4 * 269_722 * beta.value, rel=0.05)


@pytest.mark.slow
@pytest.mark.distributed
def test_the_experiment_in_short(lab, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run, "_LONGEST_MESSAGE_S", 0.1)  # of each size a tenth of the bytes

    def program(*options):
        words = ["resnet20-digits", "--results", str(tmp_path), "--steps", "6", *options]
        words += ["--only", "none", "topk", "torch-topk"]
        monkeypatch.setattr(sys, "argv", ["experiment.py", *words])
        experiment.main()
        return capsys.readouterr().out

    assert program("--measure") == program()
    stored = (tmp_path / "network-resnet20-digits.jsonl").read_text().splitlines()
    setting, *rows = map(json.loads, stored)
    assert [row["compressor"] for row in rows] == ["none", "topk", "torch-topk"]  # run once
    dense, ours, theirs = rows
    assert ours["losses"] == theirs["losses"]
    assert ours["quality"] == 1
    assert dense["losses"][0] == pytest.approx(ours["losses"][0], abs=1e-3)
    assert ours["bytes"] < 0.02 * dense["bytes"]
    # the rate was chosen so that a dense step communicates a tenth of its time
    bits = 8 * 4 * setting["numel"] / setting["rate"]
    assert bits / (bits + setting["compute"]) == pytest.approx(0.1, rel=0.06)
    assert Network.load(tmp_path / "network-resnet20-digits.json").about["rate"] == setting["rate"]
