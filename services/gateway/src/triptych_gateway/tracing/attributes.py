"""Names of the request span's attributes, as in OpenTelemetry's conventions for HTTP and generative AI.

The conventions for generative AI are still in development, and Python's package of them marks its constants
as deprecated, since they have moved to a repository of their own. So the names stand here.
"""

from typing import Final

OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_STREAM: Final = "gen_ai.request.stream"
REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
REQUEST_TOP_P: Final = "gen_ai.request.top_p"
REQUEST_TOP_K: Final = "gen_ai.request.top_k"
REQUEST_SEED: Final = "gen_ai.request.seed"
REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
SERVER_TIME_TO_FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"
"""The conventions have it as a metric; as an attribute it is ours, under the metric's name."""

ERROR_TYPE: Final = "error.type"
CLIENT_ADDRESS: Final = "client.address"
URL_SCHEME: Final = "url.scheme"
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"

DECISION: Final = "triptych.decision"
DECISION_REASON: Final = "triptych.decision_reason"
ROUTING: Final = "triptych.routing"
ROUTING_REASON: Final = "triptych.routing_reason"
VERSION: Final = "triptych.version"
VERSION_REASON: Final = "triptych.version_reason"
LOCAL_ENCODE: Final = "triptych.local_encode"
LOCAL_ENCODE_FAILED: Final = "triptych.local_encode_failed"
NUM_ITEMS: Final = "triptych.num_items"
WAY: Final = "triptych.way"
WAY_REASON: Final = "triptych.way_reason"
NUM_STOP_SEQUENCES: Final = "triptych.num_stop_sequences"
