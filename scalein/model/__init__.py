"""Predict before you deploy: queueing networks, and forecasts of the load.

`Network` answers what a graph of stages does under a load: the greatest rate, utilization, latency, the bottleneck.
`forecast` continues a series of loads, with intervals, by the method that did best on the series itself.
"""

from scalein.model.forecast import Forecast, forecast
from scalein.model.network import Network, NetworkPrediction, Stage, StagePrediction

__all__ = ["Forecast", "Network", "NetworkPrediction", "Stage", "StagePrediction", "forecast"]
