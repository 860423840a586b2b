"""Small models, their data, and the plain loops that the trainers must agree with."""

from __future__ import annotations

import torch
from torch import nn

BATCH = 4
STEPS = 21
RATE = 0.5


def tokens():
    """Return int64 tokens, shape (samples, 6), enough for STEPS batches on two ranks."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(32, (2 * STEPS * BATCH, 6), generator=generator)


def labels(rows):
    """Mask the first token: a Trainer divides by the number of labels, and no position predicts that one."""
    rows = rows.clone()
    rows[..., 0] = -100
    return rows


class Sentences(torch.utils.data.IterableDataset):
    """The samples in order: a Trainer shuffles any dataset that it can index."""

    def __iter__(self):
        return ({"input_ids": row, "labels": labels(row)} for row in tokens())


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    none = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2, **none, **ends)
    )


def arguments(folder, **options):
    from transformers import TrainingArguments

    defaults = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "optim": "sgd",
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **(defaults | options))


def gpt2_loss(model, rows):
    return model(input_ids=rows, labels=labels(rows)).loss


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))


def network_loss(model, rows):
    x = rows.float() / 32
    return nn.functional.cross_entropy(model(x), rows[:, 0] % 3)


def module():
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, batch):
            return network_loss(self.network, batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=RATE)

    return Module()


def loader():
    return torch.utils.data.DataLoader(tokens(), batch_size=BATCH)


SETTINGS = {
    "accelerator": "cpu",
    "max_steps": STEPS,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def flat(gradients):
    return torch.cat([g.reshape(-1) for g in gradients])


def plain_loop(model, loss_of, batches, clip=float("inf")):
    """Train by hand; return for every step local gradients (ranks, d), their mean, the clipped mean and the mean loss.

    `batches` gives, for every step, the batch of each rank.
    """
    parameters = list(model.parameters())
    seen = []
    for per_rank in batches:
        losses = [loss_of(model, rows) for rows in per_rank]
        local = torch.stack([flat(torch.autograd.grad(loss, parameters)) for loss in losses])
        mean = local.mean(0)
        used = mean * min(1.0, clip / (float(mean.norm()) + 1e-6))
        loss = float(torch.stack(losses).mean().detach())
        seen.append((local.numpy(), mean.numpy(), used.numpy(), loss))
        with torch.no_grad():
            for p, g in zip(parameters, used.split([p.numel() for p in parameters]), strict=True):
                p -= RATE * g.view_as(p)
    return seen


def sharded_by_huggingface(rank, world, path):
    """Give a sharded model to the callback, as a Trainer does; return this rank's own gradients."""
    from types import SimpleNamespace

    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from capture.integrations.huggingface import CaptureCallback

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    plain, model = network(), network()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    callback = CaptureCallback(path)
    arguments = SimpleNamespace(gradient_accumulation_steps=1)
    callback.on_train_begin(arguments, SimpleNamespace(global_step=7), None, model=model)
    seen = []
    for step in range(2):
        rows = tokens()[step * 2 * BATCH :][rank * BATCH :][:BATCH]
        network_loss(model, rows).backward()
        with torch.no_grad():
            for ours, theirs in zip(plain.parameters(), model.parameters(), strict=True):
                ours.copy_(theirs.full_tensor())
        seen.append(flat(torch.autograd.grad(network_loss(plain, rows), list(plain.parameters()))))
        callback.on_pre_optimizer_step(None, None, None, optimizer=optimizer)
        optimizer.step()
        optimizer.zero_grad()
    callback.on_train_end(None, None, None)
    return torch.stack(seen).numpy()
