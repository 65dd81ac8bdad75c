"""The learning rate at every step, and which parameters decay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from costmodels.vocabulary.choices import Optimizer
from planner.errors import InputError
from planner.executor.optimizer import build_optimizer, parameter_groups, rate_at
from planner.executor.options import DataOptions, Decay, LearningRate, Optimization, RunOptions

PEAK, STEPS = 2.0, 100


def rates(**options: object) -> list[float]:
    optimization = Optimization(**options)  # pyright: ignore[reportArgumentType]
    return [rate_at(step, optimization, PEAK, STEPS) for step in range(STEPS + 5)]


def test_nothing_changes_by_default() -> None:
    assert set(rates()) == {PEAK}


def test_rate_grows_linearly_to_its_peak() -> None:
    assert rates(warmup_steps=4)[:6] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("schedule", [LearningRate.LINEAR, LearningRate.COSINE])
def test_rate_falls_to_its_share_and_stays(schedule: LearningRate) -> None:
    found = rates(schedule=schedule, warmup_steps=10, final_share=0.1)
    assert found[10] == PEAK
    assert found[55] == pytest.approx(0.55 * PEAK)  # half way down, in both
    assert found[100:] == pytest.approx([0.1 * PEAK] * 5)
    assert found[10:] == sorted(found[10:], reverse=True)


def test_cosine_is_torch_s_own() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=PEAK)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for rate in rates(schedule=LearningRate.COSINE)[:STEPS]:
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        schedule.step()


def test_wsd_is_constant_until_its_decay() -> None:
    found = rates(schedule=LearningRate.WSD, warmup_steps=10, decay_steps=20)
    assert set(found[10:81]) == {PEAK}
    assert found[90] == pytest.approx(PEAK / 2)
    assert found[100] == 0.0
    assert set(rates(schedule=LearningRate.WSD)[:91]) == {PEAK}  # a tenth by default


def test_a_warm_up_longer_than_the_schedule_is_refused() -> None:
    options = Optimization(schedule=LearningRate.COSINE, warmup_steps=20)
    options.check(21)
    with pytest.raises(InputError, match="20 steps, but its schedule ends after 20"):
        options.check(20)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"final_share": 0.1}, "--final-lr-share would change nothing: the learning rate is constant"),
        ({"schedule_steps": 9, "final_share": 0.1}, "--schedule-steps and --final-lr-share would change nothing"),
        ({"schedule": LearningRate.COSINE, "decay_steps": 5}, "--decay-steps is of --lr-schedule wsd"),
        ({"decay_steps": 5}, "--decay-steps is of --lr-schedule wsd"),
        (
            {"schedule": LearningRate.WSD, "decay_steps": 16, "warmup_steps": 5},
            "falls for 16 steps behind a warm-up of 5",
        ),
    ],
)
def test_options_of_another_schedule_are_refused(options: dict[str, object], words: str) -> None:
    """They were taken, and the rate stayed as it was."""
    with pytest.raises(InputError, match=words):
        Optimization(**options).check(20)  # pyright: ignore[reportArgumentType]
    Optimization(schedule=LearningRate.WSD, decay_steps=15, warmup_steps=5, final_share=0.1).check(20)
    Optimization(warmup_steps=30).check(20)  # which the next run goes on with


def test_gradients_clipped_to_nothing_are_refused() -> None:
    """--clip-norm 0 was taken, as if for no clipping, and the parameters only decayed."""
    Optimization(clip_norm=1e-3).check(20)
    with pytest.raises(InputError, match="nothing would be learned"):
        Optimization(clip_norm=0.0).check(20)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.LayerNorm(2)
        self.expert_bias = nn.Parameter(torch.ones(2, 2))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def test_norms_and_biases_do_not_decay_where_asked() -> None:
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = Optimization(weight_decay=0.5, decay=Decay.MATRICES)
    optimizer = build_optimizer(parameter_groups(list(model.named_parameters()), options), Optimizer.ADAMW, 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"layer.weight"}
    assert torch.allclose(model.layer.weight, before["layer.weight"] * 0.95)


def test_one_group_of_torch_s_own_by_default() -> None:
    groups = parameter_groups(list(Model().named_parameters()), Optimization())
    assert [set(group) for group in groups] == [{"params"}]
    assert len(groups[0]["params"]) == 5


@pytest.mark.parametrize("name", Optimizer)
def test_complex_parameters_are_trained(name: Optimizer) -> None:
    """Adam ended in an error of torch's, which fuses real numbers alone."""
    parameter = nn.Parameter(torch.tensor([1 + 2j, -1j]))
    parameter.grad = torch.tensor([2j, 1 + 0j])
    build_optimizer([parameter], name, 0.1).step()
    assert bool((parameter.detach() != torch.tensor([1 + 2j, -1j])).all())


def test_what_is_asked_for_at_steps_that_do_not_come_is_told() -> None:
    options = RunOptions(steps=50, data=DataOptions(eval_every=20), profile=(30, Path("profile")))
    assert options.never_comes(0) == []
    assert options.never_comes(35) == ["--profile-step 30: steps are 36 to 50"]
    assert [text.split(":")[0] for text in options.never_comes(40)] == ["--eval-every 20", "--profile-step 30"]
    assert options.never_comes(50) == ["--steps 50: 50 are done already, which count among them"]  # nothing was said


def test_momentum_keeps_nine_tenths_of_the_last_update() -> None:
    parameter = nn.Parameter(torch.tensor([1.0]))
    optimizer = build_optimizer([parameter], Optimizer.SGD_MOMENTUM, 0.5)
    for gradient in (1.0, 2.0):
        parameter.grad = torch.tensor([gradient])
        optimizer.step()
    assert parameter.item() == pytest.approx(1 - 0.5 * 1 - 0.5 * (0.9 * 1 + 2))
    assert [value.numel() for value in optimizer.state[parameter].values()] == [1]
