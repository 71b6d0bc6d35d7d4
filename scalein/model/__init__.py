"""Predict before you deploy: queueing networks, and forecasts of the load.

`Network` answers what a graph of stages does under a load: the greatest rate, utilization, latency, the bottleneck.
`forecast` continues a series of loads, with intervals, by the method that did best on the series itself.
`autoscale` scales a running job by a model and the forecast of its load, or by a policy of others: `Reactive`, `DS2`.
"""

from scalein.model.autoscale import (
    DS2,
    Autoscaler,
    Decision,
    Observation,
    Policy,
    Predictive,
    Reactive,
    autoscale,
    simulate,
)
from scalein.model.forecast import Forecast, forecast
from scalein.model.network import Network, NetworkPrediction, Stage, StagePrediction

__all__ = [
    "DS2",
    "Autoscaler",
    "Decision",
    "Forecast",
    "Network",
    "NetworkPrediction",
    "Observation",
    "Policy",
    "Predictive",
    "Reactive",
    "Stage",
    "StagePrediction",
    "autoscale",
    "forecast",
    "simulate",
]
