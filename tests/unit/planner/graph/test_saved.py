"""What autograd keeps: closed forms operator by operator, and autograd's own hooks on the CPU."""

from pathlib import Path

import pytest
import torch

from planner.graph.assemble import saved_bytes
from planner.graph.model_graph import ModelGraph
from planner.graph.tracer import trace_model
from planner.model_file import LoadedModel
from planner.models.inputs import call_model, training_batch
from tests.unit.planner.graph.traced import HF_CONFIGS, graph_of, loaded, loaded_from_code, loaded_from_config

BATCH, SEQ_LEN, HIDDEN, HEADS, LAYERS, VOCAB = 2, 32, 64, 4, 4, 256
TOKENS = BATCH * SEQ_LEN


def kept_in_blocks(graph: ModelGraph) -> int:
    """Bytes kept by all repeated blocks, the input of the first of them and of none after."""
    ids = {node for unit in graph.units if unit.is_block for node in unit.nodes}
    kept = {storage for node in graph.nodes if node.id in ids for storage in node.saves}
    return sum(graph.nodes[s].output_bytes for s in kept) + sum(graph.nodes[i].saved_extra_bytes for i in ids)


def test_gpt_block_in_closed_form() -> None:
    """Per token in bf16, flash attention, no dropout: 34·h of the published formula less 2 masks of h bytes
    (34 → 32), less 2·h for attention's output, which the formula counts with the projection's input: here it is the
    same memory; the plus is statistics in float32: 2 · 2 · 4 bytes of norms and 4 bytes per head of log-sum-exp.

    norm input 2h, QKV's input 2h, fused QKV 6h, attention output = projection input 2h, norm input 2h, MLP input 2h,
    GELU input 8h, GELU output 8h: 32h.
    """
    per_token = 32 * HIDDEN + 2 * 2 * 4 + HEADS * 4
    tables = 2 * SEQ_LEN * 0
    assert kept_in_blocks(graph_of("gpt-tiny")) == LAYERS * TOKENS * per_token + tables


def test_llama_block_in_closed_form() -> None:
    """Norm input 2h, projections' input 2h, rotated query 2h, rotated key and value 2·2·h/2 (two of four heads),
    attention output 2h, norm input 2h, MLP input 2h, gate, SiLU of it, up, their product 4 · 2f; one float32 a row
    for each norm, one a head for attention. The rotary tables (2 · s · head width) are shared by all blocks.
    """
    ffn = 192
    per_token = 14 * HIDDEN + 8 * ffn + 2 * 4 + HEADS * 4
    tables = 2 * 2 * SEQ_LEN * (HIDDEN // HEADS)
    assert kept_in_blocks(graph_of("llama-tiny")) == LAYERS * TOKENS * per_token + tables


def test_the_loss_keeps_log_probabilities_in_float32() -> None:
    graph = graph_of("gpt-tiny")
    loss = next(node for node in graph.nodes if node.op == "aten.cross_entropy_loss.default")
    assert loss.saved_extra_bytes == TOKENS * VOCAB * 4


def kept_by_autograd(model: LoadedModel, dtype: torch.dtype) -> int:
    """Bytes of all storages that autograd's hooks see on the CPU, parameters aside."""
    torch.manual_seed(0)
    module = model.build().to(dtype)
    own = {p.untyped_storage().data_ptr() for p in (*module.parameters(), *module.buffers())}
    inputs = model.example_inputs(BATCH, SEQ_LEN)
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss_fn(call_model(module, inputs), training_batch(inputs))
    del loss
    return sum(storage.nbytes() for storage in kept.values())


def test_equals_autograd_on_the_cpu_for_gpt() -> None:
    """In float32 the CPU's kernels keep what CUDA's do, but for the 4 bytes of cross entropy's total weight."""
    graph = graph_of("gpt-tiny", dtype="float32")
    assert kept_by_autograd(loaded("gpt-tiny"), torch.float32) - graph.saved_activation_bytes == 4


def test_differs_from_autograd_on_the_cpu_for_llama_by_its_norms() -> None:
    """The CPU has no fused RMS norm: it keeps the normalised input too, once for each of the 9 norms."""
    graph = graph_of("llama-tiny", dtype="float32")
    norms = 9 * TOKENS * HIDDEN * 4
    assert kept_by_autograd(loaded("llama-tiny"), torch.float32) - graph.saved_activation_bytes == norms + 4


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_equals_autograd_on_the_cpu_for_huggingface(name: str, tmp_path: Path) -> None:
    """Their norms are written out in elementwise operators, which keep the same everywhere."""
    model = loaded_from_config(HF_CONFIGS[name], tmp_path)
    graph = trace_model(model, BATCH, SEQ_LEN, "float32")
    assert kept_by_autograd(model, torch.float32) - graph.saved_activation_bytes == 4


ROTATED = """
import torch
from torch import nn
from torch.nn import functional as F

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.qkv, self.output, self.head = nn.Linear(64, 192), nn.Linear(64, 64), nn.Linear(64, 256)
    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = (each.unflatten(-1, (4, 16)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        a, b = q.chunk(2, dim=-1)
        q = {query}
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.output(y.transpose(1, 2).reshape(x.shape)))

def build_model():
    return Attention()
"""


def test_attention_lays_its_output_out_as_its_query_is(tmp_path: Path) -> None:
    """Heads before positions, as ``torch.cat`` writes them: then the projection keeps a copy of attention's output."""
    kept, of_autograd = list[int](), list[int]()
    for number, query in enumerate(("q * 2", "torch.cat((a * 2, b * 2), dim=-1)")):
        (tmp_path / str(number)).mkdir()
        model = loaded_from_code(ROTATED.format(query=query), tmp_path / str(number))
        kept.append(trace_model(model, BATCH, SEQ_LEN, "bfloat16").saved_activation_bytes)
        of_autograd.append(kept_by_autograd(model, torch.bfloat16))
    assert kept[1] - kept[0] == of_autograd[1] - of_autograd[0] == TOKENS * HIDDEN * 2


def test_a_storage_counts_once_however_many_keep_it() -> None:
    graph = graph_of("llama-tiny")
    each = sum(graph.nodes[s].output_bytes for node in graph.nodes for s in node.saves)
    extra = sum(node.saved_extra_bytes for node in graph.nodes)
    assert saved_bytes(graph.nodes) < each + extra


def test_saves_name_owners_of_memory() -> None:
    for node in graph_of("gpt-tiny").nodes:
        for storage in node.saves:
            assert graph_of("gpt-tiny").nodes[storage].storage == storage


WRITTEN_OUT = """
import math, torch
from torch import nn
from torch.nn import functional as F

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.output = nn.Linear(64, 192), nn.Linear(64, 64)
        self.register_buffer("hidden", torch.ones(32, 32, dtype=torch.bool).triu(1), persistent=False)
    def forward(self, x):
        q, k, v = (y.view(*x.shape[:2], 4, 16).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        scores = (q @ k.transpose(-2, -1) / math.sqrt(16)).masked_fill(self.hidden, float("-inf"))
        shares = F.dropout(scores.softmax(-1), 0.1)
        return self.output((shares @ v).transpose(1, 2).reshape(x.shape))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.attention, self.second = nn.LayerNorm(64), Attention(), nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        x = x + F.dropout(self.attention(self.first(x)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1)

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 256, bias=False)
    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build_model():
    return GPT()
"""


def test_gpt_block_written_out_is_the_published_formula(tmp_path: Path) -> None:
    """Korthikanti et al. 2022, equation 1: sbh(34 + 5·a·s/h), bf16 with dropout and scores in memory.

    The plus is what they leave out as small: 2 · 2 float32 statistics of norms a token.
    """
    graph = trace_model(loaded_from_code(WRITTEN_OUT, tmp_path), BATCH, SEQ_LEN)
    published = TOKENS * HIDDEN * 34 + TOKENS * 5 * HEADS * SEQ_LEN
    assert kept_in_blocks(graph) == LAYERS * (published + TOKENS * 2 * 2 * 4)


def test_dropout_on_the_cpu_keeps_its_noise_in_the_dtype_of_the_input(tmp_path: Path) -> None:
    """CUDA's keeps a byte an element. All else is equal, but for the 4 bytes of cross entropy's total weight."""
    model = loaded_from_code(WRITTEN_OUT, tmp_path)
    graph = trace_model(model, BATCH, SEQ_LEN, "float32")
    elements = LAYERS * (2 * TOKENS * HIDDEN + HEADS * TOKENS * SEQ_LEN)
    assert kept_by_autograd(model, torch.float32) - graph.saved_activation_bytes == (4 - 1) * elements + 4


def test_moe_block_in_closed_form() -> None:
    """Attention and norms as Llama's, 14·h; the shared expert as Llama's network, 8·f.

    Of each of k chosen experts: its rows 2h, gate, SiLU of it, up, their product 4 · 2f, its result before weighing
    2h; the index of the row three times 3 · 8, its weight 2, and of the choice a float32 and
    an int64. The router: softmax 4·E and the sum of the weights chosen, 4. Once a layer the ends of the experts'
    rows, 4·E. The first layer is dense.
    """
    ffn, width, experts, top_k = 192, 64, 8, 2
    statistics = 2 * 4 + HEADS * 4
    dense = 14 * HIDDEN + 8 * ffn + statistics
    chosen = 4 * HIDDEN + 8 * width + 3 * 8 + 2 + 4 + 8
    sparse = 14 * HIDDEN + 8 * width + top_k * chosen + 4 * experts + 4 + statistics
    tables = 2 * 2 * SEQ_LEN * (HIDDEN // HEADS)
    expected = TOKENS * (dense + (LAYERS - 1) * sparse) + (LAYERS - 1) * 4 * experts + tables
    assert kept_in_blocks(graph_of("moe-tiny")) == expected


def test_differs_from_autograd_on_the_cpu_for_moe_by_its_norms() -> None:
    """As for Llama: the CPU keeps the input of each of the 9 norms normalised, too."""
    graph = graph_of("moe-tiny", dtype="float32")
    norms = 9 * TOKENS * HIDDEN * 4
    assert kept_by_autograd(loaded("moe-tiny"), torch.float32) - graph.saved_activation_bytes == norms + 4
