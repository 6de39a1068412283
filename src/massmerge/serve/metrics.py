"""Figures for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from massmerge.model.answers import Prediction
from massmerge.serve.batching import Fault

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_UNCLEAR = 0.5  # more likely wrong than right
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The service's figures, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        here = self.registry
        self.requests = Counter(
            "mass_requests", "Requests, by path and status.", ["method", "path", "status"], registry=here
        )
        self.latency = Histogram(
            "mass_request_seconds", "Time from a request to its answer.", ["path"], buckets=_SECONDS, registry=here
        )
        self.batch_size = Histogram("mass_batch_size", "Inputs per batch.", buckets=_SIZES, registry=here)
        self.batch_seconds = Histogram(
            "mass_batch_seconds", "Time of a batch in the model.", buckets=_SECONDS, registry=here
        )
        self.routed = Counter("mass_routed", "Inputs answered, by the task of the answer.", ["task"], registry=here)
        self.confidence = Histogram(
            "mass_confidence", "Probability that task and label are right.", buckets=_SHARES, registry=here
        )
        self.unclear = Counter(
            "mass_unclear", f"Answers with a confidence below {_UNCLEAR}, abstentions included.", registry=here
        )
        self.abstentions = Counter("mass_abstentions", "Inputs that no task fits.", registry=here)
        self.faults = Counter("mass_input_errors", "Inputs that could not be answered.", ["code"], registry=here)
        self.tokens = Counter("mass_tokens", "Tokens of prompts, and of texts written.", ["kind"], registry=here)
        self.queue = Gauge("mass_queue_length", "Inputs in the queue.", registry=here)
        self.sessions = Gauge("mass_sessions", "Sessions that are remembered.", registry=here)
        self.active = Gauge("mass_active_requests", "Requests in progress.", registry=here)
        self.ready = Gauge("mass_ready", "1 when the bundle is loaded and warmed.", registry=here)
        self.reloads = Counter("mass_reloads", "Reloads of the bundle.", ["result"], registry=here)

    def batch(self, size: int, seconds: float) -> None:
        """Note a batch."""
        self.batch_size.observe(size)
        self.batch_seconds.observe(seconds)

    def count(self, results: list[Prediction | Fault]) -> None:
        """Note the answers of a request."""
        for result in results:
            if isinstance(result, Fault):
                self.faults.labels(result.code).inc()
                continue
            if result.confidence is not None:
                self.confidence.observe(result.confidence)
            if result.task is None or (result.confidence is not None and result.confidence < _UNCLEAR):
                self.unclear.inc()
            if result.task is None:
                self.abstentions.inc()
            else:
                self.routed.labels(result.task).inc()

    def count_tokens(self, read: int, written: int) -> None:
        """Note the tokens of a text that was written."""
        self.tokens.labels("prompt").inc(read)
        self.tokens.labels("written").inc(written)

    def text(self) -> bytes:
        """All figures in Prometheus' format."""
        return generate_latest(self.registry)
