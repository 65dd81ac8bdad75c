"""The first way to trace: torch.export of one training step.

The training IR of ``torch.export`` keeps linear, norms, attention and cross entropy whole.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Generator

import torch

from planner.graph.tracer.as_trained import as_trained
from planner.graph.tracer.own_functions import functions_have_gradients
from planner.graph.tracer.program import Program, exported_program
from planner.graph.tracer.recurrent import one_step
from planner.graph.tracer.stand_ins import StandIn, TrainingStep


def export_step(step: TrainingStep, stand_in: StandIn) -> Program:
    """torch.export of the forward pass with its loss; raises whatever torch or the model raises."""
    with torch.device(stand_in.device), one_step(), functions_have_gradients(), as_trained():
        return exported_program(torch.export.export(step, (stand_in.batch,), strict=False))


@contextlib.contextmanager
def _silent() -> Generator[None]:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Keeps torch's warnings, logs and half-traced graphs from the user, and what the model prints of such values.

    What goes wrong is in the exception; the model's own warnings show when it runs.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)  # which are those of what is raised
    try:
        with warnings.catch_warnings(), _silent():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
