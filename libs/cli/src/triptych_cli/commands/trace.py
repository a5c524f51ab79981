"""`trace REQUEST_ID`: the stages of one request."""

from triptych_cli.commands.clients import traces_folder
from triptych_cli.console import fail, out, show_waterfall
from triptych_common.telemetry.trace_reader import read_trace
from triptych_common.telemetry.waterfall import first_token_stages


def trace(request_id: str) -> int:
    """Draw the request's trace; also after the system has been stopped."""
    traces_dir = traces_folder()
    spans = read_trace(traces_dir, request_id)
    if not spans:
        fail(
            f"no trace of {request_id} in {traces_dir} (spans arrive a moment after the answer; not every"
            " request leaves any where OTEL_TRACES_SAMPLER says so)"
        )
        return 1
    show_waterfall(spans)
    if stages := first_token_stages(spans):
        out.print(stages, markup=False, highlight=False)
    return 0
