"""Model files that do what they should not: a clear answer, in time, and nothing of it reaches the caller."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from costmodels.vocabulary.choices import Precision
from planner.errors import ModelError
from planner.graph.graph_cache import traced_graph
from planner.graph.model_graph import ModelGraph
from planner.graph.tracing import TraceRequest, trace
from planner.model_file import resolve_model
from tests.unit.planner.graph.traced import ROOT

MODEL = """
import os, sys
{top}
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32, bias=False)
    def forward(self, ids):
        {forward}
        return self.head(self.embedding(ids))

def build_model():
    {build}
    return Net()
"""
NUM_PARAMS = 2 * 32 * 16


def written(folder: Path, *, top: str = "", forward: str = "pass", build: str = "pass") -> str:
    path = folder / "model.py"
    path.write_text(MODEL.format(top=top, forward=forward, build=build))
    return str(path)


def request_for(path: str) -> TraceRequest:
    return TraceRequest(resolve_model(path), 1, 8, Precision.BF16)


def traced(path: str, time_limit_s: float = 60.0) -> ModelGraph:
    return trace(request_for(path), time_limit_s).graph


NOISE = "os.write(1, b'noise'); print('noise'); os.system('echo noise'); print('noise', file=sys.__stdout__)"
REPLACED = "import io; sys.stdout = io.StringIO(); sys.stderr = sys.__stdout__"


@pytest.mark.parametrize(
    "parts",
    [
        {"top": NOISE, "build": NOISE, "forward": NOISE},
        {"top": f"{REPLACED}; import atexit; atexit.register(os.write, 1, b'noise'); print(file=sys.__stdout__)"},
        {"top": "sys.stdout.close(); os.close(1)"},
    ],
    ids=["prints", "replaced streams", "closed stdout"],
)
def test_json_stays_clean(parts: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "planner", "trace", written(tmp_path, **parts), "--seq-len", "8", "--json"]
    environment = {**os.environ, "PLANNER_CACHE": "off"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
    assert json.loads(done.stdout)["num_params"] == NUM_PARAMS


@pytest.mark.usefixtures("traced_by_fork")
def test_state_of_the_process_is_its_own(tmp_path: Path) -> None:
    top = (
        "import torch, logging, signal; torch.set_default_dtype(torch.float64); os.chdir('/'); sys.argv[:] = ['x']; "
        "os.environ['PLANNER_TEST'] = 'x'; signal.signal(signal.SIGINT, signal.SIG_IGN); logging.basicConfig(level=0)"
    )
    before = (os.getcwd(), list(sys.argv), dict(os.environ), torch.get_default_dtype(), signal.getsignal(signal.SIGINT))
    assert traced(written(tmp_path, top=top)).num_params == NUM_PARAMS
    after = (os.getcwd(), list(sys.argv), dict(os.environ), torch.get_default_dtype(), signal.getsignal(signal.SIGINT))
    assert after == before


def test_arguments_are_not_ours(tmp_path: Path) -> None:
    """A training script that reads its arguments when imported gets none, and so its defaults.

    Nor is anything collected in so short a life, a sixth of which that would take.
    """
    top = (
        "import argparse; parser = argparse.ArgumentParser(); parser.add_argument('--n'); parser.parse_args(); "
        "import gc; assert not gc.isenabled()"
    )
    assert traced(written(tmp_path, top=top)).num_params == NUM_PARAMS


@pytest.mark.usefixtures("traced_by_fork")
@pytest.mark.parametrize(
    "parts",
    [
        {"forward": "while True: pass"},
        {"top": "while True:\n    try:\n        while True: pass\n    except BaseException: pass"},
    ],
    ids=["in forward", "though interrupted"],
)
def test_what_hangs_is_ended(parts: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"did not end within 2 s") as stopped:
        traced(written(tmp_path, **parts), time_limit_s=2.0)
    assert stopped.value.hint is not None
    assert "--seq-len" in stopped.value.hint
    assert "torch.library.custom_op" in stopped.value.hint


@pytest.mark.usefixtures("traced_by_fork")
def test_threads_and_processes_left_behind_are_not_waited_for(tmp_path: Path) -> None:
    top = (
        "import threading, time, subprocess; threading.Thread(target=time.sleep, args=(600,)).start(); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))"
    )
    assert traced(written(tmp_path, top=top)).num_params == NUM_PARAMS
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    deadline = time.monotonic() + 5  # a zombie until its new parent has looked
    while stat.exists() and stat.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


@pytest.mark.usefixtures("traced_by_fork")
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"top": "os._exit(0)"}, r"ended its process during the trace: exit code 0"),
        ({"build": "os.kill(os.getpid(), 9)"}, r"killed by SIGKILL, as the system does when memory runs out"),
        ({"forward": "sys.exit(0)"}, r"SystemExit"),
        ({"top": "input('name?')"}, r"model\.py:3: EOFError"),
        ({"top": "raise ValueError('ünï [bold]💥[/]')"}, r"ValueError: ünï \[bold\]💥\[/\]"),
    ],
    ids=["exit", "killed", "sys.exit in forward", "input", "unicode"],
)
def test_what_ends_or_raises_is_an_error(parts: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        traced(written(tmp_path, **parts))


@pytest.mark.usefixtures("traced_by_fork")
@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff\xfe\0binary\0", r"model\.py: "), (b"\0" * (2**24 + 1), r"has 16,777,217 bytes: no Python file")],
    ids=["binary", "giant"],
)
def test_what_is_no_python_file(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        traced(str(tmp_path / "model.py"))


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "model.py").mkdir()
    with pytest.raises(ModelError, match="no config.json|is a folder"):
        resolve_model(str(tmp_path / "model.py"))


@pytest.mark.usefixtures("traced_by_fork")
def test_what_the_code_read_is_part_of_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file beside it, data it opens, and a variable it asks for: a change of any is a new trace."""
    (tmp_path / "planner_test_sizes.py").write_text("WIDTH = 4\n")
    (tmp_path / "sizes.json").write_text("[2]")
    (tmp_path / "model.py").write_text(
        "import json, os\nfrom pathlib import Path\nfrom torch import nn\nfrom planner_test_sizes import WIDTH\n"
        "DEPTH = json.loads((Path(__file__).parent / 'sizes.json').read_text())[0]\n"
        "VOCAB = int(os.environ.get('PLANNER_TEST_VOCAB', '8'))\n"
        "def build_model():\n"
        "    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]\n"
        "    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *layers, nn.Linear(WIDTH, VOCAB, bias=False))\n"
    )
    folder = tmp_path / "cache"

    def num_params() -> int:
        return traced_graph(request_for(str(tmp_path / "model.py")), folder).num_params

    assert num_params() == 2 * 8 * 4 + 2 * 4 * 4
    (entry,) = folder.iterdir()
    written_at = entry.stat().st_mtime_ns
    assert num_params() == 2 * 8 * 4 + 2 * 4 * 4
    assert entry.stat().st_mtime_ns == written_at  # read, not traced again
    (tmp_path / "planner_test_sizes.py").write_text("WIDTH = 16\n")
    assert num_params() == 2 * 8 * 16 + 2 * 16 * 16
    (tmp_path / "sizes.json").write_text("[3]")
    assert num_params() == 2 * 8 * 16 + 3 * 16 * 16
    monkeypatch.setenv("PLANNER_TEST_VOCAB", "32")
    assert num_params() == 2 * 32 * 16 + 3 * 16 * 16
