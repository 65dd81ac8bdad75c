"""Layouts of the page of published expert layouts can run, and are those of its models and devices."""

import pytest

from benchmarks.published_expert_layouts import LAYOUTS, PAGE, Published
from costmodels.recipe import load_recipe
from hardware_profiles.catalog import profile_for
from planner.models.catalog import find_preset


@pytest.mark.parametrize("published", LAYOUTS, ids=lambda each: each.title)
def test_a_layout_is_one_of_its_model_batch_and_devices(published: Published) -> None:
    layout, mesh = published.layout, published.layout.mesh
    assert (
        mesh.world_size == published.num_devices == profile_for(published.num_devices, published.hardware).num_devices
    )
    assert mesh.violations() == ()
    assert layout.schedule.rules.violations(mesh.pp, layout.virtual_stages, layout.num_microbatches) == ()
    assert layout.num_microbatches * layout.micro_batch_size * mesh.dp == published.training.global_batch_size
    preset = find_preset(published.model)
    assert preset is not None
    assert (preset.config.experts or 1) % mesh.ep == 0
    if published.stage_layers:
        assert sum(published.stage_layers) == preset.config.layers
        assert len(published.stage_layers) == mesh.pp * layout.virtual_stages
    assert load_recipe(published.recipe).name == published.recipe


def test_the_page_has_a_section_for_each() -> None:
    text = PAGE.read_text()
    assert all(f"## {published.title}\n" in text and published.why in text for published in LAYOUTS)
