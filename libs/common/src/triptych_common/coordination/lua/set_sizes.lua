-- Keep the sizes of one item, and drop the oldest items beyond the bound, `max_dropped` at once.
-- KEYS: sizes order    a hash by mm_hash; a list of its mm_hashes, oldest first
-- ARGV: mm_hash value ttl_ms is_due max_items max_dropped

return set_bounded(sizes, order, mm_hash, value, ttl_ms, is_due, max_items, max_dropped)
