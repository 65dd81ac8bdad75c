"""From a model that can be built to its graph of operators: the only part of the graph that needs torch."""

from planner.graph.tracer.tiers import trace_model, traced_dtype

__all__ = ["trace_model", "traced_dtype"]
