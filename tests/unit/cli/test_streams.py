"""How streams are shown."""

from triptych_cli.commands.streams import short


def test_a_digest_is_shown_by_its_beginning() -> None:
    assert short("encode-jobs:" + "0123456789abcdef" * 4) == "encode-jobs:0123456789ab"
    assert short("metadata:prefill_decode-0") == "metadata:prefill_decode-0"
