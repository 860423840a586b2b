"""Exchanges beside the training: in order, and on a device in a stream of their own; streams here only keep a log."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from gradstats.collectives import background
from gradstats.collectives.background import Background, at_once
from gradstats.collectives.header import Header, Kind, Moment, at_moment, moment
from gradstats.compressors import Layerwise, make_selector

CPU = torch.device("cpu")


def test_headers_say_the_step_in_which_an_exchange_was_asked_for():
    """Also in another thread, and where it begins when the training is further on."""
    background, free = Background(), threading.Event()
    first = background.submit(free.wait, CPU)  # keeps the thread
    asked = []
    for step in (3, 4):
        with at_moment(Moment(step, {"ratio": f"0.{step}"})):
            asked.append((moment(), background.submit(lambda: Header.now(Kind.FLAGS), CPU)))
            assert at_once(lambda: Header.now(Kind.FLAGS)).result().step == step
    free.set()
    assert first.result()
    headers = [pending.result() for _, pending in asked]
    assert [header.step for header in headers] == [3, 4]
    assert [header.details for header in headers] == [at.digest for at, _ in asked]
    assert headers[0].details != headers[1].details
    background.shutdown()


class Stream:
    """A stream that knows which marks came before what it does next."""

    def __init__(self, name, log):
        self.name, self.log, self.seen = name, log, set()

    def wait_event(self, event):
        assert event.stream is not None, "nothing was recorded yet: a wait for nothing"
        self.seen |= event.seen
        self.log.append(f"{self.name} waits for {event.stream}")


class Streams:
    """A device's streams as a module: each thread has a current one, the training's if no other."""

    def __init__(self):
        self.log = []
        self.training = Stream("training", self.log)
        self.local = threading.local()
        self.marks = 0
        outer = self

        class Event:
            stream = None

            def record(self, stream):
                outer.marks += 1
                stream.seen.add(outer.marks)
                self.stream, self.seen = stream.name, set(stream.seen)
                outer.log.append(f"{stream.name} marked")

        @contextmanager
        def stream(given):
            before, self.local.stream = self.current(), given
            yield
            self.local.stream = before

        self.module = SimpleNamespace(
            Event=Event,
            Stream=lambda device: Stream("exchange", self.log),
            stream=stream,
            current_stream=lambda device: self.current(),
        )

    def current(self):
        return getattr(self.local, "stream", self.training)

    def runs(self):
        self.log.append(f"{self.current().name} runs")


@pytest.fixture
def streams(monkeypatch):
    found = Streams()
    monkeypatch.setattr(background, "streaming", lambda device: found.module)
    return found


IN_ORDER = [
    "training marked",
    "exchange waits for training",
    "exchange runs",
    "exchange marked",
    "training waits for exchange",
]


def test_an_exchange_waits_for_what_it_reads_and_the_training_for_its_result(streams):
    beside = Background()
    pending = beside.submit(lambda: streams.runs() or 7, CPU)
    assert pending.result() == 7
    assert streams.log == IN_ORDER
    assert streams.training.seen == {1, 2}
    beside.shutdown()


@pytest.mark.parametrize("method", ["result", "end"])
def test_a_failed_exchange_is_waited_for_too(streams, method):
    def fails():
        streams.runs()
        raise KeyboardInterrupt

    beside = Background()
    pending = beside.submit(fails, CPU)
    if method == "result":
        with pytest.raises(KeyboardInterrupt):
            pending.result()
    else:
        pending.end()
    assert streams.log == IN_ORDER
    assert beside.submit(lambda: 1, CPU).result() == 1  # the thread is still there
    beside.shutdown()
    beside.shutdown()


def test_without_streams_there_is_a_thread_alone():
    beside = Background()
    names = [beside.submit(lambda: threading.current_thread().name, CPU).result() for _ in "ab"]
    assert names[0] == names[1] != threading.current_thread().name
    assert list(beside._streams) == []
    beside.shutdown()


def layers():
    return [("b", slice(600, 1000)), ("a", slice(0, 600))]


def steps(compressor, count=3):
    """Reduce some gradients of one rank alone, layer by layer."""
    torch.manual_seed(0)
    found = []
    for _ in range(count):
        corrected = torch.randn(1000)
        for layer in layers():
            compressor.push(corrected, [layer], None)
        reduced = compressor.reduce(corrected, None)
        found.append((reduced.mean.clone(), reduced.residual.clone(), reduced.selected))
    return found


@pytest.mark.distributed
def test_layers_are_exchanged_in_a_stream_of_their_own(streams, monkeypatch, one_rank):
    def made(**options):
        return Layerwise(lambda name, numel: make_selector("topk", 0.01), merge=0, **options)

    expected = steps(made(overlap=False))
    compressor = made()
    divide = compressor._update.divide

    def divided(ranks):
        streams.log.append("read")
        return divide(ranks)

    monkeypatch.setattr(compressor._update, "divide", divided)
    for got, want in zip(steps(compressor), expected, strict=True):
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
        assert got[2] == want[2] == 10
    # two messages a step: what is read was waited for, and every exchange for what it reads
    text = streams.log
    assert text.count("read") == 3
    for i, step in enumerate(range(3), 1):
        at = [j for j, line in enumerate(text) if line == "read"][step]
        assert text[:at].count("training waits for exchange") == 2 * i
        assert text[:at].count("exchange waits for training") == 2 * i
    compressor._background.shutdown()
