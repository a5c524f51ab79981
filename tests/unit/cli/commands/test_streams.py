"""How streams are shown."""

from triptych_cli.commands.streams import shorten_digest


def test_a_digest_is_shown_by_its_beginning() -> None:
    assert shorten_digest("encode-jobs:" + "0123456789abcdef" * 4) == "encode-jobs:0123456789ab"
    assert shorten_digest("metadata:prefill_decode-0") == "metadata:prefill_decode-0"
