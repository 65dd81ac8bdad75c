"""What is priced, on what, and how the framework runs it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from costmodels.bands import Tier, time_tier
from costmodels.calibrated import scaled_recipe
from costmodels.recipe import AttentionKernel, Recipe, attention_kernel, load_recipe
from costmodels.vocabulary.choices import ContextMethod
from hardware_profiles.calibrated import Factors, scaled
from hardware_profiles.schema import ClusterSpec
from planner.axes.framework import Framework
from planner.graph.model_graph import ModelGraph
from planner.layout.within import Within
from planner.pricing.machine import Machine
from planner.pricing.rows import KnownWork


@dataclass(frozen=True)
class PricingTarget:
    """A model on a cluster in a framework."""

    graph: ModelGraph
    cluster: ClusterSpec
    precision: str
    recipe: Recipe = field(default_factory=load_recipe)
    attention: AttentionKernel | None = None  # None: the recipe's flash kernel
    # A token goes to each node of its experts once, whatever the recipe says of that.
    dispatches_once_a_node: bool = False
    within: Within | None = None  # the layouts that are searched; None: all
    framework_name: str = "planner"  # as the user names it: a recipe may be that of several

    def scaled(self, factors: Factors, constant_bytes: float = 0.0) -> PricingTarget:
        """The same on a cluster of which ``factors`` are so many times as large, with so much more memory in use."""
        profile = scaled(self.cluster.profile, factors, constant_bytes)
        cluster = self.cluster.model_copy(update={"profile": profile})
        return replace(self, cluster=cluster, recipe=scaled_recipe(self.recipe, factors))

    @property
    def known_of_times(self) -> str:
        """What is known of step times of this framework on this cluster, in words."""
        return self._time_tier.value

    @property
    def is_seen(self) -> bool:
        """Whether runs of this framework on this cluster or on its devices were ever compared with predictions."""
        return self._time_tier is not Tier.UNSEEN

    @property
    def _time_tier(self) -> Tier:
        profile = self.cluster.profile
        return time_tier(self.recipe, profile.device.name, profile.calibration, self.framework_name)

    @property
    def calibrated_by(self) -> str:
        """The measured runs that correct the cluster's profile, in words; empty where there are none."""
        found = self.cluster.profile.calibration
        if found is None:
            return ""
        runs = f"{len(found.runs)} measured run{'s' if len(found.runs) > 1 else ''}"
        return f"{runs} of {', '.join(found.frameworks)}, {found.date}"

    @property
    def attention_kernel(self) -> AttentionKernel:
        """How attention runs."""
        return self.attention or attention_kernel(self.recipe.flash_kernel)

    @property
    def cp_methods(self) -> tuple[ContextMethod, ...]:
        """Ways of context parallelism that the framework has; where its recipe says nothing, gathering."""
        known = self.recipe.context_methods
        return (ContextMethod.ALL_GATHER,) if known is None else known.methods

    @cached_property
    def machine(self) -> Machine:
        """The cluster, as prices ask it."""
        return Machine(self.cluster)

    def machine_on(self, cluster: ClusterSpec) -> Machine:
        """The cluster, or a group of unlike devices of it, as prices ask it."""
        return self.machine if cluster is self.cluster else Machine(cluster)

    @cached_property
    def known_work(self) -> KnownWork:
        """The rows of work that were priced on the cluster."""
        return KnownWork(self.graph, self.machine, self.framework)

    def over(self, num_devices: int) -> PricingTarget:
        """The same over another number of devices of one kind, with what is priced already where prices are the same.

        So are then the placements.
        """
        found = replace(self, cluster=self.cluster.model_copy(update={"num_devices": num_devices}))
        if found.prices_as(self):
            vars(found)["known_work"] = self.known_work  # as the property itself would keep it
        return found

    def prices_as(self, other: PricingTarget) -> bool:
        """Whether all units cost the same on one device of ``other``, which may have more devices or fewer."""
        return other == replace(self, cluster=other.cluster) and self.machine.prices_as(other.machine)

    @cached_property
    def framework(self) -> Framework:
        """The recipe with what this run chooses besides."""
        return Framework(self.recipe, self.precision, self.attention_kernel, self.dispatches_once_a_node)
