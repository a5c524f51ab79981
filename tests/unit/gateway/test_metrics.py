"""Series of the gateway's latencies: made once for each combination, and never more than a bound."""

from triptych_gateway.metrics import MAX_MODELS, OTHER, GatewayMetrics


def test_models_beyond_the_bound_share_their_series() -> None:
    metrics = GatewayMetrics()
    for number in range(MAX_MODELS + 10):
        metrics.latencies.of("/r", f"model-{number}", "text").e2e_s.observe(1.0)
    samples = [
        sample
        for family in metrics.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "triptych_gateway_e2e_request_latency_seconds_count"
    ]
    assert len(samples) == MAX_MODELS + 1
    (rest,) = [sample.value for sample in samples if sample.labels["model"] == OTHER]
    assert rest == 10
