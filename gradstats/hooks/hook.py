"""A DDP communication hook that compresses gradients.

Two lines in a training script::

    state = CompressionState(TopK(0.001))
    ddp_model.register_comm_hook(state, compression_hook)

The gradient is compressed as one vector over the whole model, as in most papers: buckets are held until the last one
arrives. Compressors that stream (:attr:`gradstats.compressors.Compressor.streams`) get every bucket at once, and
communicate while backpropagation goes on. Either way no communication thread holds a Python object afterwards: to
release it while the interpreter shuts down would abort the process (see :mod:`gradstats.collectives.plain`).
"""

# No `from __future__ import annotations` here: DDP reads the hook's annotations at run time.

from typing import NoReturn

import torch

from gradstats.errors import InputError, NonFiniteGradientError
from gradstats.hooks.gradient import pairs_of
from gradstats.hooks.state import CompressionState
from gradstats.hooks.step import HeldBucket, Step
from gradstats.hooks.torch_private import (
    NESTED,
    GradBucket,
    after_backward,
    backward_pass,
    before_finalizing,
    fail_when_asked,
    nested_backward,
    values_of_sparse,
)

__all__ = ["compression_hook"]


def compression_hook(
    state: CompressionState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average compressed gradients over the process group; a DDP communication hook.

    Parameters
    ----------
    state : CompressionState
        Memory and compressor of this rank.
    bucket : torch.distributed.GradBucket
        Given by DDP.

    Returns
    -------
    torch.futures.Future
        Future of the bucket's buffer, holding the average of what the ranks sent. Replicas get identical bits.

    Raises
    ------
    NonFiniteGradientError
        On every rank, when any rank's gradient holds NaN or infinity and the policy is to raise. It comes out of
        ``backward()``; memories stay as they were, and the next step can begin: zero the gradients, which each rank's
        own are left in.
    ExchangeError
        If a rank is lost, within the process group's timeout; memories stay as they were.
    InputError
        For parameters that the state was not made for, or buckets of a DDP variant that has none; on all ranks, if
        their states have other options or parameters, or are in another step.
    """
    if not isinstance(bucket, GradBucket):
        raise InputError(
            "compiled DDP's python_reducer hands over no buckets: set "
            "torch._dynamo.config.optimize_ddp = 'ddp_optimizer', or compile the inner module and wrap that in DDP"
        )
    # set with the last bucket: DDP waits for its futures only when the backward pass is over
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    buffer = bucket.buffer()
    # in DDP's Join a rank without inputs takes part with zeros: its .grad is not in them, and it takes no step
    joined = backward_pass() < 0
    if joined:
        state.join()
    with state.naming_step():
        step = state.in_progress
        # DDP passes over buckets, the first or the last too, with skip_all_reduce_unused_params
        if step is None or bucket.index() <= step.bucket or step.bucket < 0:
            step = state.begin(buffer.device)
            # where DDP passes over the last bucket, no bucket says that it is the last
            before_finalizing(lambda: _end(state, step))
        step.skipped |= bucket.index() != step.bucket + 1
        step.bucket = bucket.index()
        if buffer.is_sparse:  # of nn.Embedding(sparse=True): averaged exactly, without compression
            buffer = step.average_sparse(buffer, bucket.parameters())
        else:
            step.ready(pairs_of(bucket))
        step.held.append(HeldBucket(buffer, future))
    if bucket.is_last():
        _exchange(state, step, step.skipped)
        if joined:
            # again: the exchange has made an update, and no optimizer of this rank will take it
            state.join()
    return future


def _end(state: CompressionState, step: Step) -> None:
    """Complete a step whose last bucket DDP has passed over."""
    if not step.ended and step.held and nested_backward():
        raise InputError(NESTED)
    _exchange(state, step, skipped=True)


def _exchange(state: CompressionState, step: Step, skipped: bool) -> None:
    """Complete a step, unless that is done, and give DDP the buckets that it waits for."""
    if step.ended or not step.held:
        return
    # before the exchange: if that raises, the call before finalizing must not start it anew
    step.ended = True
    try:
        with state.naming_step():
            fill = state.complete(skipped)
    except NonFiniteGradientError as error:
        _raise_later(error, step.held)
        return
    for each in step.held:
        # the policy has filled the dense gradients; sparse ones are not among the pairs
        if fill is not None and each.buffer.is_sparse:
            values_of_sparse(each.buffer).fill_(fill)
        each.future.set_result(each.buffer)
    # a list of its own: the call must not keep the step and its buckets
    parameters = [parameter for parameter, _ in step.pairs]
    after_backward(lambda: state.note_filled(parameters))


def _raise_later(error: NonFiniteGradientError, held: list[HeldBucket]) -> None:
    """Raise when DDP has ended the step: an error within it would make every later step of the model fail in torch."""

    def fail(_: object = None) -> NoReturn:
        raise error

    # in DDP's Join there is no backward pass out of which to raise
    if not after_backward(fail):
        raise error
    for each in held:
        # DDP sees the buffer; who asks the future itself sees the error
        fail_when_asked(each.future, fail)
        each.future.set_result(each.buffer)
