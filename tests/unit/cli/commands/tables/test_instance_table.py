"""What `up` and `status` say of instances that serve less than their model."""

from triptych_cli.commands.tables.instance_table import unserved_lines
from triptych_common.protocol.messages import InstanceRecord, Modality, Role


def test_a_modality_that_is_not_served_has_a_line() -> None:
    records = [
        InstanceRecord(instance="encoder-0", boot_id="b", role=Role.ENCODE),
        InstanceRecord(
            instance="encoder-1",
            boot_id="b",
            role=Role.ENCODE,
            unserved_modalities={Modality.VIDEO: "no video fits"},
        ),
    ]
    assert unserved_lines(records) == ["encoder-1 serves no video: no video fits"]
