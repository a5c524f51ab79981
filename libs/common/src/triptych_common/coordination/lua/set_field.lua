-- Keep one field of a bounded hash, and drop the oldest beyond the bound, `max_dropped` at once.
-- KEYS: hash order    a hash; a list of its fields, oldest first
-- ARGV: field value ttl_ms is_due max_items max_dropped

return set_bounded(hash, order, field, value, ttl_ms, is_due, max_items, max_dropped)
