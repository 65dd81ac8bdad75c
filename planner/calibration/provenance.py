"""How a number that a machine's own timings gave says where it comes from."""

from __future__ import annotations

from hardware_profiles.probes.measurement import ClusterMeasurement
from hardware_profiles.schema import Fit, Quantity


def measured(measurement: ClusterMeasurement, value: float, what: str) -> Quantity:
    """A number that was read off the timings, with tool, cluster and date."""
    return Quantity(value=value, tag="measured", source=_source(measurement, what), date=measurement.date)


def fitted(measurement: ClusterMeasurement, value: float, what: str, num_rows: int) -> Quantity:
    """A number with which a formula of costmodels comes closest to ``num_rows`` timings."""
    source = _source(measurement, what)
    fit = Fit(to="timings of this machine", num_rows=num_rows)
    return Quantity(value=value, tag="fitted", source=source, date=measurement.date, fit=fit)


def _source(measurement: ClusterMeasurement, what: str) -> str:
    num_hosts = len({host.key for host in measurement.hosts})
    return f"{what}; {measurement.tool} on {num_hosts} x {measurement.devices_per_node} ranks"
