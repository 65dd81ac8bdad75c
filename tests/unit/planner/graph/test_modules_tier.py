"""What torch.export cannot trace is run module by module; what Python asks of values is known, or assumed and said."""

from pathlib import Path

import pytest
import torch

from planner.graph.model_graph import ModelGraph
from planner.graph.node_operators import is_causal
from planner.graph.tracer import trace_model
from planner.model_file import LoadedModel
from tests.unit.planner.graph.test_saved import kept_by_autograd
from tests.unit.planner.graph.test_user_code import MODEL
from tests.unit.planner.graph.traced import (
    HF_CONFIGS,
    ROOT,
    assert_equal_work,
    counted_flops,
    loaded,
    loaded_from_code,
    loaded_from_config,
)

ROUTED = str(ROOT / "tests" / "fixtures" / "routed.py")
LAYER = 2 * 2 * 16 * 32 * 32  # FLOPs of one linear layer of one block of MODEL on 2 x 16 tokens
REST = 2 * 2 * 16 * 32 * 64  # of its head


def toy(body: str, folder: Path, beside: str = "") -> LoadedModel:
    return loaded_from_code(MODEL.format(init="pass", body=body) + beside, folder)


def assumed(graph: ModelGraph) -> tuple[str, ...]:
    """The warnings after the first, which says why torch.export stopped."""
    first, *others = graph.warnings
    assert first.startswith("traced by running the modules, since torch.export stopped: ")
    return tuple(others)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", str(ROOT / "examples" / "tiny_gpt.py"), "mixtral-8x7b"])
def test_both_tiers_agree_on_own_models(name: str) -> None:
    model = loaded(name)
    assert_equal_work(trace_model(model, 2, 32, tiers=("export",)), trace_model(model, 2, 32, tiers=("modules",)))


@pytest.mark.parametrize("name", sorted(HF_CONFIGS))
def test_both_tiers_agree_on_huggingface_models(name: str, tmp_path: Path) -> None:
    model = loaded_from_config(HF_CONFIGS[name], tmp_path)
    assert_equal_work(trace_model(model, 2, 32, tiers=("export",)), trace_model(model, 2, 32, tiers=("modules",)))


def test_a_loop_over_experts_is_traced_with_balanced_routing() -> None:
    """Whatever the routing, each token goes through two experts: the sum is what a real run counts."""
    model = loaded(ROUTED)
    graph = trace_model(model, 2, 32, "float32")
    assert graph.tier == "modules"
    assert (graph.forward_flops, graph.backward_flops) == counted_flops(model, 2, 32)
    assert [block.count for block in graph.blocks] == [3]
    assert assumed(graph) == ("routed.py:33 chooses by value (aten.topk.default): taken as evenly spread over 4",)
    rows = {node.shape[0] for node in graph.nodes if node.module.endswith("down") and node.flops}
    assert rows == {2 * 32 * 2 // 4}


def test_a_loop_over_experts_keeps_what_autograd_keeps() -> None:
    """But for the 4 bytes of cross entropy's total weight."""
    model = loaded(ROUTED)
    assert kept_by_autograd(model, torch.float32) - trace_model(model, 2, 32, "float32").saved_activation_bytes == 4


def test_many_layers_are_folded() -> None:
    few, many = trace_model(loaded(ROUTED), 2, 32), trace_model(loaded(f"{ROUTED}:deep"), 2, 32)
    assert [block.count for block in many.blocks] == [40]
    head = 2 * 2 * 32 * 32 * 256
    assert (many.forward_flops - head) * 3 == (few.forward_flops - head) * 40
    assert many.units[1].kind == many.units[40].kind


VALUES_THAT_CHANGE_NO_WORK = {
    "vmap": "return x + torch.vmap(self.a)(x)",
    "numpy": "return x + self.a(x) * float(x.detach().float().cpu().numpy().mean())",
    "checked": "y = self.a(x)\n        if torch.isnan(y).any(): raise ValueError('nan')\n        return x + y",
    "asserted": "y = self.a(x)\n        assert torch.isfinite(y).all()\n        return x + y",
    "counts": "i = torch.topk(x, 2).indices; c = torch.bincount(i.flatten(), minlength=32).tolist()\n"
    "        return x + self.a(torch.cat(x.repeat(1, 2, 1).flatten(0, 1).split(c))[:32].view(x.shape))",
    "loop": "y = self.a(x)\n        while y.norm() > 1e9: y = y / 2\n        return x + y",
    "one row": "return x + self.a(x) * x[x[..., 0] == x[0, 0, 0]].mean()",
}


@pytest.mark.parametrize("name", VALUES_THAT_CHANGE_NO_WORK)
def test_products_are_those_of_a_real_run(name: str, tmp_path: Path) -> None:
    model = toy(VALUES_THAT_CHANGE_NO_WORK[name], tmp_path)
    graph = trace_model(model, 2, 16)
    assert graph.tier == "modules"
    assert (graph.forward_flops, graph.backward_flops) == counted_flops(model, 2, 16)
    assert [block.count for block in graph.blocks] == [2]
    assumed(graph)


@pytest.mark.parametrize(
    ("body", "layers", "note"),
    [
        (
            "if x.abs().mean() > 1: x = self.a(x)\n        return x + self.a(x)",
            2,
            "model.py:25 asks for a condition that depends on values: taken as True",
        ),
        (
            "if x.abs().mean() > 1: return x\n        return x + self.a(x)",
            1,
            "model.py:25 asks for a condition that depends on values: taken as False",
        ),
        (
            "y = self.a(x)\n        while y.norm() > 1: y = y / 2\n        return x + y",
            1,
            "model.py:26 asks for a condition that depends on values: taken as False",
        ),
        (
            "return x + self.a(x[x[..., 0] > 0]).mean()",
            1,
            "model.py:25 uses values of a tensor that are not known: all its elements are taken as 1 or True",
        ),
        (
            "n = int((x[0, :, 0] > 0).sum()); return x + self.a(x)[:, :n].mean(1, keepdim=True)",
            1,
            "model.py:25 reads a number from a tensor whose values are not known: taken as 1",
        ),
    ],
    ids=["branch", "early exit", "loop", "mask", "number"],
)
def test_what_is_not_known_is_assumed_and_said(body: str, layers: int, note: str, tmp_path: Path) -> None:
    """The way with more work is kept: its FLOPs by hand."""
    graph = trace_model(toy(body, tmp_path), 2, 16)
    assert graph.forward_flops == 2 * layers * LAYER + REST
    (told,) = assumed(graph)
    assert told.startswith(note)


LENGTHS = """
def example_inputs(batch_size, seq_len):
    lengths = torch.full((batch_size,), seq_len // 4)
    return {"ids": torch.zeros(batch_size, seq_len, dtype=torch.int64), "lengths": lengths}
def loss_fn(output, batch):
    return output.float().mean()
"""


def test_values_of_example_inputs_are_known(tmp_path: Path) -> None:
    code = MODEL.format(init="pass", body="return x + self.a(x)").replace(
        "def forward(self, ids):\n        x = self.embedding(ids)",
        "def forward(self, ids, lengths):\n        x = self.embedding(ids[:, : lengths.max().item()])",
    )
    graph = trace_model(loaded_from_code(code + LENGTHS, tmp_path), 2, 16)
    assert graph.forward_flops == (2 * LAYER + REST) / 4
    assert graph.tier == "modules"
    assert assumed(graph) == ()


OPAQUE = """
import planner_test_operators  # noqa
"""


def test_an_operator_that_tells_no_sizes_is_run_once(tmp_path: Path) -> None:
    (tmp_path / "planner_test_operators.py").write_text(
        "import torch\n"
        "@torch.library.custom_op('planner_test::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
    )
    graph = trace_model(toy("return x + torch.ops.planner_test.twice(self.a(x))", tmp_path, OPAQUE), 2, 16)
    assert graph.forward_flops == 2 * LAYER + REST
    ran, rule = (w for w in assumed(graph) if "planner_test.twice" in w)
    assert ran.startswith("model.py:25 calls planner_test.twice.default, which tells no sizes without values")
    assert rule.startswith("no rule for operator planner_test.twice.default (model.py:25): replicated")


def test_what_a_model_prints_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace_model(toy("print('mean', x.mean()); return x + self.a(x)", tmp_path), 2, 16)
    assert capsys.readouterr().out == ""


def test_gradients_stop_where_they_are_switched_off(tmp_path: Path) -> None:
    body = "with torch.no_grad(): y = self.a(x)\n        return x + y + Square.apply(x)"
    graph = trace_model(toy(body, tmp_path), 2, 16, tiers=("modules",))
    linear = [node for node in graph.nodes if node.module.endswith(".a") and node.flops]
    square = [node for node in graph.nodes if node.op == "aten.mul.Tensor"]
    assert [node.requires_grad for node in linear] == [False, False]
    assert [node.requires_grad for node in square] == [True, True]


@pytest.mark.parametrize(
    ("block", "around", "readers"),
    [
        ("return x + self.a(x)", "if x.norm() > 1: x = x / 2", ("",)),
        ("if x.norm() > 1: x = x / 2\n        return x + self.a(x)", "pass", ("layers.0", "layers.1")),
        ("return x + self.a(x) * x.mean().item()", "pass", ("layers.0", "layers.1")),
        ("return x + self.a(x)", "pass", ()),
    ],
    ids=["around", "in the blocks", "exported", "none"],
)
def test_who_reads_values_is_remembered(block: str, around: str, readers: tuple[str, ...], tmp_path: Path) -> None:
    code = MODEL.format(init="pass", body=block).replace(
        "return self.head(x)", f"{around}\n        return self.head(x)"
    )
    loss = "\ndef loss_fn(output, batch):\n    loss = output.float().mean()\n    return loss if loss > 0 else -loss\n"
    assert trace_model(loaded_from_code(code, tmp_path), 2, 16).reads_values == readers
    assert trace_model(loaded_from_code(code + loss, tmp_path), 2, 16).reads_values == readers


HEADS = "q, k = self.a(x).view(2, 16, 4, 8).transpose(1, 2), x.view(2, 16, 4, 8).transpose(1, 2)[:, :2]\n        "
FLEX = (
    "from torch.nn.attention.flex_attention import create_block_mask, flex_attention\n"
    "        causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device=x.device)\n"
    "        y = torch.compile(flex_attention)(q, k, k, block_mask=causal, enable_gqa=True)\n"
    "        return x + y.transpose(1, 2).reshape(x.shape)"
)
FUSED = (
    "y = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)\n"
    "        return x + y.transpose(1, 2).reshape(x.shape)"
)


def test_flex_attention_is_attention(tmp_path: Path) -> None:
    (first := tmp_path / "flex").mkdir()
    (second := tmp_path / "fused").mkdir()
    flex, fused = trace_model(toy(HEADS + FLEX, first), 2, 16), trace_model(toy(HEADS + FUSED, second), 2, 16)
    assert (flex.tier, fused.tier) == ("modules", "export")
    assert (flex.forward_flops, flex.backward_flops) == (fused.forward_flops, fused.backward_flops)
    assert flex.saved_activation_bytes == fused.saved_activation_bytes
    assert [block.count for block in flex.blocks] == [2]
    attention = [node for node in flex.nodes if node.op_class == "attention"]
    assert [node.source for node in attention] == ["model.py:28", "model.py:28"]
    assert [is_causal(node) for node in attention] == [True, True]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("F.scaled_dot_product_attention(q, q, q, is_causal=True)", True),
        ("F.scaled_dot_product_attention(q, q, q, None, 0.0, True)", True),
        ("F.scaled_dot_product_attention(q, q, q)", False),
        ("F.scaled_dot_product_attention(q, q, q, attn_mask=q.new_zeros(16, 16))", False),
        ("torch.nn.attention.flex_attention.flex_attention(q, q, q)", False),
    ],
)
def test_attention_is_causal_where_it_says_so(call: str, expected: bool, tmp_path: Path) -> None:
    body = f"{HEADS}import torch.nn.attention.flex_attention\n        y = {call}\n        "
    graph = trace_model(toy(body + "return x + y.transpose(1, 2).reshape(x.shape)", tmp_path), 2, 16)
    assert [is_causal(node) for node in graph.nodes if node.op_class == "attention"] == [expected, expected]
