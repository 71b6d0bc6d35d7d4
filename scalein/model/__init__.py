"""Predict before you deploy: models of flows, queueing networks, and forecasts of the load.

`profile` runs a flow over a sample and gives a `Model`, which predicts configurations and recommends one.
`Network` answers what a graph of stages does under a load: the greatest rate, utilization, latency, the bottleneck.
`forecast` continues a series of loads, with intervals, by the method that did best on the series itself.
`autoscale` scales a running job by a model and the forecast of its load, or by a policy of others: `Reactive`, `DS2`.
`Cluster` answers, on paper, how many machines a rate needs, what breaks first, and simulates failures and rescales.
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
from scalein.model.calibration import Calibration
from scalein.model.cluster import Cluster, ClusterPrediction, ClusterRun, Footprint, Machine, Need
from scalein.model.forecast import Forecast, forecast
from scalein.model.model import Model
from scalein.model.network import Network, NetworkPrediction, Stage, StagePrediction
from scalein.model.prediction import Plan, Prediction
from scalein.model.profile import profile

__all__ = [
    "DS2",
    "Autoscaler",
    "Calibration",
    "Cluster",
    "ClusterPrediction",
    "ClusterRun",
    "Decision",
    "Footprint",
    "Forecast",
    "Machine",
    "Model",
    "Need",
    "Network",
    "NetworkPrediction",
    "Observation",
    "Plan",
    "Policy",
    "Prediction",
    "Predictive",
    "Reactive",
    "Stage",
    "StagePrediction",
    "autoscale",
    "forecast",
    "profile",
    "simulate",
]
