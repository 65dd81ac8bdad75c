"""One trace: presets and configs in this process, a user's code in a process of its own (no torch here).

Code in a model file may print to any stream, change the folder, the environment or torch's defaults,
start threads, hang, or end its process: none of that reaches the caller. The child's standard output
is our standard error, its standard input is empty, it has no arguments, and its answer is a file without a name.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from pydantic import BaseModel, ConfigDict, ValidationError

from costmodels.vocabulary.choices import Precision
from planner import errors
from planner.errors import ModelError, PlannerError
from planner.graph.model_graph import ModelGraph
from planner.graph.read_files import ReadFiles
from planner.model_file import ModelKind, ModelSource, load_model, resolve_model

TIME_LIMIT_S = 300.0  # for all of a trace of a user's code; importing and building have their own, shorter ones
STDERR = 2
PROGRAM = (
    "import gc, json, sys; gc.disable(); order = json.loads(sys.argv[1]); sys.path[:] = order['path']; "  # ends soon
    "from planner.graph.tracing import answer; answer(order)"
)


@dataclass(frozen=True)
class TraceRequest:
    """What is to be traced: a micro-batch of a model. ``seq_len`` None: the model's own."""

    source: ModelSource
    batch_size: int
    seq_len: int | None
    precision: Precision


class TracedModel(BaseModel):
    """A graph, and what the user's code read to make it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    graph: ModelGraph
    files: dict[str, str] = {}  # absolute path -> SHA-256 of the content
    environment: dict[str, str] = {}  # variables whose names stand in those files


class _Failure(BaseModel):
    """An error on its way from the child; ``error`` names its class, "" one that is our own mistake."""

    error: str
    message: str
    hint: str


def trace(request: TraceRequest, time_limit_s: float = TIME_LIMIT_S) -> TracedModel:
    """Traces ``request``. ModelError where its model cannot be traced."""
    if request.source.kind is ModelKind.PYTHON:
        return _trace_in_child(request, time_limit_s)
    return TracedModel(graph=_trace_here(request))


def _trace_here(request: TraceRequest) -> ModelGraph:
    loaded = load_model(request.source)
    from planner.graph.tracer import trace_model, traced_dtype

    seq_len = request.seq_len or loaded.default_seq_len
    return trace_model(loaded, request.batch_size, seq_len, traced_dtype(request.precision))


def _trace_in_child(request: TraceRequest, time_limit_s: float) -> TracedModel:
    name = request.source.name
    with tempfile.TemporaryFile() as file:  # it has no name, so that nothing stays of it whoever is killed
        order = {
            "path": [str(entry) for entry in sys.path],
            "model": name,
            "recorded": None if request.source.recorded is None else dict(request.source.recorded),
            "batch_size": request.batch_size,
            "seq_len": request.seq_len,
            "precision": request.precision.value,
            "answer": file.fileno(),
        }
        code = _run([sys.executable, "-P", "-c", PROGRAM, json.dumps(order)], name, time_limit_s, file.fileno())
        file.seek(0)
        content = file.read()
    try:
        return TracedModel.model_validate_json(content)
    except ValidationError:
        failure = _failure(content)
    if failure is None:
        raise ModelError(f"{name} ended its process during the trace: {_reason(code)}", hint="correct the model file")
    known = getattr(errors, failure.error, None)
    if isinstance(known, type) and issubclass(known, PlannerError):
        raise known(failure.message, hint=failure.hint)
    raise RuntimeError(failure.message)


def _run(command: list[str], name: str, time_limit_s: float, answer: int) -> int:
    """Exit code of ``command``, to which ``answer`` stays open; ends it and whatever it started before returning."""
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=STDERR, start_new_session=True, pass_fds=(answer,)
    )
    try:
        return child.wait(time_limit_s)
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"{name}: the trace did not end within {time_limit_s:g} s",
            hint="does its forward pass or an import wait for something, or loop for ever? One that steps along the "
            "sequence in Python is traced step by step: give a shorter --seq-len, or make the loop one operator with "
            "torch.library.custom_op",
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _failure(content: bytes) -> _Failure | None:
    try:
        return _Failure.model_validate_json(content)
    except ValidationError:
        return None


def _reason(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    lacks_memory = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-code).name}{lacks_memory}"


def answer(order: Mapping[str, object]) -> None:
    """What the child does: traces, writes the graph or what went wrong, and ends without asking user code again."""
    name, recorded = str(order["model"]), order["recorded"]
    sys.argv[:] = [name]
    read = ReadFiles.watch()
    result: BaseModel
    try:
        seq_len = order["seq_len"]
        request = TraceRequest(
            source=replace(resolve_model(name), recorded=cast(dict[str, str] | None, recorded)),
            batch_size=int(str(order["batch_size"])),
            seq_len=None if seq_len is None else int(str(seq_len)),
            precision=Precision(order["precision"]),
        )
        path = request.source.path
        assert path is not None
        graph = _trace_here(request)
        graph = graph.model_copy(update={"files": read.own(path.resolve().parent)})
        result = TracedModel(graph=graph, files=read.digests(), environment=read.environment())
    except PlannerError as error:
        result = _Failure(error=type(error).__name__, message=error.message, hint=error.hint)
    except (SystemExit, KeyboardInterrupt) as error:
        result = _Failure(
            error=ModelError.__name__,
            message=f"{name} raised {type(error).__name__}({error}) while it was traced",
            hint="keep sys.exit out of the model file",
        )
    except BaseException as error:
        traceback.print_exc()
        result = _Failure(error="", message=f"{type(error).__name__} while tracing {name}: {error}", hint="")
    with os.fdopen(int(str(order["answer"])), "w", encoding="utf-8") as file:
        file.write(result.model_dump_json(exclude_defaults=True))
    os._exit(0)  # threads and exit handlers of the user's are not waited for
