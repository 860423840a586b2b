"""Trainers, TensorBoard, safetensors and pandas: the real libraries, running the code of docs/howto/trainers.md."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import warnings
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import DATA, ROOT
from ranks import run_ranks
from support.programs import program
from torch.utils.data import DistributedSampler
from workers import trainers as cases

import gradstats
from capture import CaptureWarning
from gradstats.errors import InputError, TraceError
from gradstats.trace import Layer, TraceWriter, create_trace
from gradstats.trace.sources import open_source

pytestmark = [
    # These models train faster than any disk writes.
    pytest.mark.filterwarnings("ignore:.*slower than the training:capture.CaptureWarning"),
    # Lightning's own use of torch
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

PAGE = (ROOT / "docs/howto/trainers.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def code(section):
    return re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)


def batches(size=cases.BATCH, ranks=1):
    """Return, for every step, what each rank sees: batches in turn."""
    return [list(b.split(size)) for b in cases.tokens().split(size * ranks)]


def agree(captured, expected):
    """Sums in another order differ in the last bits, and training lets that grow a little."""
    np.testing.assert_allclose(captured, expected, rtol=1e-4, atol=1e-6)


TRAINERS = (
    *("capture.integrations.lightning", "capture.integrations.huggingface"),
    *("transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
)
"""What takes seconds to import, in every rank."""


def run(folder, script, ranks=0):
    """Run a script that starts its ranks, or in so many that are started for it."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    path = [str(ROOT / each) for each in ("tests", "tests/distributed", "benchmarks")]
    env = {"PYTHONPATH": ":".join(path), "GLOO_SOCKET_IFNAME": "lo"}
    program("train.py", cwd=folder, env=env, ranks=ranks, imports=TRAINERS)


MOVED = {"kinds": ["gradient", "update", "weight"]}


def updates_agree(trace):
    """Compare what the trainer's own optimizer was seen to apply with how the weights moved."""
    for before, step in pairwise(trace.steps()):
        moved = trace.read(before, 0, "weight") - trace.read(step, 0, "weight")
        assert np.array_equal(trace.read(step, 0, "update"), moved)
        assert moved.any()


def huggingface(folder, path, steps, *, resume=None, training=None, **options):
    from transformers import Trainer

    from capture.integrations.huggingface import CaptureCallback

    args = cases.arguments(folder, max_steps=steps, **(training or {}))
    callback = CaptureCallback(path, **options)
    rows = {"train_dataset": cases.Sentences(), "eval_dataset": cases.Sentences()}
    trainer = Trainer(cases.gpt2(), args, **rows, callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return gradstats.open_trace(path)


def lightning(path, *, trainer=None, **options):
    from lightning.pytorch import Trainer

    from capture.integrations.lightning import CaptureCallback

    settings = cases.SETTINGS | {"max_steps": 3} | (trainer or {})
    Trainer(callbacks=[CaptureCallback(path, **options)], **settings).fit(
        cases.module(), cases.loader()
    )
    return gradstats.open_trace(path)


def test_huggingface_captures_what_the_optimizer_uses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"model": cases.gpt2(), "dataset": cases.Sentences()}
    names["args"] = cases.arguments("out", max_grad_norm=0.1)
    exec(code("Hugging Face")[0], names)
    trace = gradstats.open_trace("run.zarr")
    assert trace.steps() == [0, 10, 20]
    assert [la.name for la in trace.layers] == [n for n, _ in names["model"].named_parameters()]
    assert trace.scalars()["learning_rate"].tolist() == [cases.RATE] * 3
    seen = cases.plain_loop(cases.gpt2(), cases.gpt2_loss, batches(), clip=0.1)
    assert not np.array_equal(seen[0][1], seen[0][2])
    losses = trace.scalars()["loss"]
    for step, loss in zip(trace.steps(), losses, strict=True):
        agree(trace.read(step), seen[step][2])
        assert loss == pytest.approx(seen[step][3], rel=1e-4)


def test_huggingface_accumulates_and_resumes(tmp_path):
    training = {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.0,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    seen = cases.plain_loop(cases.gpt2(), cases.gpt2_loss, batches(2 * cases.BATCH))
    trace = huggingface(tmp_path, tmp_path / "a.zarr", 2, training=training, **MOVED)
    assert trace.steps() == [0, 1]
    updates_agree(trace)
    again = huggingface(
        tmp_path, tmp_path / "b.zarr", 4, training=training, resume=str(tmp_path / "checkpoint-2")
    )
    assert again.steps() == [2, 3]
    for step in range(4):
        agree((trace if step < 2 else again).read(step), seen[step][1])


def test_huggingface_evaluates_and_its_losses_are_of_training_alone(tmp_path):
    training = {"max_grad_norm": 0.0, "eval_strategy": "steps", "eval_steps": 1}
    trace = huggingface(tmp_path, tmp_path / "a.zarr", 3, training=training)
    seen = cases.plain_loop(cases.gpt2(), cases.gpt2_loss, batches()[:3])
    assert trace.scalars()["loss"] == pytest.approx([loss for *_, loss in seen], rel=1e-4)


@pytest.mark.slow
@pytest.mark.distributed
def test_huggingface_under_ddp_shows_each_rank_its_own_gradient(tmp_path):
    script = f"""
from workers import trainers as cases
from capture.integrations.huggingface import CaptureCallback
from transformers import Trainer
dataset, args = cases.Sentences(), cases.arguments("out", ddp_backend="gloo", max_grad_norm=0.1)
model = cases.gpt2()
trainer = Trainer(model, args, train_dataset=dataset, callbacks=[CaptureCallback("mean.zarr", 10)])
trainer.train()
model = cases.gpt2()
{code("Hugging Face")[1]}
import torch.distributed
torch.distributed.destroy_process_group()
"""
    run(tmp_path, script, ranks=2)
    mean, local = (gradstats.open_trace(tmp_path / f"{n}.zarr") for n in ("mean", "local"))
    seen = cases.plain_loop(cases.gpt2(), cases.gpt2_loss, batches(ranks=2), clip=0.1)
    assert local.world_size == 2
    for step in (0, 10, 20):
        for rank in range(2):
            agree(mean.read(step, rank), seen[step][2])
            agree(local.read(step, rank), seen[step][0][rank])


def test_lightning_captures_before_clipping(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = cases.SETTINGS | {"gradient_clip_val": 0.1}
    exec(
        code("Lightning")[0],
        {"module": cases.module(), "loader": cases.loader(), "settings": settings},
    )
    trace = gradstats.open_trace("run.zarr")
    assert trace.steps() == [0, 10, 20]
    assert trace.layers[0].name == "network.0.weight"
    assert trace.scalars()["learning_rate"].tolist() == [cases.RATE] * 3
    seen = cases.plain_loop(cases.network(), cases.network_loss, batches(), clip=0.1)
    assert not np.array_equal(seen[0][1], seen[0][2])
    for step, loss in zip(trace.steps(), trace.scalars()["loss"], strict=True):
        agree(trace.read(step), seen[step][1])
        assert loss == pytest.approx(seen[step][3], rel=1e-5)


def test_lightning_accumulates(tmp_path):
    trace = lightning(tmp_path / "a.zarr", trainer={"accumulate_grad_batches": 2}, **MOVED)
    updates_agree(trace)
    seen = cases.plain_loop(cases.network(), cases.network_loss, batches(2 * cases.BATCH))
    assert trace.steps() == [0, 1, 2]
    for step, loss in enumerate(trace.scalars()["loss"]):
        agree(trace.read(step), seen[step][1])
        assert loss == pytest.approx(seen[step][3], rel=1e-5)


def test_lightning_keeps_what_was_captured_before_a_failure(tmp_path):
    from lightning.pytorch import Trainer

    from capture.integrations.lightning import CaptureCallback

    module = cases.module()
    original = module.training_step

    def fail_in_the_third(batch):
        if module.global_step == 2:
            raise ArithmeticError("lost")
        return original(batch)

    module.training_step = fail_in_the_third
    callback = CaptureCallback(tmp_path / "a.zarr")
    with pytest.raises(ArithmeticError, match="lost"):
        Trainer(callbacks=[callback], **cases.SETTINGS).fit(module, cases.loader())
    assert gradstats.open_trace(tmp_path / "a.zarr").steps() == [0, 1]


@pytest.mark.slow
@pytest.mark.distributed
def test_lightning_under_ddp_captures_a_compressor(tmp_path):
    script = f"""
from workers import trainers as cases
from capture.integrations.lightning import CaptureCallback
from lightning.pytorch import Trainer
module, loader, settings = cases.module(), cases.loader(), cases.SETTINGS
{code("Lightning")[1]}
if trainer.global_rank == 0:
    from torch.utils.tensorboard import SummaryWriter
    from capture.integrations.tensorboard import add_step
    with SummaryWriter("logs") as writer:
        add_step(writer, state.last)
"""
    run(tmp_path, script)
    trace = gradstats.open_trace(tmp_path / "topk.zarr")
    assert (trace.ranks, trace.steps()) == ([0, 1], list(range(cases.STEPS)))
    rows = cases.tokens()
    for rank in range(2):
        # what Lightning deals the samples with; every rank starts from the same weights
        dealt = list(DistributedSampler(rows, num_replicas=2, rank=rank))
        first = [[rows[dealt[: cases.BATCH]]]]
        (seen,) = cases.plain_loop(cases.network(), cases.network_loss, first)
        agree(trace.read(0, rank), seen[0][0])
        k = round(0.01 * trace.numel)
        residual = seen[0][0].copy()
        residual[np.argsort(np.abs(residual))[-k:]] = 0
        agree(trace.read(1, rank, "corrected") - trace.read(1, rank), residual)
        assert set(trace.scalars(rank)["selected"]) == {k}
    shown = scalars(tmp_path / "logs")
    assert shown["compression/selected"] == {cases.STEPS - 1: k}
    assert shown["compression/quality"] == {cases.STEPS - 1: 1}
    assert shown["compression/threshold"][cases.STEPS - 1] == pytest.approx(
        trace.scalars(0)["threshold"][-1]
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_lightning_in_half_precision_and_under_fsdp2(tmp_path):
    """Two trainings in ranks that are started for them; half precision is captured without the loss scale."""
    script = """
import torch
from capture.integrations.lightning import CaptureCallback
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule, fully_shard
from workers import trainers as cases
Trainer(
    callbacks=[CaptureCallback("half.zarr", comm_hook=allreduce_hook)],
    plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))],
    strategy="ddp", devices=2, **cases.SETTINGS | {"max_steps": 1},
).fit(cases.module(), cases.loader())
base = cases.module()
class Sharded(type(base)):
    def configure_model(self):
        if not isinstance(self.network, FSDPModule):
            for module in (self.network[0], self.network):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])
strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
Trainer(
    callbacks=[CaptureCallback("fsdp.zarr", kinds=["gradient", "local"])],
    strategy=strategy, devices=2, **cases.SETTINGS | {"max_steps": 3},
).fit(Sharded(), cases.loader())
"""
    run(tmp_path, script, ranks=2)
    half, sharded = (gradstats.open_trace(tmp_path / f"{n}.zarr") for n in ("half", "fsdp"))
    rows = cases.tokens()
    dealt = [list(DistributedSampler(rows, num_replicas=2, rank=rank)) for rank in range(2)]
    first = [[rows[each[: cases.BATCH]] for each in dealt]]
    ((local, mean, *_),) = cases.plain_loop(cases.network(), cases.network_loss, first)
    assert (sharded.steps(), sharded.shard_ranks(0)) == ([0, 1, 2], [0, 1])
    agree(sharded.read(0), mean)
    for rank in range(2):
        agree(sharded.read(0, rank, "local"), local[rank])
        # of the trainings that are compared above the loss is that of the first rank's batch
        rank_loss = half.scalars(rank)["loss"][0]
        assert 0.1 < rank_loss < 10  # not 1,024 times that
        error = np.linalg.norm(half.read(0, rank) - local[rank]) / np.linalg.norm(local[rank])
        assert error < 0.01  # of half precision


@pytest.mark.distributed
def test_huggingface_under_fsdp2(tmp_path):
    """The callback on a sharded model, in the order of the Trainer's events: accelerate itself shards on no CPU."""
    run(
        tmp_path,
        """
import numpy as np
import torch.distributed as dist
from workers import trainers as cases
dist.init_process_group("gloo")
rank = dist.get_rank()
np.save(f"{rank}.npy", cases.sharded_by_huggingface(rank, 2, "fsdp.zarr"))
dist.destroy_process_group()
""",
        ranks=2,
    )
    found = [np.load(tmp_path / f"{rank}.npy") for rank in range(2)]
    trace = gradstats.open_trace(tmp_path / "fsdp.zarr")
    assert (trace.steps(), trace.shard_ranks(0)) == ([7, 8], [0, 1])
    for step, mean in enumerate(np.mean(found, axis=0)):
        agree(trace.read(7 + step), mean)
    assert trace.scalars()["learning_rate"].tolist() == [cases.RATE] * 2


def test_huggingface_hands_over_the_scaler_where_a_hook_is_captured(tmp_path, monkeypatch):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from capture.integrations import trainer as base
    from capture.integrations.huggingface import CaptureCallback

    given, scaler = [], torch.amp.GradScaler("cpu", init_scale=4.0)
    model = SimpleNamespace(register_comm_hook=lambda *_: None)
    monkeypatch.setattr(base, "unwrap", lambda model: SimpleNamespace(module=model, ddp=model))

    class Recorder:
        def __init__(self, *, path, model, schedule=1, start_step=0, **options):
            given.append(options)

        def wrap(self, state, hook):
            return state, hook

        def close(self):
            pass

    monkeypatch.setattr(base, "Capture", Recorder)
    trainer = SimpleNamespace(
        model_wrapped=model,
        accelerator=SimpleNamespace(scaler=scaler),
        training_step=lambda *_: torch.ones(()),
    )
    for hook in (None, allreduce_hook):
        callback = CaptureCallback(tmp_path / "a.zarr", comm_hook=hook, trainer=trainer)
        callback.on_train_begin(None, SimpleNamespace(global_step=0), None, model=model)
    again = {"overwrite": "number"}
    assert given == [again, {"scaler": scaler, **again}]


@pytest.mark.slow
def test_huggingface_begins_again(tmp_path):
    """After running out of memory (auto_find_batch_size), and by a second train(): it goes on, and so do traces."""
    from transformers import Trainer

    from capture.integrations.huggingface import CaptureCallback

    class Short(Trainer):
        """Out of memory in the second step of a batch of 4."""

        failed = 0

        def training_step(self, model, inputs, *rest):
            rows = len(inputs["input_ids"])
            if rows == 4 and self.state.global_step == self.failed:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().training_step(model, inputs, *rest)

    options = {"max_steps": 2, "auto_find_batch_size": True}
    for failed, names in ((0, ["a.zarr", "a-2.zarr"]), (1, ["b.zarr", "b-2.zarr", "b-3.zarr"])):
        args = cases.arguments(tmp_path, **options)
        trainer = Short(cases.gpt2(), args, train_dataset=cases.Sentences())
        trainer.failed = failed
        callback = CaptureCallback(tmp_path / names[0], trainer=trainer)
        trainer.add_callback(callback)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*earlier training")
            trainer.train()
            trainer.train()
        traces = [gradstats.open_trace(tmp_path / name) for name in names]
        assert [t.steps() for t in traces] == [[0]] * failed + [[0, 1]] * 2
        assert sorted(p.name for p in tmp_path.glob(f"{names[0][0]}*")) == sorted(names)
        assert "training_step" not in vars(trainer)  # nothing is left of it
        losses = [h["loss"] for h in trainer.state.log_history if "loss" in h]
        assert np.isfinite(traces[-1].scalars()["loss"]).all()
        assert losses == [] or len(losses) <= 2


def test_lightning_begins_again(tmp_path):
    """Folds, or a second fit(): a trace for each, and nothing of one that failed while it accumulated."""
    from lightning.pytorch import Trainer

    from capture.integrations.lightning import CaptureCallback

    callback = CaptureCallback(tmp_path / "a.zarr")
    settings = cases.SETTINGS | {"max_steps": 3}
    module = cases.module()
    micro_step, losses = module.training_step, []

    def fail_in_the_second(batch):
        if losses:
            raise ArithmeticError("lost")
        losses.append(micro_step(batch))
        return losses[0]

    module.training_step = fail_in_the_second
    with pytest.raises(ArithmeticError, match="lost"):
        Trainer(callbacks=[callback], accumulate_grad_batches=2, **settings).fit(
            module, cases.loader()
        )
    Trainer(callbacks=[callback], **settings).fit(cases.module(), cases.loader())
    again = Trainer(callbacks=[callback], **settings)
    with pytest.warns(CaptureWarning, match=r"captured in .*a-2\.zarr"):
        again.fit(cases.module(), cases.loader())
    first, second = (gradstats.open_trace(tmp_path / n) for n in ("a.zarr", "a-2.zarr"))
    assert first.steps() == second.steps() == [0, 1, 2]
    assert np.array_equal(first.read(2), second.read(2))
    assert np.array_equal(first.scalars()["loss"], second.scalars()["loss"])
    assert callback.capture.path == tmp_path / "a-2.zarr"


def begins_again(rank, world, folder):
    """Begin a training three times with one DDP model, once compiled, and the hook that it has already."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel

    from capture.integrations.trainer import TrainerCapture

    net = cases.network()
    ddp = DistributedDataParallel(net)
    callback = TrainerCapture(f"{folder}/run.zarr", comm_hook=allreduce_hook)
    gradients = []
    for model in (ddp, torch.compile(ddp, backend="eager"), ddp):
        callback._open(model, 0, None)
        rows = cases.tokens()[8 * rank :][:8]
        net.zero_grad()
        cases.network_loss(ddp, rows).backward()
        callback.capture.step()
        callback._close()
        own = torch.autograd.grad(cases.network_loss(net, rows), list(net.parameters()))
        gradients.append(cases.flat(own).numpy())
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
    return gradients


@pytest.mark.distributed
def test_one_ddp_model_is_trained_again_and_torch_compile_hides_none(tmp_path):
    for rank, gradients in enumerate(run_ranks(2, begins_again, str(tmp_path))):
        for name, gradient in zip(("run", "run-2", "run-3"), gradients, strict=True):
            agree(gradstats.open_trace(tmp_path / f"{name}.zarr").read(0, rank), gradient)


def test_callbacks_refuse_at_once_what_cannot_work(tmp_path, monkeypatch):
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from lightning.pytorch.strategies import FSDPStrategy
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from capture.integrations.huggingface import CaptureCallback as ForTransformers
    from capture.integrations.lightning import CaptureCallback as ForLightning

    path = tmp_path / "a.zarr"
    for callback in (ForTransformers, ForLightning):
        with pytest.raises(TypeError, match="shcedule"):
            callback(path, shcedule=1)
    with pytest.raises(InputError, match="trainer="):
        ForTransformers(path, comm_hook=allreduce_hook)
    with pytest.raises(InputError, match="DistributedDataParallel"):
        lightning(path, comm_hook=allreduce_hook)
    with pytest.raises(InputError, match="FSDPStrategy"):
        ForLightning(path).on_train_start(SimpleNamespace(strategy=FSDPStrategy()), None)
    PartialState(cpu=True)
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(InputError, match="DEEPSPEED"):
        ForTransformers(path).on_train_begin(
            None, SimpleNamespace(global_step=0), None, model=cases.network()
        )
    assert not path.exists()
    path.touch()
    with pytest.raises(TraceError, match="not a trace"):
        lightning(path)


@pytest.mark.parametrize(
    ("module", "library"),
    [("huggingface", "transformers"), ("lightning", "lightning"), ("tensorboard", "tensorboard")],
)
def test_a_missing_library_names_its_extra(module, library):
    script = f"import sys\nsys.modules[{library!r}] = None\nimport capture.integrations.{module}"
    done = program("-c", script, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: capture.integrations.")
    assert last.endswith(f"pip install 'gradstats[{module}]'")


def written(folder):
    """Return the event files in a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def scalars(folder):
    """Return {tag: {step: value}} of the event files in a folder."""
    events = written(folder)
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_the_page_from_a_trace_to_other_tools(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink(DATA / "resnet20-ef.zarr", "run.zarr")
    names = {}
    for section in ("TensorBoard", "safetensors", "pandas"):
        for block in code(section):
            exec(block, names)
    dataset = gradstats.over_training("run.zarr")
    shown = scalars("logs/gradients")
    # a Laplace has no shape: that series is all NaN
    assert len(shown) == sum(int(v.notnull().any("step").sum()) for v in dataset.values())
    steps = dataset["step"].values.tolist()
    for tag, labels in {
        "loss/0": {},
        "rms/0/corrected/all": {"kind": "corrected"},
        "threshold/0/gradient/all/0.001": {"kind": "gradient", "ratio": 0.001},
    }.items():
        expected = dataset[tag.split("/")[0]].sel(labels).values.ravel().tolist()
        assert shown[tag] == pytest.approx(dict(zip(steps, expected, strict=True)))

    trace = gradstats.open_trace("run.zarr")
    assert names["steps"].loc[10, "kind"].tolist() == ["gradient", "corrected"]
    assert names["steps"]["numel"].unique().tolist() == [trace.numel]
    assert names["decay"]["p"].dtype == np.float64
    assert (names["decay"]["trace"] == "run").sum() == 8  # the others are controls
    assert names["everything"].index.names == [*dataset["nll"].dims, "ratio"]


def test_nan_is_left_out_and_steps_are_needed(tmp_path):
    import xarray

    from capture.integrations.tensorboard import write_dataset

    data = {"a": ("step", [1.0, math.nan, 3.0]), "b": ("rank", [1.0])}
    write_dataset(xarray.Dataset(data, {"step": [4, 5, 6]}), tmp_path)
    assert scalars(tmp_path) == {"a": {4: 1.0, 6: 3.0}}
    with pytest.raises(InputError, match="it has rank"):
        write_dataset(xarray.Dataset({"b": ("rank", [1.0])}), tmp_path)


def test_a_live_compressor_in_tensorboard(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    from capture.integrations.tensorboard import add_step
    from gradstats.hooks import StepRecord

    with SummaryWriter(str(tmp_path)) as writer:
        add_step(writer, StepRecord(3, 0.5, 12, 1000, 96, target=10, union=20))
        add_step(writer, StepRecord(4, math.nan, 0, 1000, 0))
    shown = scalars(tmp_path)
    assert shown["compression/threshold"] == {3: 0.5}
    assert shown["compression/selected"] == {3: 12, 4: 0}
    assert shown["compression/bytes_sent"] == {3: 96, 4: 0}
    assert shown["compression/quality"] == {3: pytest.approx(1.2)}
    assert shown["compression/build_up"] == {3: 2}
    assert shown["compression/density"] == {3: pytest.approx(0.02), 4: 0}
    assert shown["compression/bits_per_element"] == {3: pytest.approx(0.768), 4: 0}


class Fake:
    """A run of Weights & Biases, or MLflow."""

    def __init__(self):
        self.logged = {}

    def log(self, values, step):
        self.logged.setdefault(step, {}).update(values)

    log_metrics = log
    Histogram = staticmethod(lambda np_histogram: np_histogram)


def test_the_same_dictionary_goes_to_every_logger(tmp_path, monkeypatch):
    from torch.utils.tensorboard import SummaryWriter

    from capture.integrations.loggers import (
        MlflowLogger,
        WandbLogger,
        dataset_values,
        gradient_values,
        step_values,
    )
    from capture.integrations.tensorboard import TensorBoardLogger
    from gradstats.hooks import StepRecord

    monkeypatch.setitem(sys.modules, "wandb", Fake())
    x = np.random.default_rng(0).laplace(size=1000).astype(np.float32)
    x[:10] = 0
    values = gradient_values(x, "fc") | step_values(StepRecord(3, 0.5, 12, 1000, 96, target=10))
    magnitudes = np.sort(np.abs(x))[::-1]
    assert values["fc/mean"] == pytest.approx(magnitudes[:990].mean(), rel=1e-6)
    assert values["fc/zero_fraction"] == 0.01
    assert values["fc/threshold_0.01"] == pytest.approx(magnitudes[9], rel=1e-2)
    assert values["compression/quality"] == pytest.approx(1.2)
    wandb, mlflow = Fake(), Fake()
    WandbLogger(wandb)(values, 3)
    MlflowLogger(mlflow)(values, 3)
    with SummaryWriter(str(tmp_path)) as writer:
        TensorBoardLogger(writer)(values, 3)
    numbers = {n: v for n, v in values.items() if n != "fc/magnitudes"}
    counts, edges = values["fc/magnitudes"]
    expected = np.histogram(magnitudes[:990], edges)[0]
    assert counts.tolist() == expected.tolist()
    assert wandb.logged[3].items() >= numbers.items()
    assert np.array_equal(wandb.logged[3]["fc/magnitudes"][0], expected)
    assert mlflow.logged[3].items() >= numbers.items()
    assert sum(v for n, v in mlflow.logged[3].items() if "/from_" in n) == 990
    for low, count in zip(edges[:-1], expected, strict=True):
        assert mlflow.logged[3][f"fc/magnitudes/from_{low:.3g}"] == count
    (event,) = written(tmp_path).Histograms("fc/magnitudes")
    shape = event.histogram_value
    assert (event.step, shape.min, shape.max, shape.num) == (3, edges[0], edges[-1], 990)
    assert (shape.bucket_limit, shape.bucket) == (edges[1:].tolist(), expected.tolist())
    assert edges[:-1] @ expected < shape.sum < edges[1:] @ expected
    assert edges[:-1] ** 2 @ expected < shape.sum_squares < edges[1:] ** 2 @ expected
    shown = scalars(tmp_path)
    assert {n: shown[n][3] for n in numbers} == pytest.approx(numbers)
    assert gradient_values(np.zeros(3)) == {"gradient/zero_fraction": 1.0}
    # k is a share of all elements, not of those that are not zero
    sparse = np.zeros(1000, np.float32)
    sparse[:50] = np.arange(1, 51)
    found = gradient_values(sparse)
    thresholds = [found[f"gradient/threshold_{ratio}"] for ratio in (0.1, 0.01, 0.001)]
    assert thresholds == [0.0, 41.0, 50.0]
    steps = dict(dataset_values(gradstats.over_training(DATA / "resnet20.zarr", models=[])))
    assert list(steps) == [10, 100, 1000, 2999]
    assert steps[10]["loss/0"] == pytest.approx(2.38, abs=0.01)


def test_a_step_exported_has_the_same_statistics(trace_path, tmp_path):
    from safetensors.torch import load_file, safe_open

    from gradstats.analysis.fits import fit_records
    from gradstats.trace.export import save_safetensors

    trace = gradstats.open_trace(trace_path)
    kind = trace.kinds(0)[-1]
    path = tmp_path / "a.safetensors"
    save_safetensors(trace_path, path, 100, kind=kind)
    tensors = load_file(path)
    assert {n: tuple(t.shape) for n, t in tensors.items()} == {
        la.name: la.shape for la in trace.layers
    }
    values = trace.read(100, kind=kind)
    for layer in trace.layers:
        assert np.array_equal(tensors[layer.name].numpy().ravel(), values[layer.slice])
    with safe_open(path, "pt") as file:
        about = file.metadata()
    assert json.loads(about.pop("layers")) == [layer.name for layer in trace.layers]
    assert about == {"trace": trace.name, "step": "100", "rank": "0", "kind": kind}
    told = [
        {
            f"{r['model']} {r['layer']} {name}": value
            for r in fit_records(source, models=["laplace", "dgamma"], per_layer=True, **chosen)
            for name, value in {**r["params"], "nll": r["nll"], "ks": r["ks"]}.items()
        }
        for source, chosen in (
            (open_source(trace), {"steps": [100], "ranks": [0], "kinds": [kind]}),
            (open_source(path), {}),
        )
    ]
    # safetensors sorts the parameters, and sums in another order differ in the last bits
    assert told[1] == pytest.approx(told[0], rel=1e-12, nan_ok=True)


def test_exports_of_scalars_and_nothing_and_to_nowhere(tmp_path):
    from safetensors.torch import load_file

    from gradstats.trace.export import save_safetensors

    layers = [Layer("scale", 0, ()), Layer("none", 1, (0, 3)), Layer("w", 1, (2, 1))]
    create_trace(tmp_path / "a.zarr", layers)
    writer = TraceWriter(tmp_path / "a.zarr", 0, dtype="bfloat16")
    writer.append(0, {"gradient": np.array([1, 2, 3], np.float32)})
    writer.close()
    save_safetensors(tmp_path / "a.zarr", tmp_path / "a.safetensors", 0)
    tensors = load_file(tmp_path / "a.safetensors")
    assert {n: t.tolist() for n, t in tensors.items()} == {
        "scale": 1.0,
        "none": [],
        "w": [[2.0], [3.0]],
    }
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    with pytest.raises(InputError, match="must end in"):
        save_safetensors(tmp_path / "a.zarr", tmp_path / "a.npz", 0)
    with pytest.raises(InputError, match="cannot write"):
        save_safetensors(tmp_path / "a.zarr", tmp_path / "missing" / "a.safetensors", 0)
    with pytest.raises(TraceError, match="no step 7"):
        save_safetensors(tmp_path / "a.zarr", tmp_path / "a.safetensors", 7)


def test_huggingface_monitors_what_the_optimizer_uses(tmp_path):
    from transformers import Trainer

    from capture.integrations.huggingface import CaptureCallback, MonitorCallback

    logged = []
    args = cases.arguments(tmp_path, max_steps=4, gradient_accumulation_steps=2, max_grad_norm=0.1)
    monitor = MonitorCallback(logged.append, every=2, trigger={"norm": 0.0}, following=1)
    capture = CaptureCallback(tmp_path / "run.zarr", monitor.triggered)
    Trainer(
        cases.gpt2(), args, train_dataset=cases.Sentences(), callbacks=[monitor, capture]
    ).train()
    seen = cases.plain_loop(cases.gpt2(), cases.gpt2_loss, batches(2 * cases.BATCH), clip=0.1)
    assert [v["gradient/step"] for v in logged] == [0, 2]
    for values in logged:
        gradient = seen[int(values["gradient/step"])][2]
        assert values["gradient/norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-3)
    assert gradstats.open_trace(tmp_path / "run.zarr").steps() == [0, 2]
    with pytest.raises(TypeError, match="windwo"):
        MonitorCallback(windwo=3)
    with pytest.raises(InputError, match="the trainer has its own optimizer: leave optimizer out"):
        MonitorCallback(optimizer=torch.optim.SGD([torch.zeros(1)], 0.1))


def test_lightning_monitors_into_the_logger(tmp_path):
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import CSVLogger

    from capture.integrations.lightning import MonitorCallback

    monitor = MonitorCallback(per_layer=True)
    logger = CSVLogger(tmp_path, name="", version="run")
    settings = cases.SETTINGS | {"max_steps": 3, "logger": logger, "log_every_n_steps": 1}
    Trainer(callbacks=[monitor], **settings).fit(cases.module(), cases.loader())
    assert monitor.monitor.values["gradient/step"] == 2
    metrics = pd.read_csv(tmp_path / "run" / "metrics.csv").dropna(subset="gradient/norm")
    assert metrics["gradient/step"].tolist() == [0, 1, 2]
    parts = metrics[[n for n in metrics if n.startswith("gradient/norm/")]]
    assert metrics["gradient/norm"].to_numpy() == pytest.approx(
        np.linalg.norm(parts.to_numpy(), axis=1), rel=1e-6
    )
