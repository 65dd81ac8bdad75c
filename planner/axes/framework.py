"""How a framework runs a layout: what axes and prices ask of it."""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.recipe import AttentionKernel, Recipe, attention_kernel


@dataclass(frozen=True)
class Framework:
    """A framework's recipe with what a single run chooses besides."""

    recipe: Recipe
    precision: str
    attention: AttentionKernel
    runs_once_a_node: bool = False  # a token goes to each node of its experts once, whatever the recipe says

    @property
    def dispatches_once_a_node(self) -> bool:
        """Whether a token goes to each node of its experts once, and over NVLink to all of them there."""
        return self.runs_once_a_node or self.recipe.dispatches_once_a_node

    @staticmethod
    def of(
        recipe: Recipe,
        precision: str,
        attention: AttentionKernel | None = None,
        *,
        dispatches_once_a_node: bool = False,
    ) -> Framework:
        """The recipe's framework; without ``attention`` with its flash kernel."""
        kernel = attention or attention_kernel(recipe.flash_kernel)
        return Framework(recipe, precision, kernel, dispatches_once_a_node)
