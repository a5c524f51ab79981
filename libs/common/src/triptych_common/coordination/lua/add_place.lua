-- Note that a store has an entry: one line for each store, the latest last. A store stands there once, and
-- at most `max_places` do.
-- KEYS: entries order    a hash by mm_hash; a list of its mm_hashes, oldest first
-- ARGV: mm_hash store line max_places ttl_ms is_due max_items max_dropped

local kept = {}
for each in string.gmatch(redis.call('HGET', entries, mm_hash) or '', '[^\n]+') do
  if string.match(each, '^%S+') ~= store then kept[#kept + 1] = each end
end
kept[#kept + 1] = line
while #kept > tonumber(max_places) do table.remove(kept, 1) end
return set_bounded(entries, order, mm_hash, table.concat(kept, '\n'), ttl_ms, is_due, max_items, max_dropped)
