from triptych_common.telemetry.metrics import Metrics


def test_scrape_holds_only_our_metrics() -> None:
    metrics = Metrics()
    metrics.counter("jobs", "Jobs taken.", ["outcome"]).labels("done").inc()
    metrics.gauge("slots", "Slots.").set(2)
    metrics.histogram("encode_s", "Seconds per encode.").observe(0.02)
    text = metrics.render().decode()
    assert 'triptych_jobs_total{outcome="done"} 1.0' in text
    assert "triptych_slots 2.0" in text
    assert 'triptych_encode_s_bucket{le="0.025"} 1.0' in text
    assert "python_info" not in text


def test_two_registries_do_not_clash() -> None:
    for _ in range(2):
        Metrics().counter("jobs", "Jobs taken.")
