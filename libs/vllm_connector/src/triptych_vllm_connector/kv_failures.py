"""Reasons why a decode instance could not continue from a KV cache: EngineCore -> host -> gateway."""

from enum import StrEnum


class KvFailure(StrEnum):
    """Error codes; after any of them the request can be prefilled and decoded again."""

    PREFIX_NOT_HELD = "prefix_not_held"  # no KV cache is here that has all of the request's items
    KV_LOAD_FAILED = "kv_load_failed"  # it could not be read from the instance that has computed it
    KV_TAKEN = "kv_taken"  # another request has read it; its owner has freed it, or is about to


MESSAGES = {
    KvFailure.PREFIX_NOT_HELD: "this instance decodes, and holds no KV cache with all of the prompt's items",
    KvFailure.KV_LOAD_FAILED: "the prompt's KV cache could not be loaded from the instance that computed it",
    KvFailure.KV_TAKEN: "the prompt's KV cache was loaded for another request before: it can be read once",
}
