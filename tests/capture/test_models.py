"""The papers' models: layouts, recipes, one step of training each; speech, its data and its error rates."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import data_set
from support.every import every
from support.terminal import Runner
from torch.utils.flop_counter import FlopCounterMode

from capture.workloads import WORKLOADS, RunConfig, run, speech
from capture.workloads.classification import make_model, make_task
from capture.workloads.images import (
    ImageFolder,
    load_cifar10,
    load_cifar100,
    load_mnist,
    side_of,
)
from capture.workloads.layouts import backward_pass, layout
from capture.workloads.optimizers import make_optimizers
from capture.workloads.speech import (
    LABELS,
    BidirectionalLSTM,
    DeepSpeech,
    decode,
    error_rates,
    load_an4,
    mel_spectrogram,
)
from capture.workloads.text import load_wikitext
from gradstats.errors import InputError
from gradstats.trace.sources import open_source

# Parameters as printed: a number, thousands or millions of parameters (k, M), or bytes at 4 a parameter in MB.
PRINTED = {
    "resnet50-imagenet": 25_559_081, "vgg19-imagenet": 143_671_337, "vgg16-cifar10": 14_982_987,
    "lstm-ptb": 66_034_000, "lstm-an4": 43_476_256,
    # as torchvision, timm and pytorch-cifar count them
    "resnet18-imagenet": 11_689_512, "vgg16-imagenet": 138_357_544, "alexnet-imagenet": 61_100_840,
    "inceptionv4-imagenet": 42_679_816, "resnet18-cifar10": 11_173_962, "googlenet-cifar10": 6_166_250,
    "senet18-cifar10": 11_260_354,
}  # fmt: skip
MEGABYTES = {
    "resnet44-cifar10": 2.65,
    "vgg16bn-cifar10": 58.91,
    "lstm-wikitext2": 543.6,
    "lstm-ptb": 264.1,
}
ON_CIFAR = [name for name in WORKLOADS if name.endswith("cifar10")]


@every("name", WORKLOADS)
def test_layouts_have_the_published_counts(name):
    records = layout(name)
    total = sum(r["numel"] for r in records)
    assert total == WORKLOADS[name].parameters == PRINTED.get(name, total)
    assert name not in MEGABYTES or round(4e-6 * total, 2) == pytest.approx(
        MEGABYTES[name], abs=0.1
    )
    assert [r["offset"] for r in records[:2]] == [0, records[0]["numel"]]
    assert records[0]["numel"] == np.prod([int(n) for n in records[0]["shape"].split("×")])


@pytest.mark.parametrize(
    ("name", "first", "last", "count"),
    [
        ("resnet50-imagenet", "64×3×7×7", "1001×2048", 161),
        ("vgg19-imagenet", "64×3×3×3", "1001×4096", 38),
        ("alexnet-imagenet", "64×3×11×11", "1000×4096", 16),
        ("inceptionv4-imagenet", "32×3×3×3", "1000×1536", 449),
    ],
)
def test_layouts_are_those_of_the_libraries(name, first, last, count):
    records = layout(name)
    assert (records[0]["shape"], records[-2]["shape"], len(records)) == (first, last, count)


# Millions of multiplications for one image, as torchvision and timm print them beside their weights
MULTIPLICATIONS = {
    "resnet18-imagenet": 1814, "resnet50-imagenet": 4089, "vgg16-imagenet": 15_470,
    "vgg19-imagenet": 19_632, "alexnet-imagenet": 714, "inceptionv4-imagenet": 12_280,
}  # fmt: skip


@every("name", MULTIPLICATIONS)
def test_networks_multiply_as_often_as_is_published(name):
    """What parameters do not tell: strides, padding and the size of the images."""
    config = RunConfig(workload=name)
    side = side_of(config.info)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        make_model(config)(torch.empty(1, 3, side, side))
    # it counts an addition with each
    assert counter.get_total_flops() / 2e6 == pytest.approx(MULTIPLICATIONS[name], rel=0.005)


def test_a_backward_pass_gives_the_layout_and_its_times():
    gradient, layers = backward_pass("resnet8-cifar16", 1, batch_size=2)
    assert [(n, g.numel()) for n, g in gradient.items()] == [
        (r["layer"], r["numel"]) for r in layout("resnet8-cifar16")
    ]
    assert layers[0].name.startswith("fc.")
    assert {layer.name for layer in layers} == set(gradient)
    assert min(layer.backward for layer in layers) >= 0
    assert all(g.abs().max() > 0 for g in gradient.values())
    again, _ = backward_pass("resnet8-cifar16", 1, batch_size=2)
    assert torch.equal(again["fc.weight"], gradient["fc.weight"])


def command(*args):
    import typer

    from capture.cli import register

    app = typer.Typer()
    app.command("nothing")(lambda: None)
    register(app)
    return Runner().invoke(app, ["workloads", *map(str, args)])


def test_the_command_lists_workloads_and_layers(tmp_path):
    rows = json.loads(command("--format", "json").stdout)
    assert [r["workload"] for r in rows] == [*WORKLOADS]
    file = tmp_path / "g.npz"
    done = command("resnet8-cifar16", "--gradient", file, "--batch-size", 1, "--format", "json")
    rows = json.loads(done.stdout)
    assert sum(r["numel"] for r in rows) == 75_290
    assert all(r["backward"] >= 0 for r in rows)
    assert [layer.name for layer in open_source(file).layers] == [r["layer"] for r in rows]
    error = command("--gradient", file).exception
    assert isinstance(error, InputError)
    assert "name the workload" in str(error)
    assert isinstance(command("resnet8-cifar16", "--gradient", tmp_path).exception, InputError)


def test_recipes_are_the_papers_settings():
    config = RunConfig(workload="resnet50-imagenet", recipe="paper", compressor="none", nproc=8)
    training = config.training()
    assert (config.setting("batch_size"), config.initial_learning_rate) == (160, 0.2)
    assert (training.momentum, training.nesterov, training.weight_decay) == (0.9, "dgc", 1e-4)
    assert config.setting("steps") == 90 * 1_281_167 // (160 * 8) + 1
    rates = [config.learning_rate_at(s) for s in (0, 5100, 30_100, 61_000, 81_000)]
    assert rates == pytest.approx([0.2 / 5005, 0.2, 0.02, 0.002, 0.0002], rel=1e-3)
    own = config.replace(batch_size=10, steps=7, momentum=0.5, weight_decay=0.0)
    assert (own.setting("batch_size"), own.setting("steps")) == (10, 7)
    assert (own.training().momentum, own.training().weight_decay) == (0.5, 0)
    vanilla = RunConfig(workload="vgg16-cifar10", recipe="paper", compressor="none").training()
    assert (vanilla.momentum, vanilla.nesterov) == (0, None)
    redsync = RunConfig(workload="resnet44-cifar10", recipe="paper", nproc=4)
    assert redsync.training().warm_up == -(-5 * 50_000 // 256)
    assert redsync.metadata()["optimizer"]["nesterov"] == "dgc"


def test_recipes_of_authors_programs_are_theirs():
    micro = RunConfig(workload="senet18-cifar10", recipe="program", compressor="none", nproc=16)
    # 0.1 for 128 samples, of which 16 workers have four times as many
    assert micro.initial_learning_rate == pytest.approx(0.4)
    steps = micro.setting("steps")
    assert steps == -(-200 * 50_000 // 512)
    rates = [micro.learning_rate_at(s) for s in (0, steps // 2, 3 * steps // 4 + 1, steps - 1)]
    assert rates == pytest.approx([0.4 * 512 / 250_000, 0.4, 0.04, 0.04], rel=0.01)
    assert micro.replace(learning_rate=0.1).initial_learning_rate == 0.1
    assert micro.metadata()["optimizer"]["decay_vectors"] is False
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    (optimizer,) = make_optimizers(micro, model)
    decays = {
        p.ndim: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert decays == {4: 1e-4, 1: 0.0}
    assert all(group["nesterov"] for group in optimizer.param_groups)
    (optimizer,) = make_optimizers(micro.replace(recipe="paper"), model)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [5e-4]

    sidco = RunConfig(workload="resnet20-cifar10", recipe="program", compressor="none")
    assert (sidco.training().momentum, sidco.training().nesterov) == (0.9, None)
    steps = sidco.setting("steps")
    parts = [sidco.learning_rate_at(int(share * steps)) for share in (0.5, 0.6, 0.9)]
    assert parts == pytest.approx([0.1, 0.01, 0.001])
    words = RunConfig(workload="lstm-ptb", recipe="program", compressor="none")
    assert words.training().momentum == words.training().weight_decay == 0
    assert words.learning_rate_at(0) == words.learning_rate_at(words.setting("steps") - 1) == 22
    speech = RunConfig(workload="lstm-an4", recipe="program", compressor="none")
    assert speech.initial_learning_rate == 0.0004
    for settings, problem in (
        ({"workload": "resnet44-cifar10", "recipe": "program"}, "no authors' program of resnet44"),
        ({"workload": "resnet20-digits", "lr_schedule": "milestones"}, "milestones are those"),
    ):
        with pytest.raises(InputError, match=problem):
            RunConfig(**settings).check()


@every(
    ("name", "rate", "batch", "epochs"),
    [  # SIDCo's table 1, of all workers' batches one's, MiCRO's, and Marsit's section 5
        ("resnet20-cifar10", 0.1, 512, 140),
        ("vgg16-cifar10", 0.1, 512, 140),
        ("resnet50-imagenet", 0.2, 160, 90),
        ("vgg19-imagenet", 0.05, 160, 90),
        ("lstm-ptb", 22.0, 20, 30),
        ("lstm-an4", 0.004, 20, 150),
        ("resnet18-cifar10", 0.1, 32, 200),
        ("googlenet-cifar10", 0.1, 32, 200),
        ("senet18-cifar10", 0.1, 32, 200),
        ("alexnet-cifar10", 0.03, 128, 90),
    ],
)
def test_rates_batches_and_epochs_are_those_of_the_papers_tables(name, rate, batch, epochs):
    config = RunConfig(workload=name, recipe="paper", compressor="none", nproc=1)
    assert (config.initial_learning_rate, config.setting("batch_size")) == (rate, batch)
    assert config.setting("steps") == -(-epochs * WORKLOADS[name].epoch // batch)


@every("name", [name for name, info in WORKLOADS.items() if info.recipe])
def test_recipes_can_be_used(name, tmp_path):
    for file in WORKLOADS[name].files:
        (tmp_path / file).touch()
    for compressor in ("none", "topk", "dgc"):
        for recipe in ("paper", *(["program"] if WORKLOADS[name].program else [])):
            RunConfig(
                workload=name, recipe=recipe, compressor=compressor, data_dir=tmp_path
            ).check()
    with pytest.raises(InputError, match="name their folder with --data-dir"):
        RunConfig(workload=name, recipe="paper").check()


@pytest.fixture
def few_images(tmp_path):
    """Forty random images of CIFAR-10's format, with two labels."""
    raw = np.random.default_rng(0).integers(0, 256, (40, 3073), np.uint8)
    raw[:, 0] = np.arange(40) % 2
    raw.tofile(tmp_path / "data_batch_1.bin")
    raw.tofile(tmp_path / "test_batch.bin")
    return tmp_path


def test_images_are_judged_by_the_running_statistics_and_training_goes_on(few_images):
    """Of a batch's own statistics the accuracy would depend on what else is in it, and would change the model."""
    config = RunConfig(workload="resnet8-cifar16", data_dir=few_images, batch_size=4, nproc=1)
    task = make_task(config, 0)
    before = {name: value.clone() for name, value in task.model.named_buffers()}
    modes = []
    task.model.register_forward_pre_hook(lambda model, _: modes.append(model.training))
    assert task.evaluate(task.model)
    assert not any(modes)
    assert modes
    assert task.model.training
    assert all(torch.equal(value, before[name]) for name, value in task.model.named_buffers())


@pytest.mark.slow
@every("name", [*ON_CIFAR, "resnet8-cifar16"])
def test_every_network_for_cifar_takes_a_step(name, few_images):
    torch.manual_seed(0)
    config = RunConfig(workload=name, data_dir=few_images, batch_size=4, nproc=1)
    task = make_task(config, 0)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=1e-3)
    before = [p.detach().clone() for p in task.model.parameters()]
    loss = task.loss(task.model, 0)
    torch.autograd.backward(loss)
    optimizer.step()
    assert 1 < loss.item() < 6
    for old, new in zip(before, task.model.parameters(), strict=True):
        assert new.ndim < 2 or not torch.equal(old, new)  # a bias before a normalisation is idle
    assert 0 <= task.evaluate(task.model)["accuracy"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg16-cifar10", "alexnet-cifar10"])
def test_the_loss_of_deep_networks_falls(name, few_images):
    torch.manual_seed(0)
    config = RunConfig(workload=name, data_dir=few_images, batch_size=8, nproc=1, steps=30)
    task = make_task(config, 0)
    training = config.training()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=1.0, momentum=training.momentum)
    losses = []
    for step in range(30):
        optimizer.param_groups[0]["lr"] = config.learning_rate_at(step)
        optimizer.zero_grad()
        loss = task.loss(task.model, step)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert max(losses[1:]) < 1.5 * losses[0]  # no leap in the first steps
    assert np.mean(losses[-5:]) < 0.6 * losses[0]  # two labels: from log 10 to log 2


def test_images_of_half_the_size_are_means(few_images):
    full, half = load_cifar10(few_images), load_cifar10(few_images, 16)
    pixels = full.test[0].unflatten(2, (16, 2)).unflatten(4, (16, 2)).mean((3, 5))
    again = half.test[0]
    assert again.shape == (40, 3, 16, 16)
    assert float(torch.corrcoef(torch.stack([pixels.flatten(), again.flatten()]))[0, 1]) > 0.999


def test_cifar100_and_mnist_are_read_as_documented(tmp_path):
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 100, (6, 3074), np.uint8)
    raw.tofile(tmp_path / "train.bin")
    images = load_cifar100(tmp_path)
    assert images._labels.tolist() == raw[:, 1].tolist()
    (tmp_path / "train.bin").write_bytes(b"x")
    with pytest.raises(InputError, match="not whole records of 3074"):
        load_cifar100(tmp_path)
    pixels = rng.integers(0, 256, (5, 28, 28), np.uint8)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(bytes(16) + pixels.tobytes())
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(bytes(8) + bytes([3, 1, 4, 1, 5]))
    images = load_mnist(tmp_path)
    assert images._padded.shape == (5, 1, 36, 36)
    assert images._labels.tolist() == [3, 1, 4, 1, 5]
    labels.write_bytes(bytes(8) + bytes([3, 1]))
    with pytest.raises(InputError, match="not MNIST's files"):
        load_mnist(tmp_path)
    labels.unlink()
    with pytest.raises(InputError, match="cannot read"):
        load_mnist(tmp_path)


def test_imagenet_is_read_from_folders_of_classes(tmp_path):
    from PIL import Image

    for part, count in (("train", 3), ("val", 2)):
        for label, colour in enumerate(("red", "blue")):
            folder = tmp_path / part / f"n{label}"
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (60 + 20 * i, 50), colour).save(folder / f"{i}.JPEG")
    images = ImageFolder(tmp_path, 32, 1000)
    assert len(images) == 6
    inputs, labels = images.batch(0, 3, 0, 2, seed=1)
    others, more = images.batch(0, 3, 1, 2, seed=1)
    assert sorted(labels.tolist() + more.tolist()) == [0, 0, 0, 1, 1, 1]
    assert inputs.shape == (3, 3, 32, 32)
    assert torch.equal(inputs[:, 0].mean((1, 2)) > 0, labels == 0)  # red
    assert torch.equal(images.batch(0, 3, 1, 2, seed=1)[0], others)
    unseen = list(images.unseen(3))
    assert [len(labels) for _, labels in unseen] == [3, 1]
    with pytest.raises(InputError, match="has 2 classes; the model has 1"):
        ImageFolder(tmp_path, 32, 1)
    (tmp_path / "train" / "n0" / "0.JPEG").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"cannot read .*0\.JPEG"):
        images.batch(0, 6, 0, 1, seed=1)
    config = RunConfig(workload="resnet18-imagenet", data_dir=tmp_path, batch_size=6)
    with pytest.raises(InputError, match="exceeds the 6 images"):
        make_task(config, 0)
    (tmp_path / "train").rename(tmp_path / "empty")
    (tmp_path / "train").mkdir()
    with pytest.raises(InputError, match="has no images"):
        ImageFolder(tmp_path, 32, 1000)


def test_wikitext_is_words(tmp_path):
    (tmp_path / "wiki.train.tokens").write_text(" = A = \n\n the <unk> .\n")
    assert load_wikitext(tmp_path)[:4] == ["=", "A", "=", "<eos>"]
    with pytest.raises(InputError, match=r"cannot read .*wiki\.valid\.tokens"):
        load_wikitext(tmp_path, "valid")


@pytest.mark.parametrize(
    ("found", "truth", "words", "characters"),
    [
        ("GO", "GO", 0, 0),
        ("", "GO ON", 1, 1),
        ("A B C", "A C", 1 / 2, 1 / 2),  # one word, one character too many
        ("ENTER SIX", "ENTER FIVE SIX", 1 / 3, 4 / 12),
        ("KITTEN", "SITTING", 1, 3 / 7),
        ("STOP STOP STOP", "GO", 3, 12 / 2 - 1 / 2),  # the O is right: 11 of 2
    ],
)
def test_error_rates_against_pen_and_paper(found, truth, words, characters):
    assert error_rates([(found, truth)]) == pytest.approx((words, characters))


def test_error_rates_weigh_utterances_by_their_length():
    assert error_rates([("A", "B"), ("A B C D", "A B C D")]) == pytest.approx((1 / 5, 1 / 5))


def test_decoding_drops_repetitions_and_blanks():
    path = [LABELS.index(sign) for sign in "__GG_OO__O "]
    assert decode(torch.eye(len(LABELS))[path]) == "GOO "


def test_padding_changes_no_score():
    torch.manual_seed(0)
    network = DeepSpeech(8, 2).eval()
    x = torch.randn(2, 161, 40)
    x[1, :, 30:] = 0
    both, lengths = network(x, torch.tensor([40, 30]))
    alone, _ = network(x[1:, :, :30], torch.tensor([30]))
    assert lengths.tolist() == [20, 15]
    assert both.shape == (2, 20, 29)
    assert torch.allclose(both[1, :15], alone[0], atol=1e-5)
    assert torch.allclose(both.exp().sum(2), torch.ones(2, 20), atol=1e-5)


def test_padding_changes_no_score_of_the_bidirectional_network():
    torch.manual_seed(0)
    network = BidirectionalLSTM(8).eval()
    x = torch.randn(2, 40, 41)
    x[0, :, 30:] = 0
    both, lengths = network(x, torch.tensor([30, 41]))
    alone, _ = network(x[:1, :, :30], torch.tensor([30]))
    assert lengths.tolist() == [8, 11]
    assert both.shape == (2, 11, 29)
    assert torch.allclose(both[0, :8], alone[0], atol=1e-5)
    # both directions: the first output depends on the last frame
    x[1, :, 40] += 1
    assert not torch.equal(network(x, torch.tensor([30, 41]))[0][1, 0], both[1, 0])
    network.train()
    network(x, torch.tensor([30, 41]))
    frames = network.conv(x).transpose(1, 2)
    there = torch.cat([frames[0, :8], frames[1, :11]])
    assert torch.allclose(network.norms[0].running_mean, 0.1 * there.mean(0), atol=1e-5)


def test_mel_bands_find_a_tone_and_forget_its_loudness():
    time = np.arange(16_000) / 16_000
    bands = {}
    for hertz in (500, 1000, 4000):
        # a tone in the second half, over noise
        wave = np.random.default_rng(0).normal(0, 30, 16_000)
        wave[8000:] += 3000 * np.sin(2 * np.pi * hertz * time[8000:])
        found = mel_spectrogram(wave)
        assert found.shape == (40, 101)
        assert torch.allclose(found.mean(1), torch.zeros(40), atol=1e-4)
        assert torch.allclose(found.std(1), torch.ones(40), atol=2e-2)
        centre = 40 * np.log1p(hertz / 700) / np.log1p(8000 / 700) * 41 / 40 - 1
        rise = found[:, 60:].mean(1) - found[:, :40].mean(1)
        bands[hertz] = int(rise.argmax())
        assert abs(bands[hertz] - centre) <= 1.5
    assert bands[500] < bands[1000] < bands[4000]
    louder = mel_spectrogram(8 * wave)
    assert float((louder - found).abs().mean()) < 0.05


def test_batches_of_the_small_network_are_neighbours_in_length(tmp_path):
    lengths = [20, 11, 12, 19, 10, 18, 13, 17]
    rows = ["split\tpath\ttranscript"]
    for i, tenths in enumerate(lengths):
        np.ones(1600 * tenths, ">i2").tofile(tmp_path / f"{i}.raw")
        rows.append(f"train\t{i}.raw\t{'A' * i}B")
    (tmp_path / "manifest.tsv").write_text("\n".join(rows) + "\n")
    config = RunConfig(workload="blstm-an4", data_dir=tmp_path, hidden=4, batch_size=2, seed=3)
    seen = []

    class Network(torch.nn.Module):
        def forward(self, x, sizes):
            seen.append(sizes.tolist())
            scores = torch.zeros(len(sizes), int(sizes.max()) // 4 + 1, 29)
            return scores.log_softmax(2), sizes // 4

    tasks = [speech.make_task(config, rank) for rank in range(2)]
    for step in range(4):
        for task in tasks:
            task.loss(Network(), step)
    steps = [sorted(a + b) for a, b in zip(seen[::2], seen[1::2], strict=True)]
    short = [10 * n + 1 for n in (10, 11, 12, 13)]
    long = [10 * n + 1 for n in (17, 18, 19, 20)]
    for epoch in (steps[:2], steps[2:]):
        assert sorted(epoch) == [short, long]


def utterances(folder, splits):
    """Write noise as utterances of one second: split, speaker and transcript of each."""
    rows = ["split\tpath\ttranscript"]
    for i, (split, speaker, text) in enumerate(splits):
        (folder / speaker).mkdir(exist_ok=True)
        noise = np.random.default_rng(i).integers(-3000, 3000, 16_000)
        noise.astype(">i2").tofile(folder / speaker / f"{i}.raw")
        rows.append(f"{split}\t{speaker}/{i}.raw\t{text}")
    (folder / "manifest.tsv").write_text("\n".join(rows) + "\n")


def test_whole_speakers_are_held_out(tmp_path):
    # the n-th speaker has the letters of n, two utterances apart
    names = [f"s{i}" for i in range(10)] * 2
    utterances(tmp_path, [("test", name, LABELS[2 + int(name[1])]) for name in names])
    seen, unseen = ([text for _, text in part] for part in load_an4(tmp_path))
    assert (len(seen), len(unseen)) == (16, 4)
    assert len(set(unseen)) == 2
    assert not set(seen) & set(unseen)


def test_padding_is_not_decoded(tmp_path):
    utterances(tmp_path, [("train", "s0", "A")] * 4 + [("test", "s1", "AB")] * 2)
    np.ones(32_000, ">i2").tofile(tmp_path / "s1" / "5.raw")  # twice as long as the other one
    config = RunConfig(workload="lstm-an4", data_dir=tmp_path, hidden=4, batch_size=2, nproc=2)

    class Network(torch.nn.Module):
        def forward(self, x, sizes):
            signs = torch.full((len(sizes), int(sizes.max())), LABELS.index("C"))
            for row, size in zip(signs, sizes, strict=True):
                row[:size] = LABELS.index("B")
                row[: size // 2] = LABELS.index("A")
            return torch.nn.functional.one_hot(signs, len(LABELS)).float(), sizes

    rates = speech.make_task(config, 0).evaluate(Network())
    assert rates == {"word_error_rate": 0, "character_error_rate": 0}


def test_utterances_are_read_big_endian_and_speakers_held_out(tmp_path):
    utterances(tmp_path, [("test", f"s{i}", "go on") for i in range(10)])
    seen, unseen = load_an4(tmp_path)
    assert (len(seen), len(unseen)) == (8, 2)
    spectrum, text = seen[0]
    assert text == "GO ON"
    assert spectrum.shape == (161, 101)
    assert abs(float(spectrum.mean())) < 1e-4
    # white noise has the same level everywhere; bytes in the wrong order would be louder
    assert float(spectrum.mean(1).abs().max()) < 1.5
    tone = (8000 * np.sin(2 * np.pi * 1000 * np.arange(16_000) / 16_000)).astype(">i2")
    tone.tofile(tmp_path / "s0" / "0.raw")
    loudest = load_an4(tmp_path)[0][0][0].mean(1).argmax()
    assert int(loudest) == 20  # 1,000 Hz at 50 Hz a row
    utterances(tmp_path, [("train", "s0", "A"), ("train", "s1", "B"), ("test", "s2", "C")])
    seen, unseen = load_an4(tmp_path)
    assert [text for _, text in seen + unseen] == ["A", "B", "C"]


@every(
    ("spoil", "message"),
    [
        (lambda f: (f / "manifest.tsv").unlink(), "cannot read .*manifest"),
        (lambda f: (f / "s0" / "0.raw").unlink(), "cannot read .*manifest"),
        (lambda f: (f / "s0" / "0.raw").write_bytes(b"ab"), "too short"),
        (lambda f: (f / "manifest.tsv").write_text("path\ns0/0.raw\n"), "must have the columns"),
        (lambda f: (f / "manifest.tsv").write_text("split\tpath\ttranscript\n"), "no utterance"),
        (lambda f: utterances(f, [("test", "s0", "route 66")]), "must be letters"),
        (lambda f: utterances(f, [("dev", "s0", "go")]), "split .train or test."),
    ],
)  # fmt: skip
def test_speech_that_cannot_be_read_is_one_line(tmp_path, spoil, message):
    utterances(tmp_path, [("test", "s0", "go")])
    spoil(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        load_an4(tmp_path)
    assert "\n" not in str(caught.value)


def test_an4_of_the_shared_folder():
    seen, unseen = load_an4(data_set("an4"))
    assert (len(seen), len(unseen)) == (948, 130)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("workload", ["lstm-an4", "blstm-an4"])
def test_speech_is_trained_and_evaluated(tmp_path, workload):
    utterances(tmp_path, [("test", f"s{i}", "GO") for i in range(10)])
    config = RunConfig(
        workload=workload, data_dir=tmp_path, hidden=8, batch_size=4, steps=10 if workload == "lstm-an4" else 40,
        lr_warm_up=1, compressor="topk", ratio=0.1,
    )  # fmt: skip
    result = run(config)
    assert np.mean(result.losses[-3:]) < 0.5 * result.losses[0]
    assert 0 <= result.character_error_rate <= 1
    assert 0 <= result.word_error_rate <= 1
    with pytest.raises(InputError, match="exceeds the 8 utterances"):
        speech.make_task(config.replace(batch_size=5), 0)
