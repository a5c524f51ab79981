-- One heartbeat. Returns the record that stood there before. Forgets names of instances whose last heartbeat is
-- older than `before`: the scores are the writers' wall clocks, which need not agree, so an instance that has a
-- record lives, however old its score is.
-- KEYS: record instances
-- ARGV: value ttl_ms instance now before record_prefix
local previous = redis.call('SET', record, value, 'PX', ttl_ms, 'GET')
redis.call('ZADD', instances, now, instance)
for _, name in ipairs(redis.call('ZRANGEBYSCORE', instances, '-inf', before)) do
  if redis.call('EXISTS', record_prefix .. name) == 0 then redis.call('ZREM', instances, name) end
end
return previous
