"""The workloads: what each of them is, its defaults, and the training that the papers describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from gradstats.errors import unknown

__all__ = [
    "CIFAR10_FILES",
    "WORKLOADS",
    "LearningRates",
    "OptimizerName",
    "WorkloadInfo",
    "family",
    "settings_with",
    "workload_info",
]

CIFAR10_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
"""Training batches of CIFAR-10's binary version."""

LearningRates: TypeAlias = Literal[
    "constant", "step", "thirds", "milestones", "cosine", "linear", "annealed"
]
"""Names of learning-rate schedules."""
OptimizerName: TypeAlias = Literal["sgd", "nesterov", "adamw", "muon"]
"""SGD, with Nesterov's momentum of 0.9, AdamW, or Muon for matrices and AdamW for the rest."""

_FAMILIES: dict[str, Literal["SGD", "AdamW", "Muon"]] = {
    "sgd": "SGD",
    "nesterov": "SGD",
    "adamw": "AdamW",
    "muon": "Muon",
}
_RATES = {"SGD": 0.1, "AdamW": 1e-3, "Muon": 1e-3}
"""Learning rates where the optimizer is not the workload's own; Muon's updates are scaled to AdamW's size."""


# Size: a row of the table of workloads, an attribute a column.
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadInfo:
    """A workload's description, its defaults, and the papers' training.

    Attributes
    ----------
    name : str
        Name on the command line, model and data joined by a dash.
    description : str
        One line for the terminal.
    module : str
        Module whose ``make_model`` builds the model, and whose ``make_task`` adds the data.
    parameters : int
        Number of trainable parameters with the defaults of this workload.
    learning_rate : float
        Learning rate at the start.
    batch_size : int
        Samples per process and step.
    steps : int
        Steps to train.
    network : str
        Name in :data:`capture.workloads.networks.NETWORKS`; empty for other models.
    classes : int
        Number of outputs; 0 for other models.
    files : tuple of str
        Files or folders of which the data folder must hold at least one; empty if the data is embedded.
    hidden : int
        Width of the LSTM; 0 for other models.
    vocab : int
        Number of words that a model of text knows; 0 for other models.
    size : str
        Size of the transformer; empty for other models.
    optimizer : {"SGD", "AdamW"}
        Name of the optimizer in ``torch.optim``.
    weight_decay : float
        Multiple of the parameter that the optimizer takes off.
    lr_schedule : {"constant", "step", "thirds", "milestones", "cosine", "linear", "annealed"}
        How the learning rate falls, see :meth:`RunConfig.learning_rate_at`.
    momentum : float
        Momentum of the optimizer.
    lr_warm_up : int
        Steps in which the learning rate rises to its value.
    clip : float
        Largest norm of the gradient; 0 for no clipping.
    papers : mapping of str to str
        Papers that train it, and the number of parameters or size each of them prints; empty if it prints none.
    epoch : int
        Samples in an epoch of the whole data set; windows of 35 words for text.
    recipe : mapping of str to object
        Training of the first of these papers: settings of :class:`RunConfig` by name, and those that count
        epochs, ``epochs``, ``lr_warm_up_epochs`` and ``warm_up_epochs``, which the run turns into steps.
    program : mapping of str to object
        Training of that paper's authors' program, in the same way. ``milestones`` are shares of the run after which the
        rate is divided by 10; ``rate_per`` is the number of samples, of all workers, that the rate is for;
        ``decay_vectors`` false leaves parameters of fewer than two dimensions without weight decay.
    """

    name: str
    description: str
    module: str
    parameters: int
    learning_rate: float
    batch_size: int
    steps: int
    network: str = ""
    classes: int = 0
    files: tuple[str, ...] = ()
    hidden: int = 0
    vocab: int = 0
    size: str = ""
    optimizer: Literal["SGD", "AdamW"] = "SGD"
    weight_decay: float = 0.0
    lr_schedule: LearningRates = "constant"
    momentum: float = 0.0
    lr_warm_up: int = 0
    clip: float = 0.0
    papers: Mapping[str, str] = field(default_factory=dict)
    epoch: int = 0
    recipe: Mapping[str, Any] = field(default_factory=dict)
    program: Mapping[str, Any] = field(default_factory=dict)


_NESTEROV = {"momentum": 0.9, "nesterov": "dgc"}
# Momentum, decay and schedule of pytorch-cifar, whose networks MiCRO trains; its text has the batch and the epochs.
_MICRO = {
    "learning_rate": 0.1, "batch_size": 32, "epochs": 200, "momentum": 0.9, "weight_decay": 5e-4,
    "lr_schedule": "cosine",
}  # fmt: skip
# SIDCo trains as Gross and Wilber (2016) do, who divide the rate by 10 at one half and three quarters of CIFAR's epochs
# and at each third of ImageNet's.
_SIDCO_CIFAR = {
    "momentum": 0.0,
    "learning_rate": 0.1, "batch_size": 512, "epochs": 140, "lr_warm_up_epochs": 5,
    "weight_decay": 1e-4, "lr_schedule": "step",
}  # fmt: skip
# RedSync's warm-up sends more, and its text has the batch and the momentum.
_REDSYNC_CIFAR = {
    "learning_rate": 0.1, "batch_size": 64, "epochs": 164, "warm_up_epochs": 5,
    "weight_decay": 1e-4, "lr_schedule": "step",
} | _NESTEROV  # fmt: skip
_SIDCO_IMAGENET = {
    "learning_rate": 0.2, "batch_size": 160, "epochs": 90, "lr_warm_up_epochs": 5,
    "weight_decay": 1e-4, "lr_schedule": "thirds",
} | _NESTEROV  # fmt: skip
_LAGS_IMAGENET = _SIDCO_IMAGENET | {"learning_rate": 0.01, "batch_size": 32, "lr_warm_up_epochs": 0}
# The papers' rate falls when the validation loss does not; here it falls at fixed steps.
_SIDCO_PTB = {
    "learning_rate": 22.0, "batch_size": 20, "epochs": 30, "lr_warm_up_epochs": 5, "clip": 0.25,
    "lr_schedule": "thirds",
} | _NESTEROV  # fmt: skip


# What the authors' programs do where their papers say something else, or nothing: kljp/micro, sands-lab/SIDCo.
_MICRO_PROGRAM = _MICRO | _NESTEROV | {
    "weight_decay": 1e-4, "decay_vectors": False, "rate_per": 128, "lr_warm_up_epochs": 5,
    "lr_schedule": "milestones", "milestones": (150 / 200,),
}  # fmt: skip
_SIDCO_PROGRAM_CIFAR = _SIDCO_CIFAR | {
    "momentum": 0.9, "decay_vectors": False, "lr_schedule": "milestones", "milestones": (80 / 140, 120 / 140),
}  # fmt: skip
_SIDCO_PROGRAM_IMAGENET = _SIDCO_IMAGENET | {
    "momentum": 0.875, "nesterov": "none", "weight_decay": 2**-14, "decay_vectors": False,
}  # fmt: skip
_SIDCO_PROGRAM_PTB = {
    "learning_rate": 22.0, "batch_size": 20, "epochs": 30, "clip": 0.25, "momentum": 0.0, "lr_schedule": "constant",
}  # fmt: skip


def _images(
    name: str, description: str, network: str, parameters: int, classes: int, **rest: Any
) -> WorkloadInfo:
    """Return a workload that classifies images."""
    data = name.split("-")[1]
    files, epoch = {
        "digits": ((), 1797),
        "cifar10": (CIFAR10_FILES, 50_000),
        "cifar16": (CIFAR10_FILES, 50_000),
        "cifar100": (("train.bin",), 50_000),
        "mnist": (("train-images-idx3-ubyte",), 60_000),
        "imagenet": (("train",), 1_281_167),
    }[data]
    settings: dict[str, Any] = {
        "module": "capture.workloads.classification",
        "learning_rate": 0.1,
        "batch_size": 32,
        "steps": 1000,
        "lr_schedule": "step",
        **rest,
    }
    return WorkloadInfo(
        name=name,
        description=description,
        parameters=parameters,
        network=network,
        classes=classes,
        files=files,
        epoch=epoch,
        **settings,
    )


def _words(name: str, description: str, parameters: int, **rest: Any) -> WorkloadInfo:
    """Return a workload that predicts words."""
    return WorkloadInfo(
        name=name,
        description=description,
        module="capture.workloads.lstm",
        parameters=parameters,
        learning_rate=5.0,
        batch_size=20,
        clip=0.25,
        **rest,
    )


def _transformer(name: str, description: str, parameters: int, **rest: Any) -> WorkloadInfo:
    """Return a transformer that predicts words."""
    settings: dict[str, Any] = {
        "learning_rate": 1e-3,
        "batch_size": 8,
        "steps": 400,
        "lr_schedule": "cosine",
        "lr_warm_up": 20,
        "clip": 1.0,
        "weight_decay": 0.1,
        "size": "0.5M",
        "module": "capture.workloads.gpt",
        **rest,
    }
    return WorkloadInfo(
        name=name,
        description=description,
        parameters=parameters,
        optimizer="AdamW",
        **settings,
    )


_ON_IMAGENET = "on ImageNet, a folder for each class in train/ and val/"

WORKLOADS: dict[str, WorkloadInfo] = {
    info.name: info
    for info in (
        _images(
            "resnet20-digits",
            "ResNet-20 on scikit-learn's digits, enlarged to 16×16 (embedded)",
            "resnet20", 269_722, 10, steps=400,
        ),
        _images(
            "resnet20-cifar10",
            "ResNet-20 on CIFAR-10, binary version",
            "resnet20", 269_722, 10, batch_size=64, steps=3000,
            papers={"SIDCo": "269,467", "LAGS": "", "Marsit": "0.27 M"}, recipe=_SIDCO_CIFAR,
            program=_SIDCO_PROGRAM_CIFAR,
        ),
        _images(
            "resnet8-cifar16",
            "ResNet-8 on CIFAR-10, binary version, reduced to 16×16",
            "resnet8", 75_290, 10, steps=2000, momentum=0.9, lr_warm_up=100, lr_schedule="cosine",
        ),
        _images(
            "resnet44-cifar10",
            "ResNet-44 on CIFAR-10, binary version",
            "resnet44", 661_338, 10, papers={"RedSync": "2.65 MB"}, recipe=_REDSYNC_CIFAR,
        ),
        _images(
            "vgg16-cifar10",
            "VGG16 on CIFAR-10, binary version, 14,982,987 parameters",
            # 11 outputs, and no normalisation: so the 14,982,987 parameters of SIDCo's table 1 come about
            "vgg16-small", 14_982_987, 11, learning_rate=0.02, momentum=0.9, lr_warm_up=50,
            papers={"SIDCo": "14,982,987", "LAGS": ""}, recipe=_SIDCO_CIFAR,
            program=_SIDCO_PROGRAM_CIFAR,
        ),
        _images(
            "vgg16bn-cifar10",
            "VGG16 with batch normalisation on CIFAR-10, binary version",
            "vgg16bn", 14_728_266, 10, papers={"RedSync": "58.91 MB"}, recipe=_REDSYNC_CIFAR,
        ),
        _images(
            "alexnet-cifar10",
            "AlexNet on CIFAR-10, binary version",
            "alexnet-small", 23_272_266, 10, learning_rate=0.01, momentum=0.9,
            papers={"Marsit": "23 M"},
            recipe={"learning_rate": 0.03, "batch_size": 128, "momentum": 0.9, "epochs": 90, "lr_schedule": "thirds"},
        ),
        *(
            _images(
                f"{model.lower().replace('-', '')}-{data}",
                f"{model} on {'CIFAR-' + data[5:]}, binary version",
                # 90 classes more, each with a weight for every feature and a bias
                network, count + {"cifar10": 0, "cifar100": 90 * (features + 1)}[data], int(data[5:]),
                papers={"MiCRO": ""}, recipe=_MICRO, program=_MICRO_PROGRAM,
            )
            for data in ("cifar10", "cifar100")
            for model, network, count, features in (
                ("ResNet-18", "resnet18-small", 11_173_962, 512),
                ("GoogLeNet", "googlenet", 6_166_250, 1024),
                ("SENet-18", "senet18", 11_260_354, 512),
            )
        ),
        _images(
            "alexnet-mnist",
            "AlexNet on MNIST, enlarged to 32×32",
            "alexnet-grey", 23_271_114, 10, learning_rate=0.01, momentum=0.9, papers={"Marsit": ""},
            recipe={"learning_rate": 0.03, "lr_schedule": "constant", "epochs": 10},
        ),
        _images(
            "resnet18-imagenet", f"ResNet-18 {_ON_IMAGENET}", "resnet18", 11_689_512, 1000,
            papers={"Marsit": "11 M"},
            recipe=_LAGS_IMAGENET | {"learning_rate": 0.1, "batch_size": 96, "nesterov": "none"},
        ),
        _images(
            # 1,001 outputs, with which SIDCo counts its parameters
            "resnet50-imagenet", f"ResNet-50 {_ON_IMAGENET}", "resnet50", 25_559_081, 1001,
            papers={"SIDCo": "25,559,081", "RedSync": "103 MB", "LAGS": "", "Marsit": "25 M"}, recipe=_SIDCO_IMAGENET,
            program=_SIDCO_PROGRAM_IMAGENET,
        ),
        _images(
            "vgg16-imagenet", f"VGG16 {_ON_IMAGENET}", "vgg16", 138_357_544, 1000, learning_rate=0.01, momentum=0.9,
            papers={"LAGS": "", "RedSync": "528 MB"}, recipe=_LAGS_IMAGENET,
        ),
        _images(
            "vgg19-imagenet", f"VGG19 {_ON_IMAGENET}", "vgg19", 143_671_337, 1001, learning_rate=0.01, momentum=0.9,
            papers={"SIDCo": "143,671,337"}, recipe=_SIDCO_IMAGENET | {"learning_rate": 0.05},
            program=_SIDCO_PROGRAM_IMAGENET | {"learning_rate": 0.05},
        ),
        _images(
            "alexnet-imagenet", f"AlexNet {_ON_IMAGENET}", "alexnet", 61_100_840, 1000, learning_rate=0.01,
            momentum=0.9, papers={"RedSync": "233 MB"}, recipe=_LAGS_IMAGENET,
        ),
        _images(
            "inceptionv4-imagenet", f"Inception-v4 {_ON_IMAGENET}", "inceptionv4", 42_679_816, 1000,
            papers={"LAGS": ""}, recipe=_LAGS_IMAGENET,
        ),
        _words(
            "lstm-pydoc",
            "2-layer word LSTM on the English text of CPython's pydoc topics (embedded)",
            2_247_200, steps=400, hidden=200, vocab=4000,
        ),
        _words(
            "lstm-ptb",
            "2-layer word LSTM on the Penn Treebank, 66,034,000 parameters at full size",
            66_034_000, steps=1000, files=("ptb.train.txt",), hidden=1500, vocab=10_000,
            papers={"SIDCo": "66,034,000", "LAGS": "", "RedSync": "264 MB"}, epoch=929_589 // 35, recipe=_SIDCO_PTB,
            program=_SIDCO_PROGRAM_PTB,
        ),
        _words(
            "lstm-wikitext2",
            "2-layer word LSTM on WikiText-2, 135,891,278 parameters at full size",
            135_891_278, steps=1000, files=("wiki.train.tokens",), hidden=1500, vocab=33_278,
            papers={"RedSync": "543 MB"}, epoch=2_088_628 // 35,
            recipe=_SIDCO_PTB | {"momentum": 0.0, "nesterov": "none", "batch_size": 5},
        ),
        _transformer(
            "gpt-pydoc",
            "Transformer on the English text of CPython's pydoc topics (embedded)",
            460_160, vocab=4000,
        ),
        _transformer(
            "gpt-ptb",
            "Transformer on the words of the Penn Treebank, up to 129 M parameters",
            # this transformer's windows are of 64 words
            844_160, vocab=10_000, steps=1000, files=("ptb.train.txt",), epoch=929_589 // 64,
        ),
        _transformer(
            "moe-pydoc",
            "Transformer with 8 experts a layer, 2 for each word, on CPython's pydoc topics (embedded)",
            1_388_672, vocab=4000, module="capture.workloads.moe",
        ),
        _transformer(
            "lora-pydoc",
            "Low-rank adapters of a frozen transformer on CPython's pydoc topics (embedded)",
            32_768, vocab=4000, learning_rate=3e-3, weight_decay=0.0, module="capture.workloads.lora",
        ),
        _images(
            "vit-digits",
            "Vision transformer on scikit-learn's digits, enlarged to 16×16 (embedded)",
            "vit", 204_874, 10, steps=400, optimizer="AdamW", learning_rate=1e-3, lr_schedule="cosine", lr_warm_up=20,
        ),
        _images(
            "unet-digits",
            "Diffusion model, a U-Net, of scikit-learn's digits, enlarged to 16×16 (embedded)",
            "", 377_761, 0, batch_size=16, steps=400, optimizer="AdamW", learning_rate=1e-3, lr_schedule="cosine",
            lr_warm_up=20, module="capture.workloads.diffusion",
        ),
        _images(
            "simclr-digits",
            "Contrastive learning with ResNet-8 on scikit-learn's digits, enlarged to 16×16 (embedded)",
            "resnet8", 78_800, 64, steps=400, momentum=0.9, lr_schedule="cosine", lr_warm_up=20,
            module="capture.workloads.contrastive",
        ),
        WorkloadInfo(
            name="policy-cartpole",
            description="Policy gradient on the pole balanced on a cart (generated)",
            module="capture.workloads.policy", parameters=17_410, optimizer="AdamW",
            learning_rate=3e-4, batch_size=8, steps=300,
        ),
        WorkloadInfo(
            name="gcn-blocks",
            description="Graph convolutions that find the communities of a stochastic block model (generated)",
            module="capture.workloads.graph", parameters=50_182, optimizer="AdamW",
            learning_rate=1e-3, batch_size=64, steps=400,
        ),
        WorkloadInfo(
            name="dlrm-clicks",
            description="Recommender with tables of embeddings on clicks of a known model (generated)",
            module="capture.workloads.recommender", parameters=194_993, optimizer="AdamW",
            learning_rate=1e-3, batch_size=256, steps=600,
        ),
        WorkloadInfo(
            name="lstm-an4",
            description="DeepSpeech with five LSTM layers on AN4's utterances, trained with CTC",
            module="capture.workloads.speech", parameters=43_476_256,
            learning_rate=0.01, batch_size=8, steps=400, momentum=0.9, clip=100.0, hidden=1024,
            files=("manifest.tsv",), papers={"SIDCo": "43,476,256"}, epoch=948,
            recipe={
                "learning_rate": 0.004, "batch_size": 20, "epochs": 150, "lr_warm_up_epochs": 5, "clip": 400.0,
                "lr_schedule": "annealed",
            } | _NESTEROV,
            program={
                "learning_rate": 0.0004, "batch_size": 20, "epochs": 150, "clip": 400.0, "lr_schedule": "annealed",
                "momentum": 0.9, "weight_decay": 1e-4, "decay_vectors": False,
            },
        ),
        WorkloadInfo(
            name="blstm-an4",
            description="Two bidirectional LSTM layers on AN4's utterances, trained with CTC",
            module="capture.workloads.speech", parameters=397_085,
            learning_rate=0.03, batch_size=8, steps=1180, momentum=0.9, clip=100.0, hidden=96,
            files=("manifest.tsv",), epoch=948, lr_warm_up=59, lr_schedule="cosine",
        ),
    )
}  # fmt: skip


def workload_info(name: str) -> WorkloadInfo:
    """Return the workload of a name.

    Parameters
    ----------
    name : str
        One of :data:`WORKLOADS`.

    Returns
    -------
    WorkloadInfo
        Description and defaults.

    Raises
    ------
    InputError
        If there is no such workload.
    """
    try:
        return WORKLOADS[name]
    except KeyError:
        raise unknown("workload", name, WORKLOADS) from None


def family(name: str) -> str:
    """Return the optimizer of ``torch.optim`` that a name stands for.

    Parameters
    ----------
    name : str
        One of :data:`OptimizerName`.
    """
    return _FAMILIES[name]


def settings_with(name: OptimizerName | None, default: str) -> Mapping[str, Any]:
    """Return the settings that an optimizer brings where none are given.

    Parameters
    ----------
    name : OptimizerName or None
        The optimizer; None for the workload's own, which has no others.
    default : str
        The workload's own.

    Returns
    -------
    mapping of str to object
        Values by the name of the setting.
    """
    if name is None:
        return {}
    settings: dict[str, Any] = {}
    if family(name) != default:
        settings = {"learning_rate": _RATES[family(name)], "weight_decay": 0.0}
    if name == "sgd":
        settings |= {"momentum": 0.0, "nesterov": "none"}
    elif name == "nesterov":
        settings |= {"momentum": 0.9, "nesterov": "dgc"}
    else:
        settings["momentum"] = 0.0
    return settings
