"""How sizes are printed."""

from triptych_cli.console import format_bytes


def test_bytes_are_shown_with_binary_units() -> None:
    assert [format_bytes(n) for n in (12, 1536, 3 << 20, 5 << 30)] == [
        "12 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
    ]
