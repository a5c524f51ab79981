"""The cache_store's client: one session, kept over restarts of the store.

session_state     requests, replies and pushes of one session, matched. Pure
resumption        what a session remembers to survive a restart of the store. Pure
dial              connects to the store's socket, blocking
threaded_session  StoreSession: for inside vLLM, one reader thread
async_session     AsyncStoreSession: the same for asyncio services
"""

from triptych_common.store_session.async_session import AsyncStoreSession, request_within, submit_final
from triptych_common.store_session.session_state import Push
from triptych_common.store_session.threaded_session import StoreSession

__all__ = ["AsyncStoreSession", "Push", "StoreSession", "request_within", "submit_final"]
