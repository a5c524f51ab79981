"""The cheap histogram gives the samples that Prometheus' own one gives."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from triptych_common.telemetry.metrics import PlainHistogram

BOUNDS = (0.01, 0.1, 1.0, 10.0)
VALUES = (0.0, 0.01, 0.011, 0.5, 1.0, 9.0, 10.0, 11.0, 1e6)


def lines(registry: CollectorRegistry) -> set[str]:
    """Of a scrape, without when series were made."""
    return {line for line in generate_latest(registry).decode().splitlines() if "_created" not in line}


def test_its_samples_are_those_of_the_library() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain = PlainHistogram("h", "Text.", ("a", "b"), BOUNDS, ours)
    library = Histogram("h", "Text.", ("a", "b"), buckets=BOUNDS, registry=theirs)
    for labels in (("x", "y"), ("x", 'quote " and \\ and \n')):
        for value in VALUES:
            plain.labels(*labels).observe(value)
            library.labels(*labels).observe(value)
    assert lines(ours) == lines(theirs)
