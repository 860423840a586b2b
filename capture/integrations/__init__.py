"""Capture inside other libraries' trainers, and statistics of a captured run in TensorBoard.

:mod:`capture.integrations.huggingface` and :mod:`capture.integrations.lightning` have a ``CaptureCallback`` each,
:mod:`capture.integrations.tensorboard` writes event files. Each module needs the extra of its name, as in
``pip install 'gradstats[huggingface]'``, and says so when imported without it.
docs/howto/trainers.md shows how to use them.
"""
